"""The end of a batch: every input line gets one terminal row, then both files are written from SQL in input order.

It is idempotent up to its last transaction: after a crash at any point somebody does it again. Only complete files
appear, and they are named in the transaction that ends the batch. It may take as long as the answers are large: each
line is a sign of progress, which begins the time limit of its child anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import msgspec
from sqlalchemy import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import batch_lines, batch_runs, claims, files, registration
from accounting.batches.batch_lines import LineEnd
from accounting.batches.batch_runs import BatchClaim
from accounting.batches.file_store import FileStore, Writer
from accounting.batches.files import FileInfo
from accounting.batches.order import PackedLine, unpack
from accounting.batches.source import InputUnreadable, opened
from accounting.database.db import Database
from accounting.requests import batch_results, idempotency_store, request_postings
from workers.jobs.batches.renewal import BatchWork
from workers.jobs.batches.runner import InputLine, delivered

P = ParamSpec("P")
T = TypeVar("T")

LAST_S = 3_600
"""The time limit of the transaction that ends a batch: it frees the space of all answers and tells nothing meanwhile."""
OUTPUT_PURPOSE = "batch_output"
_CUT_OFF: dict[str, tuple[batch_lines.Ended, dict[str, str]]] = {
    "cancel": (
        "cancelled",
        {"code": "batch_cancelled", "message": "This line was not run before the batch was cancelled."},
    ),
    "expire": ("expired", {"code": "batch_expired", "message": "This line was not run before the batch expired."}),
}


class Finaliser(BatchWork):
    async def run(self) -> None:
        """Finalises the batch. Raises `ClaimLost`."""
        output, errors = _Part(self._store, self._data_key), _Part(self._store, self._data_key)
        try:
            num_lines = await self._under_claim(self._prepare(output, errors))
            await self._end(output, errors, num_lines)
        except BaseException:
            try:
                await output.discard(self._database)
            finally:
                await errors.discard(self._database)
            raise

    async def _prepare(self, output: _Part, errors: _Part) -> int:
        """Ends what will not run any more and writes both files. Returns the number of lines."""
        if self._held.work in _CUT_OFF:
            await self._cut_off()
        num_lines = await self._write(output, errors)
        for part in (output, errors):
            await _in_thread(part.finish)
            self._limit.progress()
        return num_lines

    # Lines that will not run any more

    async def _cut_off(self) -> None:
        async with self._database.write() as conn:
            await batch_runs.close_chunks(conn, self._held.batch_id)
        async with self._database.read() as conn:
            packed = await batch_runs.chunk_lines(conn, self._held.batch_id)
            rows = await batch_results.known_lines(conn, self._held.batch_id)
        known = {row.line_no: row for row in rows}
        places = {place.line_no: place for chunk in packed for place in unpack(chunk)}
        started = [no for no, row in known.items() if row.state == "started"]
        await self._close_started(started, {no: known[no].custom_id for no in started})
        await self._close_unstarted([p for no, p in sorted(places.items()) if no not in known])

    async def _close_started(self, numbers: list[int], custom_ids: dict[int, str | None]) -> None:
        """Ends started lines. Stored answers are delivered; a line without one loses its key, so that no answer can
        come."""
        for start in range(0, len(numbers), 500):
            page = numbers[start : start + 500]
            async with self._database.write() as conn:
                stored = await idempotency_store.close_lines(conn, self._held.batch_id, page)
                ends = [
                    delivered(no, custom_ids[no], stored[no]) if no in stored else self._cut(no, custom_ids[no])
                    for no in page
                ]
                await batch_lines.end_lines(conn, self._held.batch_id, ends)
            self._limit.progress()

    async def _close_unstarted(self, places: list[PackedLine]) -> None:
        if not places:
            return
        async with self._database.read() as conn:
            input_file = await files.of_batch(conn, self._held.batch_id)
        try:
            ends = await _in_thread(self._cut_with_names, input_file, places)
        except InputUnreadable:  # the batch ends all the same, and its lines have numbers alone
            ends = [self._cut(place.line_no, None) for place in places]
        async with self._database.write() as conn:
            await batch_lines.add_ended_lines(conn, self._held.batch_id, ends)

    def _cut_with_names(self, input_file: FileInfo, places: list[PackedLine]) -> list[LineEnd]:
        """Ends lines with their `custom_id`, which the input has. Raises `InputUnreadable`."""
        with opened(self._store, input_file, self._data_key) as reader:
            ends = []
            for place in sorted(places, key=lambda p: p.offset):
                ends.append(self._cut(place.line_no, _custom_id(reader.read(place.offset, place.num_bytes))))
                self._limit.progress()
            return ends

    def _cut(self, line_no: int, custom_id: str | None) -> LineEnd:
        state, error = _CUT_OFF[self._held.work]
        return LineEnd(line_no=line_no, custom_id=custom_id, state=state, error=dict(error))

    # Files

    async def _write(self, output: _Part, errors: _Part) -> int:
        num_lines = 0
        async with self._database.read() as conn:
            async for page in batch_results.line_pages(conn, self._held.batch_id):
                num_lines += len(page)
                await _in_thread(self._write_page, page, output, errors)
        return num_lines

    def _write_page(self, page: Sequence[Row[Any]], output: _Part, errors: _Part) -> None:
        for row in page:
            assert row.state != "started", "a batch is finalised when every line has ended"
            part = output if row.state == "succeeded" else errors
            part.write(batch_results.result_line(row, self._data_key))
            self._limit.progress()

    async def _pay(self) -> None:
        """Posts what pays for stored answers and is not in the ledger: their gateway may have died, and the end of the
        batch drops the answers with their postings.
        """
        async with self._database.write() as conn:
            if owed := await idempotency_store.owed_by_batch(conn, self._held.batch_id):
                await request_postings.post_unshipped(conn, owed)

    async def _end(self, output: _Part, errors: _Part, num_lines: int) -> None:
        await self._pay()
        self._limit.progress(LAST_S)
        async with self._database.write() as conn:
            now = await claims.now_ms(conn)
            await batch_runs.renew(conn, self._held, now, int(self._settings.claim_s * 1000))
            batch = await batch_runs.get(conn, self._held.batch_id)
            assert num_lines == batch.num_total == batch.num_completed + batch.num_failed, (
                f"{self._held.batch_id}: {num_lines} lines, {batch.num_total} in the input, "
                f"{batch.num_completed} + {batch.num_failed} ended"
            )
            expires_after_s = batch.output_expires_after_s or files.DEFAULT_EXPIRY_S
            ids = [
                await part.register(
                    conn, self._held, f"{self._held.batch_id}_{name}.jsonl", now // 1000, expires_after_s
                )
                for name, part in (("output", output), ("error", errors))
            ]
            await batch_runs.finish(conn, self._held, now, output_file_id=ids[0], error_file_id=ids[1])


@dataclass
class _Part:
    """One of the two files; an empty one is not made."""

    store: FileStore
    data_key: bytes
    writer: Writer | None = None
    sha256: str = ""
    may_be_registered: bool = False

    def write(self, line: bytes) -> None:
        if self.writer is None:
            self.writer = self.store.create(self.data_key)
        self.writer.write(line)

    def finish(self) -> None:
        if self.writer is not None:
            self.sha256 = self.writer.finish()

    async def discard(self, database: Database) -> None:
        if self.writer is None:
            return
        if self.may_be_registered:
            await registration.discard(database, self.store, self.writer.storage_key)
        elif self.sha256:
            self.store.delete(self.writer.storage_key)
        else:
            self.writer.abort()

    async def register(
        self, conn: AsyncConnection, held: BatchClaim, name: str, now: int, expires_after_s: int
    ) -> str | None:
        if self.writer is None:
            return None
        self.may_be_registered = True
        info = await files.create(
            conn,
            held.tenant_id,
            purpose=OUTPUT_PURPOSE,
            name=name,
            num_bytes=self.writer.num_bytes,
            sha256=self.sha256,
            storage_key=self.writer.storage_key,
            now=now,
            expires_after_s=expires_after_s,
        )
        return info.id


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` in a thread. A cancel waits for its end, so that nothing writes to a file that was given up."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _custom_id(raw: bytes) -> str | None:
    return msgspec.json.decode(raw, type=InputLine).custom_id
