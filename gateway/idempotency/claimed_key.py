"""An Idempotency-Key that a request has claimed. The request is charged if and only if its answer is stored under the
key.
"""

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
    """A claimed key; `store` or `drop` ends the claim."""

    def __init__(self, database: Database, tenant_id: str, key: str, request_id: str, data_key: bytes) -> None:
        self._database = database
        self._tenant_id = tenant_id
        self._key = key
        self._request_id = request_id
        self._data_key = data_key
        self.is_stored = False

    async def store(self, body: bytes, postings: Sequence[Posting], content_type: str | None = None) -> bool:
        """Stores the answer. Returns False if the key was closed meanwhile; the request must then not be charged.
        Raises what SQL raises.
        """
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
                # It is unknown whether the transaction was committed; storing twice equals storing once. If every try
                # fails, the request has no ending in the journal, and the next replay knows which one it must have.
                if attempt == STORE_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(STORE_BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def drop(self) -> None:
        """Drops the key because there is no answer to keep: it may be used again."""
        async with self._database.write() as conn:
            await replies.drop(conn, self._tenant_id, self._key, self._request_id)


class StoredWithPostings:
    """The one step in which an answer is stored with all postings that pay for it. The last caller takes it and the
    others wait. The result is the same for all.
    """

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
    """Refuses to keep a posting of a keyed request before its answer is there: it is not charged."""
    return False


def not_stored(line: bool) -> errors.ApiError:
    """Returns the error for an answer that could not be stored and is therefore not delivered."""
    return line_ended() if line else errors.internal()


def line_ended() -> errors.ApiError:
    return errors.ApiError(
        409, "This batch line has ended.", code="batch_line_ended", headers={"x-should-retry": "false"}
    )


CLAIMED_KEY = web.RequestKey("claimed_key", ClaimedKey)
"""A request has this only if it carries an Idempotency-Key that it runs under."""
