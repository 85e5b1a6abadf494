"""Price sheets, invoices and credits over HTTP and as an operator types them."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
from decimal import Decimal

import aiohttp
import pytest
from billing_world import PERIOD, START, used
from click.testing import CliRunner
from gateways import MODEL, running_gateway
from sqlalchemy import text

from accounting.values.periods import LAST_SECOND
from accounting.values.types import OPERATOR_TENANT
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main

RATES = {"cache_read": 1, "cache_write": 2, "uncached": 3, "output": 4}


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url) as running:
        yield running


@pytest.fixture
async def admin(gateway):
    async with gateway.session(gateway.keys.admin_key) as session:
        yield session


async def call(session, method: str, path: str, body=None, **headers: str):
    """(status, JSON object) of one call."""
    async with session.request(method, path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def headgate(gateway, *arguments: str) -> tuple[int, str]:
    environment = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    command = [*arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


async def test_a_sheet_gets_versions_that_cannot_overlap(admin, gateway):
    sheet = {
        "sheet": "gold",
        "from": 1_000,
        "rates": [{"model": "m", **RATES}],
        "residency": [{"model": "m", "cache": 5, "pinned": 6}],
    }
    status, made = await call(admin, "POST", "/admin/v1/price-sheets", sheet)
    assert (status, made["id"], made["until"], made["currency"]) == (200, "gold@1", None, "USD")
    assert made["rates"] == [{"model": "m", "tier": "interactive", **RATES}]
    assert made["residency"] == [{"model": "m", "cache": 5, "pinned": 6}]
    _, second = await call(admin, "POST", "/admin/v1/price-sheets", {**sheet, "from": 2_000})
    assert second["id"] == "gold@2"
    for start in (1_500, 2_000):
        status, body = await call(admin, "POST", "/admin/v1/price-sheets", {**sheet, "from": start})
        assert (status, body["error"]["code"]) == (409, "conflict")
    _, first = await call(admin, "GET", "/admin/v1/price-sheets/gold/1")
    assert first["until"] == 2_000
    _, listed = await call(admin, "GET", "/admin/v1/price-sheets?limit=2")
    assert [v["id"] for v in listed["data"]] == ["gold@2", "gold@1"]
    assert listed["has_more"]
    _, rest = await call(admin, "GET", "/admin/v1/price-sheets?after=gold@1")
    assert [v["id"] for v in rest["data"]] == ["standard@1"]
    assert (await call(admin, "GET", "/admin/v1/price-sheets/gold/9"))[0] == 404


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"rates": []}, "rates"),
        ({"sheet": "a@b"}, "sheet"),
        ({"sheet": "gold\n"}, "sheet"),
        ({"currency": "EUR\n"}, "currency"),
        ({"from": -1}, "from"),
        ({"from": LAST_SECOND + 1}, "from"),
        ({"until": 2**40}, "until"),
        ({"until": 5}, "until"),
        ({"rates": [{"model": "m", **RATES, "output": -1}]}, "rates[0].output"),
        ({"rates": [{"model": "m", **RATES, "output": 10**12 + 1}]}, "rates[0].output"),
        ({"rates": [{"model": "m", **RATES, "output": 0.5}]}, "rates[0].output"),
        ({"rates": [{"model": "m", **RATES}] * 2}, "rates"),
    ],
)
async def test_a_sheet_that_cannot_be_is_refused(shared_gateway, change, param):
    sheet = {"sheet": "gold", "from": 1_000, "rates": [{"model": "m", **RATES}]}
    async with shared_gateway.session(shared_gateway.keys.admin_key) as session:
        status, body = await call(session, "POST", "/admin/v1/price-sheets", {**sheet, **change})
    assert (status, body["error"]["param"]) == (400, param)


async def test_a_tenant_is_assigned_sheets_by_interval(admin, gateway):
    tenant, _ = await gateway.new_tenant("a")
    path = f"/admin/v1/tenants/{tenant}/price-sheet"
    rates = [{"model": "m", **RATES}]
    for name, currency in (("gold", "USD"), ("euro", "EUR")):
        await call(admin, "POST", "/admin/v1/price-sheets", {"sheet": name, "currency": currency, "rates": rates})
    assert (await call(admin, "PUT", path, {"sheet": "gold", "from": 100, "until": 200}))[0] == 200
    assert (await call(admin, "PUT", path, {"sheet": "gold", "from": 150}))[0] == 409
    assert (await call(admin, "PUT", path, {"sheet": "gold", "from": 200}))[0] == 200
    _, made = await call(admin, "PUT", path, {"sheet": "standard", "from": 300})
    assert [(i["sheet"], i["from"], i["until"]) for i in made["intervals"]] == [
        ("gold", 100, 200),
        ("gold", 200, 300),
        ("standard", 300, None),
    ]
    assert (await call(admin, "GET", path))[1] == {k: v for k, v in made.items() if k != "unpriced"}
    status, body = await call(admin, "PUT", path, {"sheet": "euro", "from": 400})
    assert (status, body["error"]["message"]) == (409, "A tenant has one currency.")
    assert (await call(admin, "PUT", path, {"sheet": "none"}))[0] == 404


async def test_a_month_closes_once_for_everybody_and_reads_as_four_types(admin, gateway):
    tenant = await used(gateway)
    status, listed = await call(admin, "POST", "/admin/v1/invoices", {"period": PERIOD})
    assert status == 200
    (invoice,) = listed["data"]
    assert (invoice["number"], invoice["project_id"], invoice["num_requests"]) == ("INV-000001", tenant, 2)
    status, again = await call(admin, "POST", "/admin/v1/invoices", {"period": PERIOD, "project_id": tenant})
    assert (status, again) == (200, invoice)
    assert (await call(admin, "POST", "/admin/v1/invoices", {"period": PERIOD}))[1]["data"] == []
    path = "/admin/v1/invoices/INV-000001"
    assert (await call(admin, "GET", path))[1] == invoice
    texts = {}
    for kind in ("text/csv", "text/html", "application/pdf"):
        async with admin.get(path, headers={"accept": kind}) as answer:
            assert (answer.status, answer.content_type) == (200, kind)
            texts[kind] = await answer.read()
    assert texts["application/pdf"].startswith(b"%PDF-")
    assert b"<b>" not in texts["text/html"]
    assert b"&lt;b&gt;" in texts["text/html"]
    records = list(csv.DictReader(io.StringIO(texts["text/csv"].decode())))
    assert sum(Decimal(r["amount"]) for r in records) * 10**6 == invoice["due_micro_units"]
    assert sum(Decimal(r["amount"]) for r in records if r["kind"] != "rounding") * 10**6 == invoice["total_micro_units"]
    assert {r["tenant_name"] for r in records} == {"'=cmd|' /C calc'!A0 <b>"}
    async with admin.get(path, headers={"accept": "image/png"}) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (406, "not_acceptable")


async def test_a_tenant_that_cannot_be_closed_is_named_beside_the_invoices_of_the_others(admin, gateway):
    wrong, right = await used(gateway, "wrong"), await used(gateway, "right")
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE rollup_month SET num_requests = 9 WHERE tenant_id = :wrong"), {"wrong": wrong})
    status, closed = await call(admin, "POST", "/admin/v1/invoices", {"period": PERIOD})
    assert (status, [one["project_id"] for one in closed["data"]]) == (200, [right])
    [refused] = closed["refused"]
    assert (refused["project_id"], "not the sums of its rows" in refused["message"]) == (wrong, True)
    third = await used(gateway, "third")
    code, said = await headgate(gateway, "invoice", "close", "--period", PERIOD)
    assert (code, "INV-000002" in said, "headgate: wrong: The sums of" in said) == (1, True, True), (third, said)


async def test_what_cannot_be_closed_says_why(admin, gateway):
    tenant = await used(gateway)
    for body, status in (
        ({"period": "2025-13"}, 400),
        ({"period": "2099-01", "project_id": tenant}, 409),
        ({"period": PERIOD, "project_id": "proj_none"}, 404),
    ):
        answer = await call(admin, "POST", "/admin/v1/invoices", body)
        assert answer[0] == status, answer


async def test_a_credit_needs_a_key_and_is_given_once(admin, gateway):
    tenant = await used(gateway)
    body = {"type": "grant", "project_id": tenant, "amount_micro_units": 100, "starts_at": START}
    status, refused = await call(admin, "POST", "/admin/v1/credits", body)
    assert (status, refused["error"]["code"]) == (400, "idempotency_key_required")
    key = {"idempotency-key": "k1"}
    _, made = await call(admin, "POST", "/admin/v1/credits", body, **key)
    async with admin.post("/admin/v1/credits", json=body, headers=key) as answer:
        assert answer.headers["idempotent-replayed"] == "true"
        assert await answer.json() == made
    status, other = await call(admin, "POST", "/admin/v1/credits", {**body, "amount_micro_units": 101}, **key)
    assert (status, other["error"]["code"]) == (422, "idempotency_mismatch")
    await call(admin, "POST", "/admin/v1/invoices", {"period": PERIOD})
    _, listed = await call(admin, "GET", f"/admin/v1/credits?project_id={tenant}")
    assert [(c["id"], c["remaining_micro_units"]) for c in listed["data"]] == [(made["id"], 0)]
    note = {"type": "credit_note", "project_id": tenant, "amount_micro_units": 7, "corrects": f"req_{tenant}_0"}
    status, given = await call(admin, "POST", "/admin/v1/credits", note, **{"idempotency-key": "k2"})
    assert (status, given["number"]) == (200, "CN-000001")
    status, _ = await call(
        admin, "POST", "/admin/v1/credits", {**note, "project_id": OPERATOR_TENANT}, **{"idempotency-key": "k3"}
    )
    assert status == 404


async def test_an_operator_prices_closes_and_credits_at_the_command_line(gateway, tmp_path):
    tenant = await used(gateway, "acme")
    _, version = await headgate(
        gateway,
        "prices",
        "add",
        "gold",
        "--rate",
        f"{MODEL}=0.00001,0.00002,0.00003,0.000041",
        "--batch-percent",
        "50",
        "--from",
        "2025-01-01",
    )
    assert "0.000005 USD" in version
    assert version.split()[-1] == "gold@1"
    _, shown = await headgate(gateway, "prices", "show", "gold@1", "--json")
    batch, interactive = json.loads(shown)["rates"]
    assert (batch["output"], interactive["output"]) == (21, 41)
    assert (await headgate(gateway, "prices", "assign", "acme", "gold"))[0] == 0
    assert "gold@1" in (await headgate(gateway, "prices", "list"))[1]
    _, grant = await headgate(gateway, "credits", "grant", "acme", "0.00025", "--starts", "2025-01-01")
    assert grant.startswith("credit_")
    _, closed = await headgate(gateway, "invoice", "close", "--period", PERIOD, "--json")
    (invoice,) = json.loads(closed)
    assert invoice["prepaid_micro_units"] == 250
    assert "INV-000001" in (await headgate(gateway, "invoice", "list"))[1]
    assert "total" in (await headgate(gateway, "invoice", "show", "INV-000001"))[1]
    out = tmp_path / "i.html"
    await headgate(gateway, "invoice", "export", "INV-000001", "--format", "html", "--out", str(out))
    assert "INV-000001" in out.read_text()
    assert (await headgate(gateway, "credits", "correct", "acme", f"req_{tenant}_1", "0.000009"))[0] == 0
    assert "CN-000001" in (await headgate(gateway, "credits", "list"))[1]


async def test_a_close_with_nothing_to_close_says_so(gateway):
    await used(gateway, "acme")
    code, said = await headgate(gateway, "invoice", "close", "--period", "2099-01")
    assert (code, said) == (1, "headgate: The period 2099-01 closes 48 hours after its end.\n")
    await headgate(gateway, "invoice", "close", "--period", PERIOD)
    for period in (PERIOD, "2025-01"):
        code, said = await headgate(gateway, "invoice", "close", "--period", period)
        assert code == 0
        assert said.startswith(f"Nothing to close in {period}: ")
        assert f"`headgate invoice list --period {period}`" in said
    _, answered = await headgate(gateway, "invoice", "close", "--period", "2025-01", "--json")
    assert json.loads(answered) == []


async def test_a_fault_after_the_head_of_an_answer_is_logged(admin, monkeypatch, caplog):
    """The answer was cut off, and nothing said why."""

    async def rows(*_):
        yield [["x"] * 3]
        raise RuntimeError("the second page")

    monkeypatch.setattr("gateway.routes.invoices.focus.rows", rows)
    with contextlib.suppress(aiohttp.ClientPayloadError):
        async with admin.get("/admin/v1/exports/focus", params={"period": PERIOD}) as answer:
            assert answer.status == 200
            await answer.read()
    [record] = [one for one in caplog.records if one.message == "unhandled_exception"]
    assert "the second page" in str(record.exc_info[1])


async def test_usage_and_costs_read_every_page_by_every_group(gateway):
    tenant = await used(gateway, "acme")
    month = ("--from", "2025-09-01", "--to", "2025-10-01")
    for width, buckets in (("1d", 30), ("1h", 720)):
        _, output = await headgate(gateway, "usage", *month, "--width", width, "--json")
        data = json.loads(output)["data"]
        assert len(data) == buckets
        assert sum(r["num_model_requests"] for b in data for r in b["results"]) == 2
    for group in ("project_id", "api_key_id", "model", "batch", "service_tier"):
        _, output = await headgate(gateway, "usage", *month, "--group-by", group, "--json")
        results = [r for b in json.loads(output)["data"] for r in b["results"]]
        expected = {
            "project_id": tenant,
            "api_key_id": "key_x",
            "model": MODEL,
            "batch": False,
            "service_tier": "default",
        }
        assert {r[group] for r in results} == {expected[group]}
        others = set(expected) - {group}
        assert {r[other] for r in results for other in others} == {None}
    _, output = await headgate(gateway, "costs", *month, "--group-by", "line_item")
    assert f"{MODEL}, output" in output
    _, output = await headgate(gateway, "usage", *month, "--tenant", "acme", "--batch", "--json")
    assert [r for b in json.loads(output)["data"] for r in b["results"]] == []
    status, _ = await headgate(gateway, "usage", "--group-by", "user")
    assert status == 2
