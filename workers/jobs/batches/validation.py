"""The step that moves a claimed batch from `validating` to `in_progress` or `failed`. It adds files, SQL and threads to
`validate.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.batches import batch_runs, claims, files, order
from accounting.batches.batch_lines import LineEnd
from accounting.batches.batch_runs import Chunk
from accounting.batches.batches import BatchInfo
from accounting.batches.files import FileInfo
from accounting.batches.source import UNREADABLE, InputUnreadable, opened
from accounting.batches.validate import MAX_REPORTED, Fault, Validated, validate
from accounting.prices import prices
from accounting.tenants import tenants
from workers.jobs.batches.renewal import BatchWork


class Validation(BatchWork):
    async def run(self) -> None:
        """Validates the batch, or ends it once its time is over. Raises `ClaimLost`, also when the batch was cancelled
        meanwhile."""
        async with self._database.read() as conn:
            batch = await batch_runs.get(conn, self._held.batch_id)
            source = await files.of_batch(conn, self._held.batch_id)
            now = await claims.now_ms(conn)
            priced = await prices.priced_models(conn, batch.tenant_id, now)
            models = await batch_runs.usable_models(conn, batch.tenant_id, batch.key_id, priced)
        if batch.expires_at <= now // 1000:
            await self._end_unchecked(batch)
            return
        try:
            reading = asyncio.to_thread(self._read, source, batch.endpoint, models)
            found = await self._under_claim(reading)
        except InputUnreadable:
            await self._wait_for_input()
        else:
            await self._decide(batch, found)

    def _read(self, source: FileInfo, endpoint: str, models: frozenset[str]) -> Validated:
        with opened(self._store, source, self._data_key) as reader:
            return validate(self._watched(reader.parts()), endpoint, models)

    def _watched(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            self._limit.progress()
            yield part

    async def _end_unchecked(self, batch: BatchInfo) -> None:
        was_unreadable = batch.paused_reason == UNREADABLE
        fault = Fault(UNREADABLE if was_unreadable else "batch_expired", None)
        async with self._database.write() as conn:
            await batch_runs.fail(conn, self._held, await claims.now_ms(conn), [fault.shown()], 0)

    async def _wait_for_input(self) -> None:
        """Keeps the claim, which runs out and is taken anew, until the batch's time is over."""
        async with self._database.write() as conn:
            await batch_runs.pause(conn, self._held, UNREADABLE)

    async def _decide(self, batch: BatchInfo, found: Validated) -> None:
        chunks = [
            Chunk(sum(line.predicted_tokens for line in chunk), len(chunk), order.pack(chunk))
            for chunk in order.chunks(found.lines, self._settings.jobs_chunk_lines)
        ]
        shown = [fault.shown() for fault in found.faults[:MAX_REPORTED]]
        async with self._database.write() as conn:
            now = await claims.now_ms(conn)
            whole = found.whole or await self._backlog_fault(conn, batch, found)
            if whole is not None:
                await batch_runs.fail(conn, self._held, now, [whole.shown()], len(found.faults))
            elif found.faults and batch.invalid_lines == "reject":
                await batch_runs.fail(conn, self._held, now, shown, len(found.faults))
            else:
                await batch_runs.begin(
                    conn,
                    self._held,
                    now,
                    model=found.model or "",
                    num_total=found.num_lines,
                    chunks=chunks,
                    faulty=[_error_line(fault) for fault in found.faults],
                    errors=shown or None,
                )

    async def _backlog_fault(self, conn: AsyncConnection, batch: BatchInfo, found: Validated) -> Fault | None:
        if found.model is None:
            return None
        limits = await tenants.model_limits(conn, batch.tenant_id)
        limit = limits[found.model].batch_backlog_tokens if found.model in limits else None
        if limit is None:
            return None
        present = await batch_runs.backlog_tokens(conn, batch.tenant_id, found.model)
        over = present + found.predicted_tokens > limit
        return Fault("backlog_exceeded", None) if over else None


def _error_line(fault: Fault) -> LineEnd:
    assert fault.line_no is not None
    shown = fault.shown()
    return LineEnd(
        line_no=fault.line_no,
        custom_id=fault.custom_id,
        state="errored",
        error={"code": fault.code, "message": shown["message"], "line": fault.line_no},
    )
