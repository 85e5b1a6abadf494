"""One description of a request: the journal, the ledger and the record of the logs have the same."""

from __future__ import annotations

import msgspec
from gateways import MODEL, RunningGateway

from accounting.values.types import LastingFacts, RequestFacts
from gateway.journal import journal_records
from gateway.journal.reader import Reader
from gateway.metering.metering import METERING
from gateway.telemetry.keys import OBSERVERS
from gateway.telemetry.record import RequestRecord
from workers.protocol.journal import Kind
from workers.protocol.segments import list_segments

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
WORDS = {"user": "someone@example.org", "metadata": {"case": "a private matter"}}


async def asked(gateway: RunningGateway, path: str, body: dict) -> RequestFacts:
    records: list[RequestRecord] = []
    gateway.app[OBSERVERS].of_each(records.append)
    async with gateway.session() as session, session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
    await gateway.settled()
    [record] = records
    assert record.facts is not None
    return record.facts


def lasting(value: LastingFacts) -> dict:
    return {name: getattr(value, name) for name in LastingFacts.__struct_fields__}


async def test_journal_ledger_and_log_have_the_same_facts(gateway: RunningGateway) -> None:
    facts = await asked(gateway, "/v1/chat/completions", CHAT | WORDS)
    assert (facts.tenant_id, facts.model, facts.tier) == (gateway.keys.tenant_id, MODEL, "interactive")
    assert (facts.endpoint, facts.user, facts.metadata) == ("/v1/chat/completions", WORDS["user"], WORDS["metadata"])
    assert len(facts.trace_id) == 32
    directory = gateway.app[METERING].journal.directory
    records = Reader(directory, gateway.first_seq).read(1 << 60, 1000)
    [opened] = [journal_records.opened(r.payload) for r in records if r.kind == Kind.OPEN]
    [ending] = [journal_records.posting(r.payload) for r in records if r.kind == Kind.SETTLE]
    assert lasting(opened) == lasting(ending) == facts.lasting()
    [row] = await gateway.sql("SELECT * FROM ledger_entry WHERE kind = 'settle'")
    columns = row._mapping.keys() & facts.lasting().keys()
    assert columns >= {"request_id", "tenant_id", "key_id", "model", "tier", "trace_id", "batch_id", "line_no"}
    assert {name: row._mapping[name] for name in columns} == {name: facts.lasting()[name] for name in columns}
    on_disk = b"".join(segment.path.read_bytes() for segment in list_segments(directory))
    assert b"someone@" not in on_disk
    assert b"private" not in on_disk


async def test_each_prompt_has_facts_of_its_own_and_the_log_those_of_all(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "prompt": [[65, 66], [67, 68, 69]], "max_tokens": 2}
    facts = await asked(gateway, "/v1/completions", body)
    assert facts.prompt_tokens == 5
    records = Reader(gateway.app[METERING].journal.directory, gateway.first_seq).read(1 << 60, 1000)
    first, second = (journal_records.opened(r.payload) for r in records if r.kind == Kind.OPEN)
    assert (first.request_id, first.prompt_tokens, second.prompt_tokens) == (facts.request_id, 2, 3)
    assert second.request_id != first.request_id
    unlike = {"request_id", "prompt_tokens"}
    same = {name: value for name, value in lasting(second).items() if name not in unlike}
    assert same == {name: value for name, value in facts.lasting().items() if name not in unlike}


def test_the_lasting_facts_have_no_room_for_a_word_of_the_client() -> None:
    fields = {field.name for field in msgspec.structs.fields(RequestFacts)}
    assert fields - set(LastingFacts.__struct_fields__) == {"user", "metadata", "session_id"}
