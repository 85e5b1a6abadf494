"""Runs one claimed chunk in one event loop: it sends the lines to the gateway and writes their answers to SQL.

The claim is the right to write. Every transaction renews it, and a run whose claim is lost ends without further writes.
Lines that are unfinished when the run ends go back to the queue: the next claimer begins with the lines that are not
terminal.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import batch_lines, batch_runs, batches, claims
from accounting.batches.batch_lines import LineEnd
from accounting.batches.claims import ChunkClaim, ClaimLost
from accounting.batches.file_store import Reader
from accounting.batches.order import PackedLine, unpack
from accounting.database import sealing
from accounting.database.db import Database
from accounting.requests import idempotency_store
from accounting.values.types import Usage
from workers.jobs.base.settings import JobsSettings
from workers.jobs.base.tally import Tally
from workers.jobs.batches import fairness
from workers.jobs.batches.line import Answered, Closed, Failed, Later, Outcome, Sender, Stopped
from workers.jobs.batches.pace import Pace

Left = Literal["done", "lost", "given_back", "paused"]

MAX_FAILURES = 3
ALONE_CRASHES, MAX_CRASHES = 2, 3
"""A line whose runner died twice runs alone. After the third time it is not run any more."""
QUARANTINED = "line_quarantined"
"""The error code of a line that is not run any more."""
MAX_STARTED = 32
FLUSH_LINES, FLUSH_S = 32, 0.2


class InputLine(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


@dataclass
class _Line:
    place: PackedLine
    failures: int = 0
    crashes: int = 0
    not_before: float = 0.0
    custom_id: str = ""
    body: bytes = b""
    started_in: int = 0
    """The round of the pace in which the line was started."""
    last: Failed | None = None

    @property
    def no(self) -> int:
        return self.place.line_no


@dataclass
class _Buffer:
    """Ends of lines that are not written yet."""

    ends: list[LineEnd] = field(default_factory=list)
    exhausted: list[_Line] = field(default_factory=list)
    since: float = 0.0

    def __len__(self) -> int:
        return len(self.ends) + len(self.exhausted)


class ChunkRunner:
    def __init__(
        self,
        settings: JobsSettings,
        database: Database,
        held: ChunkClaim,
        reader: Reader,
        data_key: bytes,
        sender: Sender,
        is_draining: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._database = database
        self._held = held
        self._reader = reader
        self._data_key = data_key
        self._sender = sender
        self._is_draining = is_draining
        self._pace = Pace()
        self._tally = Tally(settings.counts_file)
        self._pending: list[_Line] = []
        self._tasks: dict[asyncio.Task[Outcome], _Line] = {}
        self._buffer = _Buffer()
        self._usage = Usage()
        self._failures: dict[int, int] = {}
        self._must_leave: Literal["", "given_back", "paused"] = ""
        self._looked = self._renewed = self._began = time.monotonic()

    async def run(self) -> Left:
        try:
            await self._resume()
            while (self._pending or self._tasks) and not self._must_leave:
                await self._start_lines()
                await self._take_answers(self._nap_s())
                await self._flush_if_due()
                await self._look_if_due()
            return await self._leave()
        except ClaimLost:
            self._tally.add("fence_reject")
            return "lost"
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    # Starting lines

    async def _resume(self) -> None:
        """Sets the pending lines: the chunk's lines without its terminal rows. A line that crashed its runner too often
        ends here."""
        async with self._database.read() as conn:
            states = await batch_lines.line_states(conn, self._held)
        for place in unpack(self._held.lines):
            state = states.get(place.line_no)
            if state is not None and state.state != "started":
                continue
            line = _Line(place)
            if state is not None:
                line.failures, line.crashes = state.failures, state.crashes
            if line.crashes >= MAX_CRASHES:
                line.last = Failed(QUARANTINED, "The line crashed its runner three times.")
                await self._load(line)
                self._buffer.exhausted.append(line)
            else:
                self._pending.append(line)
        # A line that may crash its runner runs alone: after all others, one at a time.
        self._pending.sort(key=lambda line: line.crashes >= ALONE_CRASHES)
        if self._buffer:
            await self._flush()

    def _startable(self) -> list[_Line]:
        if any(line.crashes >= ALONE_CRASHES for line in self._tasks.values()):
            return []
        now = time.monotonic()
        room = min(self._pace.limit - len(self._tasks), MAX_STARTED)
        ready: list[_Line] = []
        for line in self._pending:
            if len(ready) >= room:
                break
            if line.not_before > now:
                continue
            if line.crashes >= ALONE_CRASHES:
                return ready or ([] if self._tasks else [line])
            ready.append(line)
        return ready

    async def _start_lines(self) -> None:
        ready = self._startable()
        if not ready:
            return
        for line in ready:
            if not line.body:
                await self._load(line)
        async with self._database.write() as conn:
            pairs = [(line.no, line.custom_id) for line in ready]
            now = await claims.now_ms(conn)
            await batch_lines.start_lines(conn, self._held, pairs, now, self._claim_ms)
        self._renewed = time.monotonic()
        for line in ready:
            self._pending.remove(line)
            line.started_in = self._pace.round
            task = asyncio.create_task(self._sender.send(line.no, line.body))
            self._tasks[task] = line

    async def _load(self, line: _Line) -> None:
        raw = await asyncio.to_thread(self._reader.read, line.place.offset, line.place.num_bytes)
        parsed = msgspec.json.decode(raw, type=InputLine)
        line.custom_id, line.body = parsed.custom_id, bytes(parsed.body)

    # Answers

    def _nap_s(self) -> float:
        """Returns the seconds until something may be due."""
        nap = self._settings.look_s
        if self._buffer:
            nap = min(nap, FLUSH_S)
        if len(self._tasks) < self._pace.limit and self._pending:
            soonest = min(line.not_before for line in self._pending) - time.monotonic()
            nap = min(nap, max(0.0, soonest)) if soonest > 0 or not self._tasks else nap
        return max(0.005, nap)

    async def _take_answers(self, wait_s: float) -> None:
        if not self._tasks:
            await asyncio.sleep(wait_s)
            return
        done, _ = await asyncio.wait(self._tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            line = self._tasks.pop(task)
            await self._judge(line, task.result())

    async def _judge(self, line: _Line, outcome: Outcome) -> None:
        match outcome:
            case Answered():
                self._pace.clean()
                self._add_end(line, outcome)
            case Later(wait_s, busy):
                if busy:
                    self._pace.busy(line.started_in)
                self._tally.add("busy" if busy else "running")
                self._retry(line, wait_s)
            case Failed():
                self._count_failure(line, outcome)
            case Stopped(reason):
                await self._on_refused(line, reason)
            case Closed():
                self._looked = 0.0  # it ended elsewhere: the next check finds out how

    def _add_end(self, line: _Line, answer: Answered) -> None:
        self._usage = Usage(
            self._usage.cache_read + answer.usage.cache_read,
            self._usage.cache_write + answer.usage.cache_write,
            self._usage.uncached + answer.usage.uncached,
            self._usage.output + answer.usage.output,
        )
        is_ok = 200 <= answer.status < 300
        error = None if is_ok else {"code": answer.code, "message": answer.message}
        self._append(
            LineEnd(
                line_no=line.no,
                custom_id=line.custom_id,
                state="succeeded" if is_ok else "errored",
                request_id=answer.request_id,
                status=answer.status,
                body=self._seal(line.no, answer.body),
                error=error,
                usage=answer.usage,
            )
        )

    def _append(self, end: LineEnd) -> None:
        if not self._buffer:
            self._buffer.since = time.monotonic()
        self._buffer.ends.append(end)

    def _count_failure(self, line: _Line, failed: Failed) -> None:
        line.failures += 1
        line.last = failed
        self._failures[line.no] = line.failures
        if line.failures < MAX_FAILURES:
            self._tally.add("failed")
            wait_s = self._settings.backoff_s * 2.0**line.failures * random.uniform(0.5, 1.0)
            self._retry(line, min(wait_s, self._settings.max_backoff_s))
            return
        if not self._buffer:
            self._buffer.since = time.monotonic()
        self._buffer.exhausted.append(line)

    def _retry(self, line: _Line, wait_s: float) -> None:
        line.not_before = time.monotonic() + wait_s
        self._pending.insert(0, line)
        if line.crashes >= ALONE_CRASHES:
            self._pending.sort(key=lambda other: other.crashes >= ALONE_CRASHES)

    async def _on_refused(self, line: _Line, reason: str | None) -> None:
        """Handles a refusal of the whole batch: a budget, a suspension or a disabled key pauses it, a revoked key ends
        it."""
        await self._look(reason)
        if not self._must_leave:
            self._count_failure(line, Failed("unauthorized", "The gateway refused the batch's key."))
            # The gateway may not know yet that the key works again.
            line.not_before = max(line.not_before, time.monotonic() + self._settings.heard_s)
        else:
            self._pending.append(line)

    async def _look(self, refused_for: str | None = None) -> None:
        """Looks whether the batch may go on, and else leaves the chunk: a batch that is refused for a while pauses, one
        whose key has ended is cancelled. `refused_for` is a reason that only the gateway knows."""
        async with self._database.read() as conn:
            now = await claims.now_ms(conn)
            standing = await batch_runs.standing(conn, self._held.batch_id, now)
        if refused_for is not None or standing in ("tenant_suspended", "key_disabled"):
            until = now + int(self._settings.pause_s * 1000)
            async with self._database.write() as conn:
                await claims.postpone(conn, self._held.batch_id, until, refused_for or standing)
            self._must_leave = "paused"
        elif standing == "revoked":
            async with self._database.write() as conn:
                await batches.stop(conn, self._held.batch_id, now // 1000)
        if standing != "run":
            self._must_leave = self._must_leave or "given_back"

    # Writing

    @property
    def _claim_ms(self) -> int:
        return int(self._settings.claim_s * 1000)

    def _seal(self, line_no: int, body: bytes) -> bytes:
        place = idempotency_store.line_key(self._held.batch_id, line_no).encode()
        return sealing.seal(self._data_key, body, place)

    async def _flush_if_due(self) -> None:
        old = time.monotonic() - self._buffer.since >= FLUSH_S
        if len(self._buffer) >= FLUSH_LINES or (self._buffer and old):
            await self._flush()

    async def _flush(self) -> None:
        async with self._database.write() as conn:
            now = await claims.now_ms(conn)
            await claims.renew(conn, self._held, now, self._claim_ms)
            ends = list(self._buffer.ends)
            lost = {line.no: line for line in self._buffer.exhausted}
            # An answer may have been stored although the runner never received it. Then it counts.
            stored = await idempotency_store.close_lines(conn, self._held.batch_id, lost) if lost else {}
            for line_no, line in lost.items():
                ends.append(self._resolved(line, stored.get(line_no)))
            await batch_lines.finish_lines(conn, self._held, ends, now, self._claim_ms)
        self._renewed = time.monotonic()
        self._buffer = _Buffer()
        for end in ends:
            if end.error is not None and end.error["code"] == QUARANTINED:
                self._tally.add("quarantined")

    def _resolved(self, line: _Line, stored: idempotency_store.Stored | None) -> LineEnd:
        if stored is not None:
            return delivered(line.no, line.custom_id, stored)
        assert line.last is not None
        answer = line.last.answer
        return LineEnd(
            line_no=line.no,
            custom_id=line.custom_id,
            state="errored",
            request_id=answer.request_id if answer else None,
            status=answer.status if answer else None,
            body=self._seal(line.no, answer.body) if answer else None,
            error={"code": line.last.code, "message": line.last.message},
        )

    async def _look_if_due(self) -> None:
        """Checks once in `look_s` whether the batch is cancelled, the time is over or the process drains. Renews the
        claim if due."""
        now = time.monotonic()
        if now - self._looked < self._settings.look_s:
            return
        self._looked = now
        if now - self._renewed >= self._settings.renew_s:
            await self._renew()
        if self._is_draining() or now - self._began >= self._settings.chunk_s:
            self._must_leave = self._must_leave or "given_back"
            return
        await self._look()

    async def _renew(self) -> None:
        async with self._database.write() as conn:
            await claims.renew(conn, self._held, await claims.now_ms(conn), self._claim_ms)
        self._renewed = time.monotonic()

    # The end

    async def _leave(self) -> Left:
        await self._wait_for_answers()
        if self._buffer:
            await self._flush()
        async with self._database.write() as conn:
            now = await claims.now_ms(conn)
            await claims.renew(conn, self._held, now, self._claim_ms)
            states = await batch_lines.line_states(conn, self._held)
            ended = sum(state.state != "started" for state in states.values())
            if ended == len(unpack(self._held.lines)):
                await claims.finish_chunk(conn, self._held, now)
                await self._correct_turn(conn)
                return "done"
            await batch_lines.note_failures(conn, self._held, self._failures)
            pause_ms = int(self._settings.pause_s * 1000) if self._must_leave == "paused" else 0
            await claims.release(conn, self._held, now + pause_ms if pause_ms else 0)
            await self._correct_turn(conn)
        return "paused" if self._must_leave == "paused" else "given_back"

    async def _correct_turn(self, conn: AsyncConnection) -> None:
        """Charges the tenant's turn what this run measured, in place of what was predicted of the chunk."""
        used = self._usage
        measured = fairness.cost(used.cache_read, used.cache_write + used.uncached + used.output)
        await claims.correct_turn(conn, self._held.tenant_id, measured - self._held.predicted_tokens)

    async def _wait_for_answers(self) -> None:
        """Gives lines under way some time to finish, as answers are charged and should be delivered."""
        until = time.monotonic() + self._settings.drain_s * 0.8
        while self._tasks and time.monotonic() < until:
            await self._take_answers(min(self._settings.look_s, 1.0))
            await self._flush_if_due()
            if time.monotonic() - self._renewed >= self._settings.renew_s and not self._buffer:
                await self._renew()


def delivered(line_no: int, custom_id: str | None, stored: idempotency_store.Stored) -> LineEnd:
    """Returns the output line of a stored answer. The usage comes from its posting, which every line has."""
    assert stored.posting is not None
    return LineEnd(
        line_no=line_no,
        custom_id=custom_id,
        state="succeeded",
        request_id=stored.request_id,
        status=stored.status,
        body=stored.body,
        usage=stored.posting.usage,
    )
