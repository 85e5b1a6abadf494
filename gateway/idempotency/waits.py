"""A repeat waits for the request that runs under its Idempotency-Key, so that it can have that request's answer.

SDKs repeat twice, a second apart, and then give up: without a wait they would lose an answer that takes longer and is
charged. A wait is bounded, and looks into SQL, because another gateway may run the request. No tenant may have more waits
than there is room left for those of all others.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.requests import idempotency_store
from gateway.base.app_keys import DATABASE, LIFECYCLE
from gateway.base.running import Places
from gateway.http.auth import PRINCIPAL

MOST_S = 50.0
"""The longest wait. Many proxies give an answer up of which nothing has come for a minute."""
LOOK_EVERY_S = 0.5
MOST = 64
"""The most waits of a process."""


async def ran_out(request: web.Request, key: str, until: float) -> bool:
    """Waits for the request that runs under the key of this one, until `until` by the monotonic clock at most. Returns
    whether it has ended: the key may be claimed anew, or has an answer.
    """
    tenant_id, draining = request[PRINCIPAL].tenant_id, request.app[LIFECYCLE].draining
    with request.app[REPEAT_WAITS].place(tenant_id) as has_place:
        while has_place and (left_s := until - time.monotonic()) > 0 and not draining.is_set():
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
            try:
                async with request.app[DATABASE].read() as conn:
                    if not await idempotency_store.is_running(conn, tenant_id, key):
                        return True
            except (SQLAlchemyError, OSError):
                return True  # the claim says what is wrong
    return False


REPEAT_WAITS = web.AppKey("repeat_waits", Places)
