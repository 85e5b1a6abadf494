"""An Idempotency-Key that is a request's to run. What is stored under it is charged, and nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.database import sealing
from accounting.database.db import Database
from accounting.requests import idempotency_store as replies
from accounting.values.types import Posting
from gateway.base import errors

STORE_ATTEMPTS, STORE_BACKOFF_S = 6, 0.25


class ClaimedKey:
    """Ours to run; `store` or `drop` ends it."""

    def __init__(self, database: Database, tenant_id: str, key: str, request_id: str, data_key: bytes) -> None:
        self._database = database
        self._tenant_id = tenant_id
        self._key = key
        self._request_id = request_id
        self._data_key = data_key
        self.is_stored = False

    async def store(self, body: bytes, postings: Sequence[Posting], content_type: str | None = None) -> bool:
        """False: the key was closed meanwhile, and the request must not be charged. Raises what SQL raises."""
        sealed = sealing.seal(self._data_key, body, self._key.encode())
        for attempt in range(STORE_ATTEMPTS):
            try:
                async with self._database.write() as conn:
                    self.is_stored = await replies.store(
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


class StoredWithPostings:
    """The one step in which an answer is stored with all postings that pay for it: who comes last takes it, the others
    wait. Whatever comes of it is the same for all."""

    def __init__(self, request_ids: Sequence[str], store: Callable[[Sequence[Posting]], Awaitable[bool]]) -> None:
        self._request_ids = request_ids
        self._store = store
        self._postings: dict[str, Posting] = {}
        self._stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def keep(self, posting: Posting) -> bool:
        self._postings[posting.request_id] = posting
        if len(self._postings) == len(self._request_ids):
            try:
                stored = await self._store([self._postings[name] for name in self._request_ids])
                self._stored.set_result(stored)
            except (SQLAlchemyError, OSError) as error:
                self._stored.set_exception(error)
        return await self._stored


async def not_kept(posting: Posting) -> bool:
    """Of a request with a key, before its answer is there: it is not charged."""
    return False


def not_stored(line: bool) -> errors.ApiError:
    """The answer could not be kept, so there is none."""
    return line_ended() if line else errors.internal()


def line_ended() -> errors.ApiError:
    return errors.ApiError(
        409, "This batch line has ended.", code="batch_line_ended", headers={"x-should-retry": "false"}
    )


CLAIMED_KEY = web.RequestKey("claimed_key", ClaimedKey)
"""A request has it only if it carries an Idempotency-Key that it runs under."""
