"""An Idempotency-Key that is a request's to run. What is stored under it is charged, and nothing else is."""

from __future__ import annotations

import asyncio

from sqlalchemy.exc import SQLAlchemyError

from accounting import replies, sealing
from accounting.db import Database
from accounting.types import Posting
from gateway import errors

STORE_ATTEMPTS, STORE_BACKOFF_S = 6, 0.25


class ClaimedKey:
    """Ours to run; `store` or `drop` ends it."""

    def __init__(
        self, database: Database, tenant_id: str, key: str, request_id: str, data_key: bytes
    ) -> None:
        self._database = database
        self._tenant_id = tenant_id
        self._key = key
        self._request_id = request_id
        self._data_key = data_key
        self.is_stored = False

    async def store(self, body: bytes, posting: Posting) -> bool:
        """False: the key was closed meanwhile, and the request must not be charged. Raises what SQL raises."""
        sealed = sealing.seal(self._data_key, body, self._key.encode())
        for attempt in range(STORE_ATTEMPTS):
            try:
                async with self._database.write() as conn:
                    self.is_stored = await replies.store(
                        conn, self._tenant_id, self._key, request_id=self._request_id, status=200, body=sealed,
                        posting=posting,
                    )  # fmt: skip
                return self.is_stored
            except (SQLAlchemyError, OSError):
                # Whether it was committed is unknown; storing twice is storing once. Given up, the request has no
                # end in the journal, and the next replay knows which one it must have.
                if attempt == STORE_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(STORE_BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def drop(self) -> None:
        """Nothing to keep: the key may run again."""
        async with self._database.write() as conn:
            await replies.drop(conn, self._tenant_id, self._key, self._request_id)


def line_ended() -> errors.ApiError:
    return errors.ApiError(
        409,
        "This batch line has ended.",
        code="batch_line_ended",
        headers={"x-should-retry": "false"},
    )
