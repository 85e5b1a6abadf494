"""The gateway's append-only journal. OPEN is written before dispatch; SETTLE or VOID is durable before the end of the
client's reply.

One writer thread appends and one syncer thread makes records durable. There is one `fdatasync` at a time, and records
that arrive meanwhile go with the next one (group commit). An OPEN returns as soon as it is in the file, which survives
the process; the disk has it within 5 ms. A failed write or sync poisons the journal: nothing in that segment is trusted
any more, nothing is synced again, and `revive` goes on in a new segment. If the disk is full, the journal gives up its
ballast file: running requests can end, and no request is admitted until there is space for the ballast again. It knows
payload types, not SQL, and no text of any request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from accounting.values import clock
from accounting.values.types import Opened, Posting
from gateway.journal import journal_records
from workers.protocol.ballast import BALLAST_BYTES, is_full
from workers.protocol.journal import SEGMENT_BYTES, Chain, Kind, SegmentHeader
from workers.protocol.segments import Left, Log, recover, take_slot

logger = logging.getLogger(__name__)

OPEN_SYNC_S = 0.005


class JournalPoisoned(Exception):
    """A write or sync failed: this record may or may not be on the disk."""


Done = Callable[[JournalPoisoned | None], None]
"""Called in the loop once a record is where it has to be, or with the failure."""


class _Entry(NamedTuple):
    kind: Kind
    payload: bytes
    request_id: str
    done: Done
    durable: bool


class Journal:
    """An open journal, made by `open_journal`. `close()` must be awaited."""

    def __init__(
        self,
        log: Log,
        header: SegmentHeader,
        running: dict[str, bytes],
        segment_bytes: int,
        sync: Callable[[int], None],
        committed: Callable[[float], None],
    ) -> None:
        """`committed` is called with the seconds until an ending was durable."""
        self.directory = log.directory
        self._log = log
        self._header = header
        self._committed = committed
        self._segment_bytes = segment_bytes
        self._sync = sync
        self._loop = asyncio.get_running_loop()
        self._open = running  # OPEN payloads without an ending; owned by the writer
        self._failure: Exception | None = None
        self._closing = False
        self._writer_ended = False
        self._handed_in: list[_Entry] = []
        """Entries of this turn of the loop, which owns the list."""
        self._queue: deque[_Entry] = deque()
        self._arrived = threading.Condition()
        self.on_records: Callable[[], None] = lambda: None
        """Called in the loop when records are on their way to the disk."""
        self._waiting: list[Done] = []
        self._is_sync_wanted = False
        self._sync_at: float | None = None
        """The moment at which OPENs must be synced for which no ending has come. The writer owns it."""
        self._unsynced_seq = self._synced_seq = log.chain.next_seq - 1
        self._written = threading.Condition()
        self._writing = threading.Lock()
        """A thread holds this lock while it writes into a segment. It is taken before `_written`."""
        self._begin_segment()
        log.ballast.take()
        self._threads = [
            threading.Thread(target=self._write_all, name="journal-writer", daemon=True),
            threading.Thread(target=self._sync_all, name="journal-syncer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_writable(self) -> bool:
        """Requests may be admitted: their endings will find space."""
        return self._failure is None and self._log.ballast.is_held

    @property
    def is_full(self) -> bool:
        """The journal is not writable, and only because the disk is full."""
        return not self.is_writable and (self._failure is None or is_full(self._failure))

    @property
    def durable_seq(self) -> int:
        """The number of the last record that is on the disk."""
        return self._synced_seq

    async def open(self, opened: Opened) -> None:
        """Writes an OPEN, before dispatch. It is then in the file, not yet on the disk."""
        await self._append(Kind.OPEN, journal_records.encode(opened), opened.request_id, durable=False)

    async def end(self, posting: Posting) -> None:
        """Writes an ending durably, before the client sees the end of its reply."""
        written: asyncio.Future[None] = self._loop.create_future()
        self.begin_end(posting, partial(_resolve, written))
        await written

    def begin_end(self, posting: Posting, done: Done) -> None:
        """Writes an ending durably, and wakes no task: `done` is called in the loop. Raises JournalPoisoned."""
        kind = Kind.SETTLE if posting.kind == "settle" else Kind.VOID
        began = time.perf_counter()

        def told(failure: JournalPoisoned | None) -> None:
            done(failure)
            if failure is None:
                self._committed(time.perf_counter() - began)

        self._hand_in(_Entry(kind, journal_records.encode(posting), posting.request_id, told, True))

    def forget(self, request_id: str) -> None:
        """Forgets a request that was ended without this journal, because the journal had failed."""
        self._open.pop(request_id, None)

    async def revive(self) -> bool:
        """Goes on in a new segment after a failure, if the disk takes one. Returns `is_writable`."""
        return self.is_writable or await asyncio.to_thread(self._revive)

    async def close(self) -> None:
        """Writes and syncs what was handed in, seals, and frees the slot."""
        self._closing = True
        self._wake_writer()
        await asyncio.to_thread(self._stop)

    async def _append(self, kind: Kind, payload: bytes, request_id: str, *, durable: bool) -> None:
        written: asyncio.Future[None] = self._loop.create_future()
        self._hand_in(_Entry(kind, payload, request_id, partial(_resolve, written), durable))
        await written

    def _hand_in(self, entry: _Entry) -> None:
        if self._failure is not None or self._closing:
            raise JournalPoisoned("journal is not writable") from self._failure
        self._handed_in.append(entry)
        if len(self._handed_in) == 1:
            self._loop.call_soon(self._wake_writer)

    def _wake_writer(self) -> None:
        """Hands the writer what came in one turn of the loop, so that it wakes once for all of it."""
        with self._arrived:
            self._queue += self._handed_in
            self._arrived.notify()
        self._handed_in.clear()
        self.on_records()

    # The writer thread

    def _write_all(self) -> None:
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._queue or self._closing, self._sync_in_s())
                batch = list(self._queue)
                self._queue.clear()
            if not batch:
                if self._closing:
                    return
                self._want_sync()
                continue
            try:
                with self._writing:
                    if self._failure is not None:
                        raise self._failure
                    self._write(batch)
            except Exception as failure:  # noqa: BLE001 - the thread must live: requests wait for it
                self._poison(failure, (entry.done for entry in batch))

    def _write(self, batch: list[_Entry]) -> None:
        if self._log.num_bytes >= self._segment_bytes:
            self._rotate()
        self._log.write(b"".join(self._log.chain.encode(e.kind, e.payload) for e in batch))
        with self._written:
            if self._failure is not None:  # a sync failed meanwhile
                raise self._failure
            for entry in batch:
                if entry.kind == Kind.OPEN:
                    self._open[entry.request_id] = entry.payload
                else:
                    self._open.pop(entry.request_id, None)
            self._waiting += [e.done for e in batch if e.durable]
            self._unsynced_seq = self._log.chain.next_seq - 1
            if self._sync_at is None:
                self._sync_at = time.monotonic() + OPEN_SYNC_S
            if self._waiting or self._sync_in_s() == 0.0:
                self._want_sync()
        self._tell([e.done for e in batch if not e.durable], None)

    def _sync_in_s(self) -> float | None:
        """Returns the seconds until OPENs must be synced for which no ending has come, or None if there are none."""
        return None if self._sync_at is None else max(0.0, self._sync_at - time.monotonic())

    def _want_sync(self) -> None:
        self._sync_at = None
        with self._written:
            self._is_sync_wanted = True
            self._written.notify()

    def _rotate(self) -> None:
        """Begins a new segment. The syncer's lock is held, because no sync may fall between the two files."""
        self._seal()
        with self._written:
            self._sync(self._log.file)
            self._synced_seq = self._log.chain.next_seq - 1
            self._begin_segment()

    def _begin_segment(self) -> None:
        self._log.begin(self._beginning())
        self._unsynced_seq = self._synced_seq = self._log.chain.next_seq - 1

    def _beginning(self) -> Iterator[tuple[Kind, bytes]]:
        """Yields HEADER, the OPENs still running, and SEAL: from here on this segment can be read without the one
        before.
        """
        yield Kind.HEADER, msgspec.msgpack.encode(self._header)
        for payload in list(self._open.values()):
            yield Kind.OPEN, payload
        yield Kind.SEAL, b""

    def _seal(self) -> None:
        self._log.write(self._log.chain.encode(Kind.SEAL, b""))

    # The syncer thread

    def _sync_all(self) -> None:
        while True:
            with self._written:
                self._written.wait_for(lambda: self._is_sync_wanted or self._writer_ended)
                if not self._is_behind() and self._writer_ended:
                    return
                self._is_sync_wanted = False
                seq, waiting, file = self._unsynced_seq, self._waiting, self._log.file
                self._waiting = []
                if self._synced_seq >= seq:  # a rotation synced them
                    self._tell(waiting, None)
                    continue
                if self._failure is not None:  # the file may be closed: its segment ended with the failure
                    self._tell(waiting, self._failure)
                    continue
                try:
                    duplicate = os.dup(file)  # a rotation may close the original
                except OSError as failure:  # the process may have no descriptor left
                    self._poison(failure, waiting)
                    continue
            try:
                self._sync(duplicate)
            except Exception as failure:  # noqa: BLE001 - the thread must live: requests wait for it
                self._poison(failure, waiting)
            else:
                with self._written:
                    self._synced_seq = max(self._synced_seq, seq)
                self._tell(waiting, None)
            finally:
                os.close(duplicate)

    def _is_behind(self) -> bool:
        return bool(self._waiting) or (self._failure is None and self._unsynced_seq > self._synced_seq)

    # Both

    def _poison(self, failure: Exception, waiting: Iterable[Done]) -> None:
        with self._written:
            first = self._failure is None
            self._failure = self._failure or failure
            waiting = [*waiting, *self._waiting]
            self._waiting = []
        if first:
            traced = None if isinstance(failure, OSError) else failure
            logger.critical("journal %s is poisoned: %r", self.directory, failure, exc_info=traced)
        self._tell(waiting, failure)

    def _tell(self, done: list[Done], failure: Exception | None) -> None:
        if done:
            self._loop.call_soon_threadsafe(_call, done, failure)

    def _revive(self) -> bool:
        with self._writing:
            if self._closing:
                return False
            if self._failure is not None and not self._begin_anew(self._failure):
                return False
            return self._log.ballast.take()

    def _begin_anew(self, poison: Exception) -> bool:
        if is_full(poison):
            self._log.ballast.give_up()
        with self._written:
            try:
                self._begin_segment()
            except Exception as failure:  # noqa: BLE001 - it is tried again, and requests wait for that
                logger.error("journal %s stays poisoned: %r", self.directory, failure)
                return False
            self._failure = None
        logger.warning("journal %s goes on in a new segment", self.directory)
        return True

    def _stop(self) -> None:
        writer, syncer = self._threads
        with self._arrived:
            self._arrived.notify_all()
        writer.join()
        with self._written:
            self._writer_ended = True
            self._written.notify_all()
        syncer.join()
        with self._writing:
            try:
                self._log.ballast.give_up()
                if self._failure is None:
                    self._seal()
                    self._sync(self._log.file)
                    self._synced_seq = self._log.chain.next_seq - 1
            except OSError as failure:  # the next process cuts what is torn
                logger.error("journal %s is not sealed: %s", self.directory, failure)
            finally:
                self._log.close()


async def open_journal(
    directory: Path,
    slot: int,
    *,
    min_next_seq: int = 1,
    segment_bytes: int = SEGMENT_BYTES,
    sync: Callable[[int], None] = os.fdatasync,
    ballast_bytes: int = BALLAST_BYTES,
    stored: Callable[[Collection[str]], Awaitable[Mapping[str, Posting]]] | None = None,
    committed: Callable[[float], None] = lambda _: None,
) -> Journal:
    """Takes the slot and ends the requests that a dead process left open, durably: with a VOID, outcome
    `gateway_crash`, or, if the request's answer is `stored`, with the SETTLE that pays for it.

    `min_next_seq` is one more than SQL's offset, so that a journal lost with its disk does not number anew. Raises
    SlotTaken, OSError.
    """
    lock = take_slot(directory)
    left = await asyncio.to_thread(recover, directory)
    chain = left.chain if left.chain.next_seq >= min_next_seq else Chain(min_next_seq)
    unended = _unended(left)
    # They are copied into the new segment, so that a crash before the VOIDs below loses none of them.
    running = {request_id: journal_records.encode(opened) for request_id, opened in unended.items()}
    header = SegmentHeader(f"gateway-{slot}", uuid.uuid4().hex, left.boot + 1)
    log = Log(directory, lock, chain, ballast_bytes=ballast_bytes, sync=sync)
    journal = Journal(log, header, running, segment_bytes, sync, committed)
    now_ms = clock.now_ms()
    kept = await stored(unended.keys()) if stored is not None and unended else {}
    endings = [kept.get(o.request_id) or o.void("gateway_crash", "gateway_crash", now_ms) for o in unended.values()]
    await asyncio.gather(*(journal.end(ending) for ending in endings))
    return journal


def _unended(left: Left) -> dict[str, Opened]:
    running: dict[str, Opened] = {}
    for record in left.records:
        if record.kind == Kind.OPEN:
            opened = journal_records.opened(record.payload)
            running[opened.request_id] = opened
        elif record.kind in (Kind.SETTLE, Kind.VOID):
            running.pop(journal_records.posting(record.payload).request_id, None)
    return running


def _call(waiting: list[Done], failure: Exception | None) -> None:
    for done in waiting:
        poisoned = None
        if failure is not None:
            poisoned = JournalPoisoned(str(failure))
            poisoned.__cause__ = failure
        try:
            done(poisoned)
        except Exception:  # the fault of one request keeps no other from its ending
            logger.exception("what follows a record failed")


def _resolve(written: asyncio.Future[None], failure: JournalPoisoned | None) -> None:
    if written.done():  # its waiter was cancelled
        return
    if failure is None:
        written.set_result(None)
    else:
        written.set_exception(failure)
