"""Ends requests that were admitted: durably in the journal, or in SQL where the journal has failed; then the limiter hears of it.

What has begun ends whatever becomes of its caller, and `drain` waits for it. The common way wakes no task: the journal's answer
calls what follows. It does not decide what an ending costs (`settlement.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.requests import idempotency_store, request_postings
from accounting.values.types import Charge, Posting, Usage
from gateway.base.lifecycle import count_fault
from gateway.journal.journal import Journal, JournalPoisoned
from gateway.limiter.limits import Limiter
from gateway.limiter.rules import LimitSubject
from gateway.metering.metering_metrics import MeteringMetrics

log = logging.getLogger(__name__)

REPEATS_S = (0.0, *[1.0] * 30)
"""The waits after each time that neither the journal nor SQL took an ending, while its client waits."""
LATE_EVERY_S = 5.0
"""The wait before each later try."""


class Settled(msgspec.Struct, frozen=True):
    charge_micro_units: int
    currency: str
    price_version: str
    usage: Usage
    """The usage that was billed."""

    @classmethod
    def of(cls, posting: Posting) -> Settled:
        return cls(posting.charge.total, posting.currency, posting.price_version, posting.usage)


Noted = Callable[[Settled], None]


class _Ending(msgspec.Struct, frozen=True):
    holder: LimitSubject
    posting: Posting
    noted: Noted | None
    ended: asyncio.Future[Settled]

    def conclude(self) -> None:
        """Tells whoever waits."""
        settled = Settled.of(self.posting)
        try:
            if self.noted is not None:
                self.noted(settled)
        except Exception as fault:  # noqa: BLE001 - whoever waits hears of it
            self.fail(fault)
            return
        if not self.ended.done():  # its waiter was cancelled
            self.ended.set_result(settled)

    def fail(self, failure: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(failure)


class Endings:
    def __init__(self, journal: Journal, limiter: Limiter, database: Database, metrics: MeteringMetrics) -> None:
        self._journal = journal
        self._limiter = limiter
        self._database = database
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_unwritten = 0
        """Endings that the journal has not answered yet."""
        self._owed: list[str] = []
        """Requests that ended in this turn of the loop, and of which the limiter has not heard."""
        self._is_quiet = asyncio.Event()
        """Set while both are none."""
        self._is_quiet.set()
        self._is_closing = False

    def end(self, holder: LimitSubject, posting: Posting, noted: Noted | None = None) -> asyncio.Future[Settled]:
        """Ends a request durably, whatever becomes of the future. `noted` is called in the loop before the future has its
        result. The future raises what `noted` and `record` raise.
        """
        ended: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        ending = _Ending(holder, posting, noted, ended)
        try:
            self._journal.begin_end(posting, partial(self._on_answer, ending))
        except JournalPoisoned:
            self.detach(self._record_otherwise(ending))
        else:
            self._num_unwritten += 1
            self._is_quiet.clear()
        return ended

    def detach(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs work to its end in a task, whether the caller stays or not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    async def drain(self) -> None:
        """Waits until every ending that began is written. What nothing takes is left to the next start."""
        self._is_closing = True
        while self._tasks or not self._is_quiet.is_set():
            await self._is_quiet.wait()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def record(self, posting: Posting) -> None:
        """Makes a posting durable: in the journal, or, if that has failed, in SQL at once. If neither takes it, both are
        asked again for half a minute. Raises what SQL raised last, SQLAlchemyError or OSError.
        """
        for wait_s in REPEATS_S:
            try:
                await self._record(posting)
                return
            except (SQLAlchemyError, OSError) as reason:
                log.warning("neither the journal nor SQL takes an ending: %s", reason)
            await self._journal.revive()
            await asyncio.sleep(wait_s)
        await self._record(posting)

    async def record_late(self, posting: Posting) -> Posting | None:
        """Ends a request that `record` gave up, and whose client was told an error instead of its answer: it is free. Returns
        the ending, or None if nothing has taken it when the gateway ends.
        """
        while True:
            await asyncio.sleep(LATE_EVERY_S)
            try:
                if posting.kind == "settle" and posting.outcome == "ok":
                    return await self._record_free(posting)
                await self._record(posting)
                return posting
            except Exception as failure:  # noqa: BLE001 - whatever it was, the reservation is held until this succeeds
                log.warning("nothing takes an ending yet: %r", failure)
                if self._is_closing:
                    return None

    async def _record(self, posting: Posting) -> None:
        try:
            await self._journal.end(posting)
        except JournalPoisoned:
            async with self._database.write() as conn:
                refused = await request_postings.post_unshipped(conn, [posting])
            self._journal.forget(posting.request_id)
            if refused:
                self._metrics.refused()
                return
        self._metrics.charged(posting)

    async def _record_free(self, unpaid: Posting) -> Posting:
        """Ends a request without a charge, in SQL: the journal that failed may have the SETTLE all the same, and what comes to
        the ledger second counts for nothing. If the SETTLE came first, it is taken back. An answer that is stored under an
        Idempotency-Key can still be fetched, and is paid.
        """
        request_id = unpaid.request_id
        free = msgspec.structs.replace(
            unpaid, kind="void", outcome="internal", write_off="internal", usage=Usage(), charge=Charge(0, 0, 0, 0, 0)
        )
        async with self._database.write() as conn:
            ending = (await idempotency_store.postings(conn, [request_id])).get(request_id, free)
            refused = await request_postings.post_unshipped(conn, [ending])
            if ending is free:
                await request_postings.reverse(conn, [request_id], "internal")
        self._journal.forget(request_id)
        if refused:
            self._metrics.refused()
        else:
            self._metrics.charged(ending)
        return ending

    def _on_answer(self, ending: _Ending, failure: JournalPoisoned | None) -> None:
        self._num_unwritten -= 1
        try:
            if failure is not None:
                self.detach(self._record_otherwise(ending))
                return
            self._give_back(ending)
            self._metrics.charged(ending.posting)
        except Exception as fault:  # noqa: BLE001 - whoever waits hears of it
            ending.fail(fault)
        else:
            ending.conclude()
        finally:
            self._look_if_quiet()

    async def _record_otherwise(self, ending: _Ending) -> None:
        """Ends a request although the journal has failed."""
        try:
            await self.record(ending.posting)
        except (SQLAlchemyError, OSError) as failure:
            log.error("an ending failed", exc_info=failure, extra={"request_id": ending.posting.request_id})
            ending.fail(failure)
            # A ledger may get the charge all the same: until then the reservation is held.
            if (written := await self.record_late(ending.posting)) is not None:
                self._give_back(msgspec.structs.replace(ending, posting=written))
        except Exception as fault:  # whoever waits hears of it, and so does the log
            self._give_back(ending)
            ending.fail(fault)
            raise
        else:
            self._give_back(ending)
            ending.conclude()

    def _give_back(self, ending: _Ending) -> None:
        """Tells the limiter, with all other endings of this turn of the loop."""
        posting = ending.posting
        if posting.kind == "void":
            self._limiter.owe_release(ending.holder)
        else:
            counted = posting.usage.cache_write + posting.usage.uncached
            self._limiter.owe_settle(ending.holder, posting.charge.total, counted, posting.usage.output)
        self._owed.append(posting.request_id)
        if len(self._owed) == 1:
            self._is_quiet.clear()
            asyncio.get_running_loop().call_soon(self._pay, context=Context())  # it is of no one request

    def _pay(self) -> None:
        owed, self._owed = self._owed, []
        self.detach(self._limiter.pay_together(owed))
        self._look_if_quiet()

    def _look_if_quiet(self) -> None:
        if not self._num_unwritten and not self._owed:
            self._is_quiet.set()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            count_fault("ending", failure)
            log.error("an ending failed", exc_info=failure)
