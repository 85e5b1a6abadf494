"""Changes by others that this process has to learn: rights of keys, prices, registered prefixes and adapters, upstreams.

One number in SQL rises with each of them. It is read each second, so that nothing is missed, and the rest is read when it
has risen. Redis announces what cannot wait for the next reading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import redis.asyncio
from redis.exceptions import RedisError

from accounting.access import api_keys
from accounting.database import auth_epoch
from accounting.database.db import Database
from accounting.prices.prices import next_change_ms
from accounting.tenants import adapters as registered
from accounting.tenants import prefixes
from accounting.values import clock
from gateway.base.lifecycle import ask_sql
from gateway.base.running import Running
from gateway.generation.prefixes import PublicPrefixes
from gateway.generation.served.adapters import AdapterKeeper
from gateway.http.auth import Authenticator
from gateway.http.auth_epoch import EPOCH_EVERY_S, AuthEpoch
from gateway.metering.price_cache import PriceCache
from workers.process.rounds import heed_cancellation

HEARD_AGAIN_S = 1.0
"""The time after which Redis is tried again that was away."""
LISTENED_S = 30.0
"""The time of one wait for a message. A connection that ends is noticed at once."""


async def pull_epoch(
    database: Database, epoch: AuthEpoch, auth: Authenticator, prices: PriceCache, running: Running
) -> None:
    """Reads the version of what keys may do and of prices: it rises with each change, so what was read under it need not
    be read again. Ends the requests that run under an ended key. Running keys are checked each time, because a request may have
    been admitted on what this process remembered when the key ended.
    """

    read_at_ms = 0
    changes_at_ms: int | None = 0
    """No price begins or ends by itself from `read_at_ms` to this moment. None stands for ever, and the 0 makes the first round
    read."""
    version: int | None = None

    def is_over(now_ms: int) -> bool:
        """Returns whether the clock has left that time, be it that it was set back."""
        return now_ms < read_at_ms or (changes_at_ms is not None and changes_at_ms <= now_ms)

    async def pull() -> None:
        nonlocal version
        found = database.data_version()
        if found is None or found != version or running.key_ids or is_over(clock.now_ms()):
            await read()
            version = found
        assert epoch.number is not None
        auth.saw_epoch(epoch.number)
        prices.saw(epoch.number, changes_at_ms)

    async def read() -> None:
        nonlocal read_at_ms, changes_at_ms
        async with database.read() as conn:
            if key_ids := running.key_ids:
                running.end(await api_keys.ended_streams(conn, key_ids))
            number, now_ms = await auth_epoch.auth_epoch(conn), clock.now_ms()
            if number != epoch.number or is_over(now_ms):
                read_at_ms, changes_at_ms = now_ms, await next_change_ms(conn, now_ms)
        epoch.number = number

    await ask_sql(EPOCH_EVERY_S, pull)  # the authenticator knows how long its remembered keys are valid


async def hear_changes(client: redis.asyncio.Redis, hearers: Mapping[str, Sequence[Callable[[], None]]]) -> None:
    """Calls the hearers of a channel at each message on it. They hear sooner than they would look, so a missed message costs a
    second or two.
    """
    while True:
        try:
            async with client.pubsub() as channel:
                await channel.subscribe(*hearers)
                while True:
                    message = await channel.get_message(ignore_subscribe_messages=True, timeout=LISTENED_S)
                    for hear in hearers[message["channel"].decode()] if message else ():
                        hear()
                    heed_cancellation()
        except (RedisError, OSError, TimeoutError):
            heed_cancellation()
            await asyncio.sleep(HEARD_AGAIN_S)


async def pull_prefixes(database: Database, epoch: AuthEpoch, known: PublicPrefixes) -> None:
    async def pull() -> None:
        async with database.read() as conn:
            found = await prefixes.in_force(conn, int(time.time()))
        known.replace(found)

    await epoch.follow(pull)  # a deleted prefix that stays in use costs time, never correctness


async def pull_adapters(database: Database, epoch: AuthEpoch, keeper: AdapterKeeper) -> None:
    async def pull() -> None:
        async with database.read() as conn:
            found = await registered.known(conn, int(time.time()))
        keeper.replace(found)

    await epoch.follow(pull)
