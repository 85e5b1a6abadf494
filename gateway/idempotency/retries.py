"""An SDK's own repeat of a request whose answer did not begin: it is recognised by key and body, and only one of the
two is paid.

Only endings are reported here, after their settlement, and nothing waits for it: if SQL does not answer, the charge
stands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.requests import sdk_retries
from accounting.requests.sdk_retries import DisconnectedEarly
from accounting.values import clock
from accounting.values.types import Principal

logger = logging.getLogger(__name__)

MOVE_EVERY_S = 2.0
EAGER_S, OTHERS_EVERY_S = 60.0, 30.0
"""This process looks each time for so long after it reported a repeat, since both charges have to be in the ledger.
Otherwise it looks for those of others, such as a gateway that was killed.
"""


@dataclass(frozen=True)
class SdkRetry:
    """One HTTP request without an Idempotency-Key."""

    id: str
    principal: Principal
    fingerprint: Callable[[], bytes]
    """Returns the fingerprint. It is made only when the request may have to be recognised."""
    is_retry: bool
    started_at_ms: int

    @classmethod
    def of(
        cls, request_id: str, principal: Principal, headers: Mapping[str, str], fingerprint: Callable[[], bytes]
    ) -> SdkRetry:
        count = headers.get("x-stainless-retry-count", "")
        is_retry = count.isascii() and count.isdigit() and len(count) <= 4 and int(count) >= 1
        return cls(request_id, principal, fingerprint, is_retry, clock.now_ms())


class Retries:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._eager_until = 0.0
        self._look_at = 0.0

    async def ended(self, attempt: SdkRetry, charged: Sequence[str], *, unheard: bool) -> None:
        """Reports an ending. `charged` lists those of its engine requests that were charged. `unheard` means that its
        client left before the first byte.
        """
        if not charged or not (attempt.is_retry or unheard):
            return
        if attempt.is_retry:
            self._eager_until = time.monotonic() + EAGER_S
        key_id, fingerprint = attempt.principal.key_id, attempt.fingerprint()
        try:
            async with self._database.write() as conn:
                if attempt.is_retry:
                    await sdk_retries.replace(conn, key_id, fingerprint, attempt.id, attempt.started_at_ms)
                if unheard:
                    tenant_id, now_ms = attempt.principal.tenant_id, clock.now_ms()
                    await sdk_retries.note(
                        conn,
                        [DisconnectedEarly(r, attempt.id, tenant_id, key_id, fingerprint, now_ms) for r in charged],
                    )
        except (SQLAlchemyError, OSError) as error:
            logger.warning("a repeated request may be charged twice: %s", error)

    async def move(self) -> None:
        """Moves the charges of attempts that were repeated, as far as the ledger has both. Raises what SQL raises."""
        now = time.monotonic()
        if now >= self._eager_until and now < self._look_at:
            return
        self._look_at = now + OTHERS_EVERY_S
        async with self._database.read() as conn:
            if not await sdk_retries.any_to_move(conn):
                return
        async with self._database.write() as conn:
            for request_id in await sdk_retries.move(conn):
                logger.info("a repeat has paid for %s", request_id)


RETRIES = web.AppKey("retries", Retries)
SDK_RETRY = web.RequestKey("attempt", SdkRetry)
"""Only a tenant's request without an Idempotency-Key has this."""
