"""The auth epoch as this process last read it, and what is read again when it has risen.

It rises with each change of keys, prices, limits and of what is served, in the transaction of the change
(`accounting/database/auth_epoch.py`). So what an operator declares need not be read while nobody changes anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web

from gateway.base.lifecycle import ask_sql

EPOCH_EVERY_S = 1.0


class AuthEpoch:
    def __init__(self) -> None:
        self.number: int | None = None
        """The epoch; None until it was read. `pull_epoch` of `gateway/changes.py` sets it."""

    async def follow(self, read: Callable[[], Awaitable[object]]) -> None:
        """Reads now and soon after each change, until it is cancelled: a change is known after two seconds."""
        await ask_sql(EPOCH_EVERY_S, self.reading(read))

    def reading(self, read: Callable[[], Awaitable[object]]) -> Callable[[], Coroutine[Any, Any, None]]:
        """Returns a round that reads if the epoch is another than before its last reading, or is not known."""
        seen: int | None = None

        async def round() -> None:
            nonlocal seen
            number = self.number  # before the reading: a change that comes meanwhile raises it once more
            if number is None or number != seen:
                await read()
                seen = number

        return round


AUTH_EPOCH = web.AppKey("auth_epoch", AuthEpoch)
