"""kill -9 of a process that writes a journal: what was acknowledged is there, and the ledger has everything once."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from accounting.tables.models import LedgerEntry
from accounting.values.types import BoughtAttempt, Opened, Posting
from gateway.journal import journal_records
from gateway.journal.journal import open_journal
from gateway.journal.poster import Poster
from gateway.journal.reader import Reader
from gateway.journal.shipper import Shipper
from workers.protocol.journal import Kind
from workers.protocol.segments import list_segments

WRITER = """
import asyncio, sys
from pathlib import Path
from gateway.journal.journal import open_journal
from accounting.values.types import Opened

async def request(journal, name):
    opened = Opened(request_id=name, tenant_id="proj_1", key_id="key_1", model="m", root="r", tier="interactive",
                    price_version="standard@1", currency="USD", opened_at_ms=1, prompt_tokens=10, reserved=5)
    await journal.open(opened)
    print("opened", name, flush=True)
    await journal.end(opened.void("ok", "internal", 2))
    print("ended", name, flush=True)

async def main():
    journal = await open_journal(Path(sys.argv[1]), 0, segment_bytes=20_000)
    print("ready", flush=True)
    number = 0
    while True:
        await asyncio.gather(*(request(journal, f"req_{sys.argv[2]}_{number + n:06d}") for n in range(8)))
        number += 8

asyncio.run(main())
"""


OPENED = Opened(
    request_id="",
    tenant_id="proj_1",
    key_id="key_1",
    model="m",
    root="r",
    tier="interactive",
    price_version="standard@1",
    currency="USD",
    opened_at_ms=1,
    prompt_tokens=10,
    reserved=5,
)


def write_and_kill(directory: Path, life: int, after_s: float) -> tuple[set[str], set[str]]:
    """(opened, ended) as the process had told the world before it died."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(life)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(after_s)
        process.kill()
        words = [line.split() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    return {w[1] for w in words if w[0] == "opened"}, {w[1] for w in words if w[0] == "ended"}


def endings(directory: Path) -> list[Posting]:
    return [
        journal_records.posting(record.payload)
        for record in Reader(directory, 0).read(1 << 60, 1_000_000)
        if record.kind in (Kind.SETTLE, Kind.VOID)
    ]


async def test_nothing_settled_is_lost_and_nothing_is_posted_twice(sqlite_books, tmp_path: Path) -> None:
    """Five lives of one slot, each killed at a random moment; part of the journal is shipped in between."""
    directory, rng = tmp_path / "journal", random.Random(7)
    opened: set[str] = set()
    ended: set[str] = set()
    offset = 0
    for life in range(5):
        more_opened, more_ended = write_and_kill(directory, life, rng.uniform(0.01, 0.15))
        opened |= more_opened
        ended |= more_ended
        journal = await open_journal(directory, 0, segment_bytes=20_000)
        shipper = Shipper(journal, Poster(directory, sqlite_books, 0, offset))
        while await shipper.ship():
            pass
        offset = shipper.offset
        await journal.close()
    found = endings(directory)
    by_request = {ending.request_id: ending for ending in found}
    assert len(found) == len(by_request)
    assert opened <= set(by_request)
    assert all(by_request[name].outcome == "ok" for name in ended)
    assert ended
    async with sqlite_books.read() as conn:
        rows = (await conn.execute(select(LedgerEntry.request_id, LedgerEntry.outcome))).all()
    assert {row.request_id: row.outcome for row in rows} == {
        name: ending.outcome for name, ending in by_request.items()
    }


async def test_a_successor_killed_before_its_voids_loses_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The OPENs of the dead run on into the successor's first segment. A copied directory stands for a death."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    journal = await open_journal(first, 0)
    for number in range(3):
        await journal.open(msgspec.structs.replace(OPENED, request_id=f"req_{number}"))
    await journal.end(msgspec.structs.replace(OPENED, request_id="req_1").void("ok", "internal", 2))
    shutil.copytree(first, second)

    async def die(self, posting) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("gateway.journal.journal.Journal.end", die)
        with pytest.raises(RuntimeError, match="killed"):
            await open_journal(second, 0)
    shutil.copytree(second, third)
    await (await open_journal(third, 0)).close()
    assert len(list_segments(third)) == 3
    assert sorted((ending.request_id, ending.outcome) for ending in endings(third)) == [
        ("req_0", "gateway_crash"),
        ("req_1", "ok"),
        ("req_2", "gateway_crash"),
    ]
    await journal.close()


def test_no_payload_has_room_for_text() -> None:
    """Fields of every payload by name: ids, counts, times, fixed words, and an end user's digest."""
    fields = {
        name
        for payload in (Opened, Posting, BoughtAttempt)
        for name in (field.name for field in msgspec.structs.fields(payload))
    }
    assert fields == {
        "request_id",
        "tenant_id",
        "key_id",
        "model",
        "root",
        "tier",
        "endpoint",
        "price_version",
        "currency",
        "opened_at_ms",
        "prompt_tokens",
        "reserved",
        "attempt",
        "end_user",
        "trace_id",
        "batch_id",
        "line_no",
        "kind",
        "outcome",
        "ended_at_ms",
        "usage",
        "charge",
        "write_off",
        "bought",
        # of what was bought: names of the operator's, fixed words, the provider's id of its answer
        "upstream",
        "state",
        "started_at_ms",
        "provider_id",
        "stated",
        "judged",
        "drift",
        "expected_cost",
        "stated_cost",
    }
