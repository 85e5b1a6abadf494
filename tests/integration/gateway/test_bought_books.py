"""What a provider states and bills, against what was judged: thirty faults, each in the account that its name says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gateways import RunningGateway, running_gateway
from provider import KEY, Provider, Script, declared, price, running_provider
from sqlalchemy import text

from accounting.books import books
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main
from gateway.upstreams.breaker import Breaker
from gateway.upstreams.market import MARKET

Rows = list[dict[str, Any]]
WORDS = [{"role": "user", "content": "Say something about foxes."}]


def as_it_is(rows: Rows) -> Rows:
    return rows


def by(micro_units: int) -> Callable[[Rows], Rows]:
    return lambda rows: [{**row, "amount": row["amount"] + micro_units} for row in rows]


def twice(rows: Rows) -> Rows:
    return [*rows, *({**row, "id": row["id"] + "-again"} for row in rows)]


def read_twice(rows: Rows) -> Rows:
    return [*rows, *rows]


def split(rows: Rows) -> Rows:
    return [
        part
        for row in rows
        for part in (
            {**row, "id": row["id"] + "-a", "amount": row["amount"] - 10},
            {**row, "id": row["id"] + "-b", "amount": 10},
        )
    ]


def dearer(rows: Rows) -> Rows:
    return [{**row, "amount": row["amount"] * 2} for row in rows]


def none(rows: Rows) -> Rows:
    return []


def refunded(rows: Rows) -> Rows:
    return [*rows, *({**row, "id": row["id"] + "-back", "amount": -5} for row in rows)]


def nameless(rows: Rows) -> Rows:
    return [{**row, "provider_id": ""} for row in rows]


def of_another(rows: Rows) -> Rows:
    return [*rows, {"id": "row-foreign", "provider_id": "id-of-nobody", "amount": 77}]


def billed(amount: int) -> Callable[[Rows], Rows]:
    return lambda rows: [*rows, {"id": f"row-by-hand-{amount}", "provider_id": "LAST", "amount": amount}]


@dataclass(frozen=True)
class Fault:
    name: str
    script: Script = field(default_factory=Script)
    bill: Callable[[Rows], Rows] = as_it_is
    accounts: frozenset[str] = frozenset()
    """Where the drift of the bill stands; empty if all of it is matched."""
    drift: str = ""
    """The drift of the tokens."""
    status: int = 200
    stream: bool = False
    comes_first: bool = False
    """The row comes before the call."""
    num_unbilled: int = 0


def in_(*names: str) -> frozenset[str]:
    return frozenset(names)


HUGE = {"prompt_tokens": 10**6, "completion_tokens": 10**6}
LITTLE = {"prompt_tokens": 0, "completion_tokens": 1}
NEVER = {"text": "The quick brown fox. " * 40}
FAULTS = [
    Fault("nothing is wrong"),
    Fault("a row comes twice under its id", bill=read_twice),
    Fault("a row comes before its call", comes_first=True),
    Fault("a row never comes", bill=none, num_unbilled=1),
    Fault("a micro-unit more is rounding", bill=by(1), accounts=in_("rounding")),
    Fault("a micro-unit less is rounding", bill=by(-1), accounts=in_("rounding")),
    Fault("a row of another id bills again", bill=twice, accounts=in_("duplicate")),
    Fault("a bill in two rows", bill=split, accounts=in_("price", "duplicate")),
    Fault("another price", bill=dearer, accounts=in_("price")),
    Fault("a little less than the price", bill=by(-7), accounts=in_("price")),
    Fault("money back", bill=refunded, accounts=in_("refund")),
    Fault("a row without an id", bill=nameless, accounts=in_("unknown"), num_unbilled=1),
    Fault("a row of nobody", bill=of_another, accounts=in_("unknown")),
    Fault("cached tokens", Script(cached=8)),
    Fault("the cached rate is forgotten", Script(cached=8), by(8), in_("price")),
    Fault("no usage", Script(usage=None), dearer, in_("usage"), "no_usage"),
    Fault("no usage in a stream", Script(usage=None), dearer, in_("usage"), "no_usage", stream=True),
    Fault("usage that is no object", Script(usage=[1]), dearer, in_("usage"), "no_usage"),
    Fault("usage of a million", Script(usage=HUGE), dearer, in_("usage"), "usage_over"),
    Fault("usage of nearly nothing", Script(**NEVER, usage=LITTLE), dearer, in_("usage"), "usage_under"),
    Fault("negative usage", Script(usage={"prompt_tokens": -1}), dearer, in_("usage"), "no_usage"),
    Fault("one retry after a 500", Script(status=500)),
    Fault("one retry after a broken connection", Script(cut_after=0)),
    Fault(
        "a break in mid-stream that is billed", Script(cut_after=3), billed(40), in_("failed"), status=-1, stream=True
    ),
    Fault("a refused request", Script(status=400), status=400),
    Fault("a refused request that is billed", Script(status=400), billed(9), in_("unknown"), status=400),
    Fault("a redirect", Script(status=302, headers={"location": "http://127.0.0.1:1"})),
    Fault("a call that is no JSON and billed", Script(calls=[("look", "{")]), as_it_is, in_("failed"), status=503),
    Fault(
        "an answer that ignores the bound",
        Script(**NEVER, ignores_bound=True, bills=False),
        billed(90),
        in_("cut"),
        "cut",
    ),
    Fault(
        "an error in the stream that is billed",
        Script(error_event={"error": {}}),
        billed(11),
        in_("failed"),
        status=-1,
        stream=True,
    ),
]


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with running_provider() as found:
        yield found


async def _import(gateway: RunningGateway, rows: Rows) -> dict[str, Any]:
    values = [{"id": r["id"], "provider_id": r["provider_id"], "amount_micro_units": r["amount"]} for r in rows]
    path = "/admin/v1/upstreams/mock/costs"
    async with gateway.session(gateway.keys.admin_key) as session, session.post(path, json={"rows": values}) as answer:
        body = await answer.json()
        assert answer.status == 200, body
        return dict(body)


async def _ask(gateway: RunningGateway, fault: Fault) -> int:
    body = {
        "model": "bought",
        "messages": WORDS,
        "stream": fault.stream,
        "max_tokens": 5 if "bound" in fault.name else 800,
    }
    if fault.script.calls:
        body["tools"] = [{"type": "function", "function": {"name": "look"}}]
    async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        text = await answer.text()
        return (
            -1
            if ('"error"' in text and answer.status == 200) or (answer.status == 503 and fault.stream)
            else answer.status
        )


async def _accounts(gateway: RunningGateway) -> dict[str, int]:
    rows = await gateway.sql(
        "SELECT account, sum(amount) - sum(matched) FROM upstream_cost WHERE account <> '' GROUP BY 1"
    )
    return {row[0]: int(row[1]) for row in rows}


def test_there_are_thirty_faults_with_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 30


async def test_every_micro_unit_of_thirty_faults_is_matched_or_in_a_named_account(
    tmp_path: Path, redis_url: str, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    total = 0
    async with running_gateway(tmp_path / "home", redis_url, upstreams={"mock": declared(provider)}) as gateway:
        await price(gateway, "bought")
        for fault in FAULTS:
            place = gateway.app[MARKET].places["mock"]
            place.breaker = Breaker()
            place.of_models.clear()
            total += await _check(gateway, provider, fault)
        await gateway.balanced()
        [(matched, rows)] = await gateway.sql("SELECT sum(matched), sum(amount) FROM upstream_cost")
        assert rows == total
        assert matched + sum((await _accounts(gateway)).values()) == total
        async with gateway.app[DATABASE].write() as conn:
            await conn.execute(text("UPDATE upstream_cost SET account = '' WHERE account = 'price'"))
            report = await books.verify(conn)
            failed = {equation.id for equation in report.equations if not equation.ok}
            assert failed == {"I21"}, "a drift without a name is found"
            await conn.rollback()


async def _check(gateway: RunningGateway, provider: Provider, fault: Fault) -> int:
    """Runs one fault. Returns what was billed."""
    before, calls_before = await _accounts(gateway), await gateway.sql("SELECT count(*) FROM upstream_call")
    provider.bills.clear()
    provider.scripts = [fault.script]
    number = len(provider.asked) + 1
    if fault.comes_first:
        # The prompt of this request, and twelve tokens of answer.
        first = {"id": "row-early", "provider_id": f"id-{number}-{id(provider)}", "amount": 45}
        early = await _import(gateway, [first])
        assert early["drift_micro_units"]["unknown"] >= 45
    status = await _ask(gateway, fault)
    assert status == fault.status, fault.name
    provider.scripts.clear()
    await gateway.settled()
    answer_id = f"id-{number}-{id(provider)}"
    rows = [
        row | ({"provider_id": answer_id} if row["provider_id"] == "LAST" else {}) for row in fault.bill(provider.bills)
    ]
    if fault.comes_first:
        [row] = rows
        rows = [first]
        assert (await _import(gateway, rows))["num_known"] == 1
        after = await _accounts(gateway)
        grown = {name for name in after if after[name] != before.get(name, 0)}
        assert grown <= {"price", "rounding"}, (fault.name, grown, row["amount"])
        return int(first["amount"])
    if rows:
        await _import(gateway, rows)
    after = await _accounts(gateway)
    grown = {name for name in after if after[name] != before.get(name, 0)}
    assert grown == fault.accounts, (fault.name, before, after)
    drifts = await gateway.sql("SELECT drift FROM upstream_call WHERE drift <> '' ORDER BY started_at_ms")
    last = drifts[-1][0] if drifts else ""
    assert not fault.drift or last == fault.drift, (fault.name, last)
    assert calls_before is not None
    return sum({row["id"]: row["amount"] for row in rows}.values())


async def test_a_bill_is_read_from_a_file_and_read_again_without_counting_twice(
    tmp_path: Path, redis_url: str, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    bill = tmp_path / "bill.json"
    async with running_gateway(tmp_path / "home", redis_url, upstreams={"mock": declared(provider)}) as gateway:
        await price(gateway, "bought")
        env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
        command = ["upstreams", "costs", "mock", str(bill), "--home", str(tmp_path / "home")]
        bill.write_text('{"data": [{"id": "row-1", "provider_id": "id-of-nobody", "amount_micro_units": 77}]}')
        for _ in range(2):
            done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
            assert done.exit_code == 0, done.output
        assert await _accounts(gateway) == {"unknown": 77}
        bill.write_text('[{"id": "row-2"}]')
        done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
        assert (done.exit_code, "FILE must be JSON rows" in done.output) == (2, True)
