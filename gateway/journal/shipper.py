"""Ships one slot's journal to SQL, and the workers' own records with it: the schedule, the repetition, and the waiting
callers.

While SQL does not answer the journal grows; it is drained afterwards. The poster (`poster.py`, possibly a process of
its own) writes a record to SQL, and only once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from gateway.base.lifecycle import report_end
from gateway.journal.journal import Journal
from gateway.journal.poster import MAX_RECORDS, Posts
from gateway.journal.unshipped import num_bytes_unshipped
from workers.process.rounds import repeat
from workers.protocol.counts import EngineAck, EngineRecords, ResidencyReport
from workers.protocol.segments import drop_old

log = logging.getLogger(__name__)

EVERY_S = 0.2
REST_AFTER, REST_EVERY_S = 25, 2.0
"""The shipper rests after so many rounds without a record. A record that is written ends the rest at once."""
MAX_BACKOFF_S = 2.0
MAX_OUTAGE_S = 600.0
MAX_BACKLOG_BYTES = 1024**3
MEASURE_EVERY_S = 2.0
"""The time between two measurements of the backlog. They wait for no call to SQL, because one may hang."""
DROP_EVERY_S = 3600.0

T = TypeVar("T")


class ShippingStopped(Exception):
    """SQL took no posting when the shipper was to stop."""


class Shipper:
    """Ships a journal. `start()` begins; `close()` ships what is durable, as far as SQL takes it, and ends. The poster
    stays open.
    """

    def __init__(
        self,
        journal: Journal,
        poster: Posts,
        *,
        max_outage_s: float = MAX_OUTAGE_S,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        shipped: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`shipped` is called with moments of the monotonic clock, in nanoseconds: SQL has what was durable then."""
        self._journal = journal
        self._poster = poster
        self._shipped = shipped
        self._num_posted = self._num_refused = 0
        self._max_outage_s = max_outage_s
        self._max_backlog_bytes = max_backlog_bytes
        self._passed = poster.offset
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """The waiting calls of `caught_up`, in the order of the journal."""
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._num_empty = 0
        """The rounds without a record since the last one."""
        self._records = asyncio.Event()
        """Set when records are written, until a rest has heard of it."""
        journal.on_records = self._records.set
        self._failing_since: float | None = None
        self._posting_since: float | None = None
        """The moment at which the posting under way began."""
        self._backlog_bytes = 0
        self._drop_at = 0.0
        self._mark = (poster.offset, time.monotonic())
        """A record that was durable at that moment. It is chosen anew once SQL has it."""

    @property
    def offset(self) -> int:
        """The last record of the journal that SQL has."""
        return self._poster.offset

    @property
    def num_posted(self) -> int:
        """The number of endings that this process brought into SQL and that were not there before."""
        return self._num_posted

    @property
    def num_refused(self) -> int:
        """The number of endings that SQL would not take from this process, and never will."""
        return self._num_refused

    @property
    def num_unshipped(self) -> int:
        """The number of durable records of the journal that SQL does not have."""
        return max(0, self._journal.durable_seq - self._passed)

    @property
    def lag_s(self) -> float:
        """The seconds for which a durable record has been waiting for SQL, seen once in a round."""
        seq, durable_at = self._mark
        return time.monotonic() - durable_at if self._passed < seq else 0.0

    @property
    def is_failing(self) -> bool:
        """SQL took no posting when it was last asked."""
        return self._failing_since is not None

    @property
    def is_full(self) -> bool:
        """No more requests may be admitted: 1 GiB waits for SQL, or something does and SQL has refused it, or left the call
        without an answer, for 10 min.
        """
        if self._backlog_bytes > self._max_backlog_bytes:
            return True
        since = self._posting_since if self._failing_since is None else self._failing_since
        return since is not None and self.num_unshipped > 0 and time.monotonic() - since > self._max_outage_s

    @property
    def has_failed(self) -> bool:
        """Shipping ended by itself, which only a fault of ours can cause."""
        return self._task is not None and self._task.done() and not self._stop.is_set()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        report_end(self._task)  # `has_failed` takes the gateway out of service: what posts money does not begin again

    async def close(self, limit_s: float = 10.0) -> None:
        """Stops shipping. A transaction under way is not cut off: a cancelled driver may leave something that blocks
        the next one.
        """
        self._stop.set()
        self._ship_soon()
        try:
            async with asyncio.timeout(limit_s):
                if self._task is not None:
                    await asyncio.gather(self._task, return_exceptions=True)
                while await self.ship():
                    pass
        except (TimeoutError, ShippingStopped):
            log.warning(
                "journal %s is not shipped whole; the next process of its slot goes on", self._journal.directory
            )

    async def ship(self) -> int:
        """Ships one transaction's worth. Returns the number of records read; 0 means that nothing durable is left to
        ship.
        """
        asked_ns, durable_seq = time.monotonic_ns(), self._journal.durable_seq
        if durable_seq <= self._passed:
            self._shipped(asked_ns)
            return 0
        self._posting_since = time.monotonic()
        try:
            posted = await self._until_done(lambda: self._poster.post(durable_seq))
        finally:
            self._posting_since = None
        if posted.num_endings:
            self._failing_since = None
        self._num_posted += posted.num_new
        self._num_refused += posted.num_refused
        self._pass(posted.passed)
        if posted.passed >= durable_seq:
            self._shipped(asked_ns)
        return posted.num_records

    async def caught_up(self, *, soon: bool = False) -> None:
        """Returns when every ending that is durable now is in SQL, however long SQL does not answer. With `soon`, the
        shipper does not wait to gather more records first.
        """
        durable_seq = self._journal.durable_seq
        if soon:
            self._ship_soon()
        if self._passed < durable_seq:
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((durable_seq, reached))
            await reached

    def _ship_soon(self) -> None:
        self._hurry.set()
        self._records.set()

    def _pass(self, seq: int) -> None:
        self._passed = seq
        while self._waiting and self._waiting[0][0] <= seq:
            _, reached = self._waiting.popleft()
            if not reached.done():  # its waiter was cancelled
                reached.set_result(None)

    async def keep(self, frame: EngineRecords | ResidencyReport) -> EngineAck | None:
        """Keeps a worker's report and returns the answer to the worker, if it waits for one. Raises ShippingStopped."""
        if isinstance(frame, EngineRecords):
            return await self.post_engine_records(frame)
        try:
            await self._poster.note_residency(frame)
        except (SQLAlchemyError, OSError) as failure:
            # There is only one try: the next report has the same sums, or higher ones.
            log.warning("residency is not noted: %s", failure)
        return None

    async def post_engine_records(self, frame: EngineRecords) -> EngineAck:
        """Posts the workers' own counts; returns after the COMMIT, however long SQL does not answer. Raises
        ShippingStopped.
        """
        try:
            ack = await self._until_done(lambda: self._poster.post_engine_records(frame))
        except asyncio.CancelledError:
            if not self.num_unshipped:  # nobody asks SQL any more, so nobody would hear that the outage is over
                self._failing_since = None
            raise
        self._failing_since = None
        return ack

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            measuring = repeat(MEASURE_EVERY_S, self._measure_backlog, forgives=(Exception,), on_failure=_not_measured)
            measured = tasks.create_task(measuring)
            await self._ship_on()
            measured.cancel()

    async def _ship_on(self) -> None:
        while not self._stop.is_set():
            if self._passed >= self._mark[0]:
                self._mark = (self._journal.durable_seq, time.monotonic())
            try:
                num_records = await self.ship()
            except ShippingStopped:
                return
            self._num_empty = 0 if num_records else self._num_empty + 1
            if num_records == 0:
                await self._drop_old()
            if self._num_empty > REST_AFTER:
                await self._wait(self._records, REST_EVERY_S)
                if self._records.is_set():
                    self._records.clear()
                    self._num_empty = 0
            if num_records < MAX_RECORDS:  # a transaction costs as much as hundreds of its rows
                await self._wait(self._hurry, EVERY_S)
                self._hurry.clear()

    async def _pause(self, seconds: float) -> None:
        """Waits. The wait ends early when the shipper is to stop."""
        await self._wait(self._stop, seconds)

    async def _wait(self, event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    async def _measure_backlog(self) -> None:
        self._backlog_bytes = (
            await asyncio.to_thread(num_bytes_unshipped, self._journal.directory, self._passed)
            if self.num_unshipped
            else 0
        )

    async def _drop_old(self) -> None:
        if time.monotonic() >= self._drop_at:
            self._drop_at = time.monotonic() + DROP_EVERY_S
            try:
                await asyncio.to_thread(drop_old, self._journal.directory, self.offset)
            except OSError as failure:
                log.warning("old segments of %s are not removed yet: %s", self._journal.directory, failure)

    async def _until_done(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats a call with jitter through outages, deadlocks and unknown COMMITs. While stopping, it tries once,
        then raises `ShippingStopped`.
        """
        backoff_s = EVERY_S
        while True:
            began = time.monotonic()
            try:
                return await call()
            except (SQLAlchemyError, OSError) as failure:
                if self._failing_since is None:
                    self._failing_since = began
                    log.warning("SQL takes no postings: %s", failure)
                if self._stop.is_set():
                    raise ShippingStopped from failure
                await self._pause(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


def _not_measured(failure: Exception) -> None:
    log.warning("backlog cannot be measured: %s", failure)
