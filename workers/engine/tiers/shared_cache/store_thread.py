"""The thread that talks to a store, so that the engine never waits for one. It has bounded queues for jobs, and a queue
of results.

Drops go first: until a drop is done nothing is read, and one that fails is tried again until it is done. Reads follow,
because attempts wait for them, then writes. A job that finds its queue full is dropped and counted. A store only saves
time, so nothing is lost with it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workers.engine.tiers.shared_cache.store import Store, StoreAway
from workers.engine.tiers.shared_cache.value import Fault, Refused, seal, unseal

logger = logging.getLogger(__name__)

MAX_QUEUED = 64
"""Largest number of queued reads, and of queued writes."""
RETRY_S = 1.0
"""Seconds for which a store is not used after it did not answer."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tokens that are stored together, and where they are stored."""

    region: str
    name: str
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A read of groups in order. It ends at the first group that is not found."""

    groups: Sequence[Group]
    num_bytes: Sequence[int]
    """Bytes of KV in each group."""


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    owner: str
    group: Group
    kv: Callable[[], bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """Everything that an owner wrote is dropped."""

    owner: str


@dataclass(slots=True)
class Done:
    job: Read | Write
    found: list[memoryview] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True)
class SharedCounts:
    """Counts since the process began. The store's thread writes them, and any thread reads them."""

    num_found: int = 0
    """Number of groups that were found."""
    num_missed: int = 0
    num_written: int = 0
    num_bytes_read: int = 0
    num_bytes_written: int = 0
    num_dropped: int = 0
    """Number of jobs that were dropped because their queue was full, or because too much that was read is not taken in."""
    num_away: int = 0
    """Number of calls that the store did not answer."""
    refused: Counter[Fault] = field(default_factory=Counter)


class StoreThread:
    def __init__(self, store: Store, secret: bytes, identity: bytes) -> None:
        self.counts = SharedCounts()
        self.results: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._store, self._secret, self._identity = store, secret, identity
        self._drops: deque[Drop] = deque()
        self._reads: deque[Read] = deque()
        self._writes: deque[Write] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._away_until = 0.0
        self._thread = threading.Thread(target=self._run, name="shared-cache", daemon=True)
        self._thread.start()

    def ask(self, job: Read | Write) -> bool:
        """Queues a job. Returns False if its queue is full; then there will be no result."""
        with self._changed:
            waiting: deque[Read] | deque[Write]
            waiting = self._reads if isinstance(job, Read) else self._writes
            if len(waiting) >= MAX_QUEUED:
                self.counts.num_dropped += 1
                return False
            waiting.append(job)  # type: ignore[arg-type]  # each has its queue
            self._changed.notify()
        return True

    def drop(self, drop: Drop) -> None:
        with self._changed:
            for write in [w for w in self._writes if w.owner == drop.owner]:
                self._writes.remove(write)
                self.results.put(Done(write))
            self._drops.append(drop)
            self._changed.notify()

    def close(self, wait_s: float = 5.0) -> None:
        """Ends the thread. A value that is being written is written, and queued jobs are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(wait_s)

    # --- the thread ---

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._do(job)
            except Exception:  # the thread must live: the engine waits for a result, and a drop is tried again
                logger.exception("a job of the shared cache failed", extra={"event": "shared_cache_failed"})
                self._leave()
                if not isinstance(job, Drop):
                    self.results.put(Done(job))
        self._store.close()

    def _do(self, job: Drop | Read | Write) -> None:
        if isinstance(job, Drop):
            self._drop(job)
        elif isinstance(job, Read):
            self._read(job)
        else:
            self._write(job)

    def _next(self) -> Drop | Read | Write | None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._drops and now >= self._away_until:
                    return self._drops[0]
                if self._reads:
                    return self._reads.popleft()
                if self._writes:
                    return self._writes.popleft()
                self._changed.wait(max(0.0, self._away_until - now) if self._drops else None)
        return None

    def _drop(self, drop: Drop) -> None:
        if self._reached(lambda: self._store.drop_owner(drop.owner)):
            with self._changed:
                self._drops.popleft()

    def _read(self, read: Read) -> None:
        begun_at, done = time.perf_counter(), Done(read)
        for group, num_bytes in zip(read.groups, read.num_bytes, strict=True):
            kv = None if self._drops else self._get(group, num_bytes)
            if kv is None:
                self.counts.num_missed += 1
                break
            self.counts.num_found += 1
            self.counts.num_bytes_read += num_bytes
            done.found.append(kv)
        done.seconds = time.perf_counter() - begun_at
        self.results.put(done)

    def _get(self, group: Group, num_bytes: int) -> memoryview | None:
        found: list[bytes | None] = []
        if not self._reached(lambda: found.append(self._store.get(group.region, group.name))):
            return None
        if (data := found[0]) is None:
            return None
        try:
            return unseal(self._secret, self._identity, group.name, group.tokens, num_bytes, data)
        except Refused as refused:
            self.counts.refused[refused.fault] += 1
            logger.warning(
                "a value of the shared cache is refused: %s",
                refused.fault,
                extra={"event": "shared_cache_refused", "fault": refused.fault},
            )
            return None

    def _write(self, write: Write) -> None:
        group = write.group

        def run() -> None:
            value = seal(self._secret, self._identity, group.name, group.tokens, write.kv())
            self._store.put(write.owner, group.region, group.name, value)
            self.counts.num_written += 1
            self.counts.num_bytes_written += len(value)

        self._reached(run)
        self.results.put(Done(write))

    def _reached(self, run: Callable[[], None]) -> bool:
        """Runs a call to the store. Returns False if the store does not answer, or did not within the last `RETRY_S`
        seconds."""
        if time.monotonic() < self._away_until:
            return False
        try:
            run()
        except StoreAway as error:
            self._leave()
            logger.warning("the shared cache is away: %s", error, extra={"event": "shared_cache_away"})
            return False
        return True

    def _leave(self) -> None:
        """Leaves the store alone for `RETRY_S` seconds."""
        self.counts.num_away += 1
        self._away_until = time.monotonic() + RETRY_S
