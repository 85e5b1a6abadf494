"""Journals and stored answers of the version before: their records are read, and it can read ours."""

from __future__ import annotations

from pathlib import Path

import msgspec

from accounting.values.types import Posting, Usage
from gateway.journal import journal_records
from gateway.journal.journal import open_journal
from workers.protocol.journal import Kind
from workers.protocol.segments import recover

OLD_OPEN = {
    "request_id": "req_1",
    "tenant_id": "proj_1",
    "key_id": "key_1",
    "model": "m",
    "root": "r@1",
    "tier": "batch",
    "price_version": "standard@1",
    "currency": "USD",
    "opened_at_ms": 1_790_000_000_000,
    "prompt_tokens": 100,
    "reserved": 5000,
    "attempt": 0,
    "trace_id": "0af7",
    "batch_id": "batch_1",
    "line_no": 7,
    "end_user": "u:12",
}
"""An OPEN as it was written before a request was described once."""
OLD_SETTLE = {name: value for name, value in OLD_OPEN.items() if name not in ("prompt_tokens", "attempt")} | {
    "kind": "settle",
    "outcome": "ok",
    "ended_at_ms": 1_790_000_000_900,
    "usage": {"cache_read": 1, "cache_write": 2, "uncached": 97, "output": 4},
    "charge": {"total": 10, "cache_read": 1, "cache_write": 2, "uncached": 3, "output": 4},
    "write_off": "resume",
}


async def test_requests_that_an_old_process_left_running_end_with_all_they_were(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path, 0)
    await journal._append(Kind.OPEN, msgspec.msgpack.encode(OLD_OPEN), "req_1", durable=True)
    await journal.close()
    await (await open_journal(tmp_path, 0)).close()
    [void] = [journal_records.posting(r.payload) for r in recover(tmp_path).records if r.kind == Kind.VOID]
    assert (void.kind, void.outcome, void.prompt_tokens) == ("void", "gateway_crash", 100)
    shared = OLD_OPEN.keys() - {"attempt"}
    assert {name: getattr(void, name) for name in shared} == {name: OLD_OPEN[name] for name in shared}


def test_an_old_ending_is_read_whole() -> None:
    posting = journal_records.posting(msgspec.msgpack.encode(OLD_SETTLE))
    assert posting.usage == Usage(1, 2, 97, 4)
    assert {name: value for name, value in msgspec.to_builtins(posting).items() if name in OLD_SETTLE} == OLD_SETTLE


def test_a_gateway_of_the_version_before_reads_our_records(opened) -> None:
    """Every field that it asks for lies where it looks for it."""
    record = opened(1)
    ours = msgspec.msgpack.decode(journal_records.encode(record))
    assert OLD_OPEN.keys() - ours.keys() == {"attempt"}, "which has a default there"
    ending: Posting = record.void("internal", "internal", 5)
    assert OLD_SETTLE.keys() <= msgspec.msgpack.decode(journal_records.encode(ending)).keys()
