"""SQL for handlers: one transaction, and accounting's refusals in the client's words.

Raises `ApiError`: 404, 400, 403, 409, 413, and 503 while the database cannot be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web
from redis.exceptions import RedisError
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.values.errors import (
    ConflictError,
    InvalidError,
    NameTakenError,
    NoRoomError,
    NotAllowedError,
    NotFoundError,
    TooManyError,
)
from gateway.base import errors
from gateway.base.app_keys import DATABASE, DETACHED, FORGETS, REDIS
from gateway.http.auth import PRINCIPAL
from gateway.limiter.redis_keys import REVOKED_CHANNEL

READ_ONLY = "25006"
"""PostgreSQL's code for a write to a standby, or to a server that was one until now."""
PUBLISH_S = 0.25
NEWS_EVERY_S = 0.25


@asynccontextmanager
async def reading(request: web.Request) -> AsyncIterator[AsyncConnection]:
    with translated():
        async with request.app[DATABASE].read() as conn:
            yield conn


@asynccontextmanager
async def writing(request: web.Request, *, changes_identities: bool = True) -> AsyncIterator[AsyncConnection]:
    """Opens a transaction, committed at the end of the block. If identities or prices may have changed, this process
    forgets those it remembered and tells the other processes to do so. A process that misses the message sees the epoch
    in SQL a second later.
    """
    with translated():
        async with request.app[DATABASE].write() as conn:
            yield conn
    if not changes_identities:
        return
    if request[PRINCIPAL].kind == "operator":
        await _announce(request.app)
    else:
        await request.app[NEWS_OF_TENANTS].tell()


async def _announce(app: web.Application) -> None:
    for forget in app[FORGETS]:
        forget()
    try:
        async with asyncio.timeout(PUBLISH_S):
            await app[REDIS].publish(REVOKED_CHANNEL, "")
    except (RedisError, OSError, TimeoutError):
        pass  # the message is only the faster way: the epoch is committed


class NewsOfTenants:
    """Announces what tenants change, together and not all the time: each announcement costs every process a lookup of
    every key in use.
    """

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._next: asyncio.Task[None] | None = None
        self._not_before = 0.0

    async def tell(self) -> None:
        """Returns when what is committed by now has been announced."""
        if self._next is None:
            self._next = self._app[DETACHED].spawn(self._tell(), "news of tenants")
        await asyncio.shield(self._next)

    async def _tell(self) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._not_before - clock())
        self._next, self._not_before = None, clock() + NEWS_EVERY_S
        await _announce(self._app)


NEWS_OF_TENANTS = web.AppKey("news_of_tenants", NewsOfTenants)


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except NotFoundError:
        raise errors.not_found() from None  # one body for unknown and foreign objects
    except InvalidError as error:
        raise errors.invalid(str(error), error.param) from None
    except NotAllowedError as error:
        raise errors.forbidden("beyond_own_key", str(error)) from None
    except NoRoomError as error:
        raise errors.too_large(str(error)) from None
    except TooManyError as error:
        raise errors.too_many(str(error), 60_000, type="concurrency") from None
    except NameTakenError as error:
        raise errors.conflict(str(error), "name_taken") from None
    except ConflictError as error:
        raise errors.conflict(str(error)) from None
    except exc.DataError as error:
        # PostgreSQL's driver takes no text with a null character, which SQLite compares and stores as any other.
        if "NUL" not in str(error.orig):
            raise
        raise errors.invalid("A text must not contain a null character.") from None
    except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError, OSError) as error:
        raise errors.unavailable("database_unavailable", "The database cannot be asked now.") from error
    except exc.InternalError as error:
        if getattr(error.orig, "sqlstate", "") != READ_ONLY:
            raise
        raise errors.unavailable("database_unavailable", "The database cannot be asked now.") from error
