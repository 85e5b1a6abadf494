"""The writer of the request log: what a row is made of, and that a slow or absent database costs rows and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from load import stretched
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import DataError, InternalError, OperationalError

from accounting.requests import request_log
from accounting.requests.request_log import LoggedRequest
from accounting.values import timelines
from accounting.values.types import Principal, RequestFacts, Usage
from gateway.telemetry import request_log as writing
from gateway.telemetry.record import LeaseMark, RequestRecord
from gateway.telemetry.request_log import RequestLogWriter, row_of
from workers.protocol.messages import CacheReport, TimelineEvent

MS = 1_000_000


class Sql:
    """A database that takes rows, or raises `fault`."""

    def __init__(self) -> None:
        self.rows: list[LoggedRequest] = []
        self.batches: list[int] = []
        self.fault: Exception | None = None
        self.hangs = False

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[Sql]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.fault is not None:
            raise self.fault
        yield self


@pytest.fixture
def sql(monkeypatch: pytest.MonkeyPatch) -> Sql:
    async def add(conn: Sql, rows: list[LoggedRequest]) -> None:
        conn.rows += rows
        conn.batches.append(len(rows))

    async def without_erased(conn: Sql, rows: list[LoggedRequest]) -> list[LoggedRequest]:
        return rows

    monkeypatch.setattr(request_log, "add", add)
    monkeypatch.setattr(request_log, "without_erased", without_erased)
    return Sql()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def writer(sql: Any, registry: CollectorRegistry, max_waiting: int = 100) -> RequestLogWriter:
    return RequestLogWriter(sql, registry, max_waiting=max_waiting)


def record(number: int = 1, tenant: str | None = "proj_a", **fields: Any) -> RequestRecord:
    made = RequestRecord(f"req_{number:032x}", "POST", started_ns=10**18, route="/v1/chat/completions")
    if tenant is not None:
        made.principal = Principal(kind="tenant", tenant_id=tenant, key_id="key_a", scopes=frozenset())
    made.status = 200
    made.marks = [("accepted", 0), ("dispatched", 5 * MS), ("first_byte", 40 * MS), ("last_byte", 113 * MS)]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def facts(**fields: Any) -> RequestFacts:
    defaults = {
        "request_id": "req_1",
        "tenant_id": "proj_a",
        "key_id": "key_a",
        "model": "llama",
        "tier": "interactive",
    }
    return RequestFacts(**{**defaults, **fields})


def dropped(registry: CollectorRegistry, reason: str) -> float | None:
    return registry.get_sample_value("headgate_request_log_rows_dropped_total", {"reason": reason})


def test_a_row_has_what_the_record_says_and_no_more() -> None:
    made = row_of(
        record(
            model="llama",
            tier="interactive",
            stream=True,
            usage=Usage(100, 20, 3, 50),
            charge_micro_units=77,
            currency="USD",
            finish_reasons=("stop", "length", "stop"),
            worker="w0",
            cache=CacheReport(cached_tokens=100, miss_reason="diverged", diverged_at_token=100),
            outgoing_traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
            worker_timeline=(TimelineEvent("queued", 0), TimelineEvent("first_token", 30_000, 9)),
            facts=facts(user="maria", metadata={"team": "crops"}),
            num_retries=1,
        )
    )
    assert (made.prompt_tokens, made.cached_tokens, made.cache_write_tokens, made.output_tokens) == (123, 100, 20, 50)
    assert (made.charge, made.currency, made.finish_reason) == (77, "USD", "stop,length")
    assert (made.ttft_ms, made.duration_ms, made.started_at_ms) == (40, 113, 10**12)
    assert (made.miss_reason, made.diverged_at_token, made.trace_id) == ("diverged", 100, "a" * 32)
    assert (made.endpoint, made.outcome, made.is_tail) == ("POST /v1/chat/completions", "ok", False)
    assert (made.end_user, made.metadata, made.num_retries) == ("maria", {"team": "crops"}, 1)
    first = [event.at_us for event in timelines.unpack(made.timeline).worker if event.name == "first_token"]
    assert first == [35_000]


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"status": 400}, "client_error"),
        ({"status": 429}, "refused"),
        ({"status": 503}, "server_error"),
        ({"status": 200, "error_code": "upstream_lost"}, "server_error"),
        ({"status": 499}, "client_gone"),
        ({"disconnect_phase": "decode"}, "client_gone"),
    ],
)
def test_what_did_not_end_well_is_in_the_tail(fields: dict[str, Any], outcome: str) -> None:
    made = row_of(record(**fields))
    assert (made.outcome, made.is_tail) == (outcome, True)


def test_a_body_has_the_time_to_the_workers_first_token_and_a_refusal_none() -> None:
    events = (TimelineEvent("queued", 0), TimelineEvent("first_token", 30_000, 9))
    assert row_of(record(worker_timeline=events)).ttft_ms == 35
    assert row_of(record(status=429)).ttft_ms is None
    assert row_of(record(status=503, stream=True)).ttft_ms is None
    assert row_of(record(status=400, facts=facts(prompt_tokens=12))).prompt_tokens == 12


def test_what_a_client_names_is_cut_and_cannot_speak_to_a_terminal() -> None:
    hostile = "\x1b[31mred\x00\r\n\u202e\u2028\x9b"
    made = row_of(
        record(
            facts=facts(
                user=hostile + "x" * 1000, metadata={hostile: hostile, **{str(n): "v" * 512 for n in range(15)}}
            )
        )
    )
    assert made.metadata is not None
    texts = [made.end_user, *made.metadata, *made.metadata.values()]
    assert all(text.isprintable() and len(text) <= writing.MAX_CHARS for text in texts)
    assert "\\u001b[31mred\\u0000" in made.end_user
    assert sum(map(len, [*made.metadata, *made.metadata.values()])) <= writing.MAX_METADATA_CHARS
    assert "hg_live" not in row_of(record(facts=facts(user="hg_live_abcdefghijklmnop"))).end_user


async def test_an_unknown_key_has_no_row(sql: Sql, registry: CollectorRegistry) -> None:
    log = writer(sql, registry)
    log.observe(record(tenant=None, status=401))
    log.observe(record(2, status=403))
    await log.write()
    assert [row.status for row in sql.rows] == [403]


async def test_rows_go_in_batches(sql: Sql, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "BATCH_ROWS", 10)
    log = writer(sql, registry)
    for number in range(25):
        log.observe(record(number))
    await log.write()
    assert sql.batches == [10, 10, 5]
    assert registry.get_sample_value("headgate_request_log_rows_total") == 25
    await log.write()
    assert len(sql.rows) == 25


async def test_a_full_writer_drops_and_counts_and_one_tenant_cannot_fill_it(
    sql: Sql, registry: CollectorRegistry
) -> None:
    sql.fault = OperationalError("away", None, Exception("no answer"))
    log = writer(sql, registry, max_waiting=100)
    for number in range(500):
        log.observe(record(number, "proj_flood"))
    await log.write()
    for number in range(500, 510):
        log.observe(record(number, "proj_b"))
    assert dropped(registry, "full") == 450
    sql.fault = None
    await log.write()
    tenants = [row.tenant_id for row in sql.rows]
    assert (tenants.count("proj_flood"), tenants.count("proj_b")) == (50, 10)
    log.observe(record(600, "proj_flood"))
    await log.write()
    assert len(sql.rows) == 61
    assert dropped(registry, "full") == 450


AWAY = [
    OperationalError("away", None, Exception("x")),
    InternalError("cannot execute INSERT in a read-only transaction", None, Exception("x")),
    OSError("x"),
    TimeoutError(),
]


@pytest.mark.parametrize("fault", AWAY, ids=lambda fault: type(fault).__name__)
async def test_rows_wait_while_sql_is_away(sql: Sql, registry: CollectorRegistry, fault: Exception) -> None:
    log = writer(sql, registry)
    log.observe(record(1))
    sql.fault = fault
    await log.write()
    await log.write()
    log.observe(record(2))
    sql.fault = None
    await log.write()
    assert [row.request_id for row in sql.rows] == [record(1).request_id, record(2).request_id]
    assert [dropped(registry, reason) for reason in ("full", "refused", "shutdown")] == [0, 0, 0]


async def test_rows_that_sql_refuses_do_not_stop_those_behind_them(
    sql: Sql, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_ROWS", 2)
    taken = request_log.add

    async def add(conn: Any, rows: list[LoggedRequest]) -> None:
        if rows[0].request_id == record(0).request_id:
            raise DataError("refused", None, Exception("x"))
        await taken(conn, rows)

    monkeypatch.setattr(request_log, "add", add)
    log = writer(sql, registry)
    for number in range(4):
        log.observe(record(number))
    await log.write()
    assert len(sql.rows) == 2
    assert dropped(registry, "refused") == 2


async def test_a_record_that_cannot_be_a_row_fails_nobody(sql: Sql, registry: CollectorRegistry) -> None:
    log = writer(sql, registry)
    log.observe(record(1, marks=[None]))
    log.observe(record(2))
    await log.write()
    assert [row.request_id for row in sql.rows] == [record(2).request_id]
    assert dropped(registry, "refused") == 1


async def test_the_end_writes_what_waits_and_waits_for_nobody(
    sql: Sql, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = writer(sql, registry)
    log.observe(record(1))
    await log.close()
    assert len(sql.rows) == 1
    monkeypatch.setattr(writing, "CLOSE_S", 0.05)
    monkeypatch.setattr("gateway.base.lifecycle.UNINTERRUPTED_S", 0.05)
    sql.hangs = True
    log.observe(record(2))
    await asyncio.wait_for(log.close(), stretched(2))
    assert dropped(registry, "shutdown") == 1


def test_each_extension_of_the_lease_stands_in_the_timeline_at_its_time() -> None:
    made = record()
    made.leases = [LeaseMark(made.started_mono_ns + 60 * MS, 256, "granted")]
    events = timelines.unpack(row_of(made).timeline).gateway
    assert [(event.name, event.at_us, event.num_tokens) for event in events][2:] == [
        ("first_byte", 40_000, 0),
        ("lease", 60_000, 256),
        ("last_byte", 113_000, 0),
    ]
