"""A store in Redis or Valkey. Values expire, and one script keeps those of all workers within a bound of bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from workers.engine.tiers.shared_cache.store import Bounds, StoreAway
from workers.protocol import registry

TIMEOUT_S = 1.0
_SCRIPTS = Path(__file__).parent / "lua"
_BOOKS = [registry.SHARED_ORDER, registry.SHARED_SIZES, registry.SHARED_TOTAL]


class RedisStore:
    def __init__(self, url: str, bounds: Bounds) -> None:
        self._bounds = bounds
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            # A server that has become a replica is left for the one that a new connection leads to.
            retry_on_error=[redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError],
        )
        self._put, self._drop = (
            self._client.register_script((_SCRIPTS / name).read_text(encoding="ascii"))
            for name in ("put.lua", "drop.lua")
        )

    def get(self, region: str, name: str) -> bytes | None:
        with _away():
            found = self._client.get(f"{registry.SHARED_ENTRY}{region}:{name}")
        assert found is None or isinstance(found, bytes)
        return found

    def put(self, owner: str, region: str, name: str, value: bytes) -> None:
        bounds = self._bounds
        with _away():
            taken = self._put(
                [*_BOOKS, registry.SHARED_OWNER + owner],
                [value, region, name, bounds.ttl_s, bounds.num_bytes, registry.SHARED_ENTRY, registry.SHARED_REGION],
            )
        if not taken:
            raise StoreAway("a value is larger than the store")

    def drop_owner(self, owner: str) -> None:
        key = registry.SHARED_OWNER + owner
        with _away():
            regions = cast("set[bytes]", self._client.smembers(key))
            for region in (str(found, "ascii") for found in regions):
                self._drop([*_BOOKS, registry.SHARED_REGION + region, key], [region, registry.SHARED_ENTRY])

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except (redis.exceptions.RedisError, OSError) as error:
        raise StoreAway(str(error)) from error
