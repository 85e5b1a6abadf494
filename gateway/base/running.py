"""The requests that run under each key: how they are ended, and how many there may be or may wait. This module knows no
SQL.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping

from accounting.values.tenant_types import StreamsEnd
from accounting.values.types import Principal
from gateway.base import errors

RETRY_MS = 1_000
End = Callable[[errors.ApiError], None]
"""Ends a request with an error of its own."""


class Running:
    """The requests that hold a worker, by key. A change that ends a key's streams has a version. Requests that began
    under an older version end. So clocks do not matter, and a key that is valid again keeps its new requests.
    """

    def __init__(self) -> None:
        self._ends: defaultdict[str, dict[End, int]] = defaultdict(dict)

    @property
    def key_ids(self) -> Collection[str]:
        return list(self._ends)

    def add(self, principal: Principal, end: End) -> None:
        self._ends[principal.key_id][end] = principal.version

    def discard(self, principal: Principal, end: End) -> None:
        ends = self._ends.get(principal.key_id, {})
        ends.pop(end, None)
        if not ends:
            self._ends.pop(principal.key_id, None)

    def end(self, ended: Mapping[str, StreamsEnd]) -> None:
        """Ends requests, by the ids of their keys, with the refusal that the next request under the key gets."""
        for key_id, why in ended.items():
            for end, began in list(self._ends.get(key_id, {}).items()):
                if began < why.version:
                    end(errors.tenant_closed(why.tenant_status) or errors.access_ended())


class KeyConnections:
    """Counts the concurrent requests of each key in this process; with HTTP/1.1 these are its busy connections. The
    batch runner is exempt, because it bounds itself.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def take(self, principal: Principal | None) -> None:
        """Takes one place for the request. Raises `ApiError` 429."""
        if principal is None or principal.kind == "batch":
            return
        if self._open[principal.key_id] >= self._most:
            raise errors.too_many(
                "This API key has too many requests running at the same time.", RETRY_MS, type="concurrency"
            )
        self._open[principal.key_id] += 1

    def give_back(self, principal: Principal | None) -> None:
        """Gives back what `take` took."""
        if principal is None or principal.kind == "batch":
            return
        self._open[principal.key_id] -= 1
        if not self._open[principal.key_id]:
            del self._open[principal.key_id]


class Places:
    """Places of requests that wait. No tenant may have more of them than are left for all others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = Counter[str]()

    @property
    def num(self) -> int:
        return self._num.total()

    @contextlib.contextmanager
    def place(self, tenant_id: str) -> Iterator[bool]:
        """Holds a place for the length of a block, and yields whether there was one."""
        if self._num[tenant_id] >= self._most - self.num:
            yield False
            return
        self._num[tenant_id] += 1
        try:
            yield True
        finally:
            self._num[tenant_id] -= 1
            self._num += Counter()  # drops tenants without a wait


@contextlib.contextmanager
def one_at_a_time(running: set[str], tenant_id: str, message: str) -> Iterator[None]:
    """Holds a tenant's only place among those that run. Raises `ApiError` 429 with the message if it is taken."""
    if tenant_id in running:
        raise errors.too_many(message, RETRY_MS)
    running.add(tenant_id)
    try:
        yield
    finally:
        running.discard(tenant_id)


class Turns:
    """Turns of tenants at work that takes a thread for long. A tenant has one turn at a time, whatever others do."""

    def __init__(self) -> None:
        self._locks = weakref.WeakValueDictionary[str, asyncio.Lock]()

    @contextlib.asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Waits for the tenant's turn, and holds it for the length of a block."""
        lock = self._locks.setdefault(tenant_id, asyncio.Lock())
        async with lock:
            yield
