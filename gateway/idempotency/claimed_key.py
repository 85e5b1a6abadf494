"""An Idempotency-Key that a request has claimed. The request is charged if and only if its answer is stored under the
key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.database import sealing
from accounting.database.db import Database
from accounting.requests import idempotency_store
from accounting.values.types import Posting
from gateway.base import errors

STORE_ATTEMPTS, STORE_BACKOFF_S = 6, 0.25
DECIDE_EVERY_S = 2.0


class ClaimedKey:
    """A claimed key; `store` or `drop` ends the claim."""

    def __init__(self, database: Database, tenant_id: str, key: str, request_id: str, data_key: bytes) -> None:
        self._database = database
        self._tenant_id = tenant_id
        self._key = key
        self._request_id = request_id
        self._data_key = data_key
        self.is_stored = False

    async def store(self, body: bytes, postings: Sequence[Posting], content_type: str | None = None) -> bool:
        """Stores the answer and the postings that pay for it in one transaction. Returns False if the key was closed
        meanwhile; the request must then not be charged. Raises what SQL raises.
        """
        sealed = sealing.seal(self._data_key, body, self._key.encode())
        for attempt in range(STORE_ATTEMPTS):
            try:
                async with self._database.write() as conn:
                    self.is_stored = await idempotency_store.store(
                        conn,
                        self._tenant_id,
                        self._key,
                        request_id=self._request_id,
                        status=200,
                        body=sealed,
                        postings=postings,
                        content_type=content_type,
                    )
                return self.is_stored
            except (SQLAlchemyError, OSError):
                # It is unknown whether the transaction was committed; storing twice equals storing once.
                if attempt == STORE_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(STORE_BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def decide(self, request_ids: Collection[str]) -> dict[str, Posting]:
        """Finds out what a failed `store` has done, as soon as SQL answers. The key is dropped unless the answer is
        stored, so that none can come later. Returns the postings of a stored answer by request, else nothing.
        """
        wait_s = STORE_BACKOFF_S
        while True:
            try:
                async with self._database.write() as conn:
                    await idempotency_store.drop(conn, self._tenant_id, self._key, self._request_id)
                    return await idempotency_store.postings(conn, request_ids)
            except (SQLAlchemyError, OSError):
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, DECIDE_EVERY_S)

    async def drop(self) -> None:
        """Drops the key because there is no answer to keep: it may be used again."""
        async with self._database.write() as conn:
            await idempotency_store.drop(conn, self._tenant_id, self._key, self._request_id)


def not_stored(line: bool) -> errors.ApiError:
    """Returns the error for an answer that could not be stored and is therefore not delivered."""
    return line_ended() if line else errors.internal()


def line_ended() -> errors.ApiError:
    return errors.ApiError(
        409, "This batch line has ended.", code="batch_line_ended", headers={"x-should-retry": "false"}
    )


CLAIMED_KEY = web.RequestKey("claimed_key", ClaimedKey)
"""A request has this only if it carries an Idempotency-Key that it runs under."""
