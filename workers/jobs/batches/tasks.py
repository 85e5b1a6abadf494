"""The task of a child: ask SQL for work, do one piece of it, send another message if there is more.

The message has no argument and needs none. Each task runs its own event loop: the SQL engine and the HTTP client are
made in it, after the fork.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from opentelemetry.trace import Tracer
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access.credentials import batch_credential
from accounting.batches import batch_runs, claims, files
from accounting.batches.batch_runs import BatchClaim
from accounting.batches.batches import BatchInfo
from accounting.batches.claims import ChunkClaim, ClaimLost
from accounting.batches.file_store import FileStore
from accounting.batches.source import UNREADABLE, InputUnreadable, opened
from accounting.database import sealing
from accounting.database.db import Database
from workers.jobs.base import gateways, tracing
from workers.jobs.base.settings import SOFT_LIMIT_S, JobsSettings
from workers.jobs.base.tally import Tally
from workers.jobs.base.time_limit import TimeLimit
from workers.jobs.batches import fairness
from workers.jobs.batches.finalise import Finaliser
from workers.jobs.batches.line import Sender
from workers.jobs.batches.runner import ChunkRunner
from workers.jobs.batches.validation import Validation

logger = logging.getLogger(__name__)

CONNECT_S = 10.0


@dataclass
class Turns:
    """The memory of a child between its messages: work on batches and chunks alternates where both wait."""

    was_batch: bool = False
    """The last work was on a batch as a whole, so that a chunk is looked for first."""


class Look:
    """The work of one message."""

    def __init__(
        self, settings: JobsSettings, is_draining: Callable[[], bool], tracer: Tracer, turns: Turns, limit: TimeLimit
    ) -> None:
        self._settings = settings
        self._is_draining = is_draining
        self._tracer = tracer
        self._turns = turns
        self._limit = limit
        self._store = FileStore(settings.files_dir)

    async def run(self) -> int:
        """Does one piece of work. Returns how many messages should be sent for the work that is left."""
        if self._is_draining():
            return 0
        database = Database(self._settings.sql_url, pool_size=2)
        try:
            held = await self._claim(database)
            if held is None:
                return 0
            try:
                await self._do(database, held)
            except ClaimLost:
                Tally(self._settings.counts_file).add("fence_reject")
                logger.info("claim_lost", extra={"batch": held.batch_id})
            except (SQLAlchemyError, OSError):
                if isinstance(held, ChunkClaim):
                    await self._give_back(database, held)
                raise
            return await self._num_left(database)
        except (SQLAlchemyError, OSError) as error:
            # The claim on a batch runs out by itself, and nothing else is held.
            logger.error("look_failed", exc_info=error)
            return 0
        finally:
            await database.close()

    async def _claim(self, database: Database) -> BatchClaim | ChunkClaim | None:
        """Claims work. Batches come first, since people wait for a validation or an end; after one a chunk comes first,
        so that many batches do not keep chunks from running."""
        found: BatchClaim | ChunkClaim | None
        async with database.write() as conn:
            now = await claims.now_ms(conn)
            if self._turns.was_batch:
                found = await self._claim_chunk(conn, now) or await self._claim_batch(conn, now)
            else:
                found = await self._claim_batch(conn, now) or await self._claim_chunk(conn, now)
        self._turns.was_batch = isinstance(found, BatchClaim)
        return found

    async def _claim_batch(self, conn: AsyncConnection, now: int) -> BatchClaim | None:
        return await batch_runs.claim(conn, now, self._claim_ms, int(self._settings.quiet_s * 1000))

    async def _claim_chunk(self, conn: AsyncConnection, now: int) -> ChunkClaim | None:
        waiting = await claims.waiting(conn, now)
        turn = fairness.choose(waiting, self._settings.jobs_tenant_chunks)
        if turn is None:
            return None
        owner = f"{self._settings.owner_prefix}{os.getpid()}:{uuid.uuid4().hex}"
        held = await claims.claim(conn, turn.tenant_id, owner, now, self._claim_ms)
        if held is not None:
            await claims.save_turns(conn, turn.deficits, turn.visits)
        return held

    @property
    def _claim_ms(self) -> int:
        return int(self._settings.claim_s * 1000)

    async def _do(self, database: Database, held: BatchClaim | ChunkClaim) -> None:
        async with database.write() as conn:
            now = await claims.now_ms(conn) // 1000
            master = self._settings.secret("master.key")
            data_key = await sealing.data_key(conn, master, held.tenant_id, now)
        async with database.read() as conn:
            batch = await batch_runs.get(conn, held.batch_id)
        if isinstance(held, ChunkClaim):
            async with asyncio.timeout(SOFT_LIMIT_S):
                await self._run_chunk(database, held, batch, data_key)
            return
        with tracing.batch_span(self._tracer, held, batch.traceparent):
            if held.work == "validate":
                await Validation(self._settings, database, self._store, held, data_key, self._limit).run()
            else:
                await Finaliser(self._settings, database, self._store, held, data_key, self._limit).run()

    async def _run_chunk(self, database: Database, held: ChunkClaim, batch: BatchInfo, data_key: bytes) -> None:
        async with database.read() as conn:
            source = await files.of_batch(conn, held.batch_id)
        credential = batch_credential(self._settings.secret("pepper"), held.batch_id)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        try:
            with (
                opened(self._store, source, data_key) as reader,
                tracing.chunk_span(self._tracer, held, batch.traceparent) as trace,
            ):
                async with gateways.session(self._settings, timeout) as session:
                    url = gateways.base_url(self._settings) + batch.endpoint
                    sender = Sender(session, url, credential, held.batch_id, trace)
                    runner = ChunkRunner(self._settings, database, held, reader, data_key, sender, self._is_draining)
                    left = await runner.run()
                trace.left(left)
            logger.info("chunk_left", extra={"batch": held.batch_id, "seq": held.seq, "how": left})
        except InputUnreadable:
            async with database.write() as conn:
                until = await claims.now_ms(conn) + int(self._settings.pause_s * 1000)
                await claims.release(conn, held, until)
                await claims.postpone(conn, held.batch_id, until, UNREADABLE)
                await claims.correct_turn(conn, held.tenant_id, -held.predicted_tokens)
            logger.error("batch_input_unreadable", extra={"batch": held.batch_id, "seq": held.seq})

    async def _give_back(self, database: Database, held: ChunkClaim) -> None:
        """Releases the chunk after an error that is not its lines': a claim that runs out counts as a crash of each."""
        until = time.monotonic() + self._settings.claim_s
        while time.monotonic() < until:
            try:
                async with database.write() as conn:
                    pause_ms = int(self._settings.look_s * 1000)
                    await claims.release(conn, held, await claims.now_ms(conn) + pause_ms)
                    await claims.correct_turn(conn, held.tenant_id, -held.predicted_tokens)
            except ClaimLost:
                return
            except (SQLAlchemyError, OSError):
                await asyncio.sleep(self._settings.look_s)
            else:
                return

    async def _num_left(self, database: Database) -> int:
        async with database.read() as conn:
            now = await claims.now_ms(conn)
            num = await claims.num_claimable(conn, now, self._settings.jobs_concurrency)
            num += await batch_runs.is_due(conn, now, int(self._settings.quiet_s * 1000))
        return min(num, self._settings.jobs_concurrency)
