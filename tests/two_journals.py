"""A home with the journals of one gateway and one worker, and requests that run through both by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from engine_driver import Driver
from fakes import ROOT, ScriptedRunner, encode, generate_request
from migrated import migrated_database
from money import RATES, posting

from accounting.access import api_keys
from accounting.database.db import Database
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values.types import Opened, Usage
from gateway.base.home import Home
from gateway.journal.journal import Journal, open_journal
from gateway.journal.poster import Poster
from workers.engine.journal.journal import EngineJournal
from workers.protocol.counts import EngineAck, EngineRecords

PROMPT = encode("a prompt that fills a few blocks")
NUM_TOKENS = 6
NO_REDIS = "unix:///nowhere/redis.sock"


class Scene:
    """A home with one gateway's journal and one worker's, as `headgate up` makes them, and a tenant."""

    def __init__(self, home: Home, database: Database, journal: Journal, owner: dict[str, str], slot: int = 0) -> None:
        self.home, self.database, self.journal, self._owner = home, database, journal, owner
        self.worker = f"worker-{slot}"
        self.poster = Poster(journal.directory, database, slot, 0)
        self.engine_journal = EngineJournal(
            home.state / self.worker / "journal", self.worker, "process", ROOT, ballast_bytes=4096
        )
        self.drive = Driver(ScriptedRunner(num_blocks=64, block_size=4), journal=self.engine_journal)

    async def begin(self, name: str, num_tokens: int = NUM_TOKENS) -> None:
        opened = Opened(
            request_id=name,
            model="m",
            root=ROOT,
            tier="interactive",
            price_version="standard@1",
            currency="USD",
            opened_at_ms=1,
            prompt_tokens=len(PROMPT),
            reserved=10**9,
            **self._owner,
        )
        await self.journal.open(opened)
        self.drive.send(generate_request(name, PROMPT, num_tokens, tenant=self._owner["tenant_id"]))

    async def request(self, name: str, **changes: Any) -> None:
        """Runs a request to its end: the engine's record, then the gateway's ending."""
        await self.begin(name)
        while all(record.request_id != name for record in self.engine_journal.unacked):
            self.drive.step()
        counted = next(record.usage for record in self.engine_journal.unacked if record.request_id == name)
        usage = Usage(counted.cache_read, counted.cache_write, counted.uncached, counted.output)
        await self.journal.end(posting(name, usage, root=ROOT, **self._owner, **changes))

    async def post_endings(self) -> None:
        while (await self.poster.post(self.journal.durable_seq)).num_records:
            pass

    async def post_records(self) -> None:
        """Brings the engine's records into SQL, and the acknowledgement into its journal."""
        ack = await self.poster.post_engine_records(EngineRecords(self.worker, tuple(self.engine_journal.unacked)))
        self.drive.send(EngineAck(self.worker, ack.seq))
        self.drive.step()
        assert self.engine_journal.unacked == []


async def made_tenant(url: str) -> dict[str, str]:
    """Makes the tables, a price and a tenant with a key. Returns the ids of the two."""
    await migrated_database(url)
    database = Database(url)
    async with database.write() as conn:
        await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)
        tenant = (await tenants.create(conn, "a", now=1)).id
        key = await api_keys.create(conn, bytes(32), tenant_id=tenant, now=1)
    await database.close()
    return {"tenant_id": tenant, "key_id": key.info.id}


@asynccontextmanager
async def running_scene(home: Home, url: str, owner: dict[str, str], slot: int = 0) -> AsyncIterator[Scene]:
    """Runs the processes of a slot in a home, with the books at `url`."""
    database = Database(url)
    journal = await open_journal(home.state / f"gateway-{slot}" / "journal", slot, ballast_bytes=4096)
    made = Scene(home, database, journal, owner, slot)
    try:
        yield made
    finally:
        made.engine_journal.close()
        await journal.close()
        await made.database.close()


async def run(command: Any, *arguments: str | Path, expect: int = 0) -> Result:
    done = await asyncio.to_thread(CliRunner().invoke, command, [str(argument) for argument in arguments])
    assert done.exit_code == expect, done.output
    return done
