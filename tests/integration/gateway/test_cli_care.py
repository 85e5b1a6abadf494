"""Keys, limits, permissions and the audit log as an operator types them; every command with `--json`."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import pytest_asyncio
from click.testing import CliRunner
from console_world import spend
from gateways import MODEL, prepare_home, running_gateway
from money import posting, record
from redis_db import emptied

from accounting.books import books
from accounting.limits import limiter_state
from accounting.prices import prices
from accounting.requests import idempotency_store, request_postings
from accounting.values import clock
from accounting.values.types import Charge, Limits, Opened, Principal, Rates, Usage
from gateway.base.app_keys import DATABASE
from gateway.base.home import Home
from gateway.books.verification import RECORD_LATE_MS, verify
from gateway.cli.main import main
from gateway.cli.model import ServedModel, WantedModel
from gateway.cli.money import cost
from gateway.cli.preparation import Preparation
from gateway.journal.journal import open_journal
from gateway.journal.unshipped import OLD_MS
from gateway.limiter.limits import Limiter, limiter_link
from gateway.limiter.redis_keys import open_key
from gateway.limiter.rules import LimitSubject
from gateway.metering.metering import METERING
from workers.protocol.journal import segment_name


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url, retention_days=0) as running:
        yield running


@pytest.fixture
def headgate(gateway):
    return commands_of(gateway)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def headgate_with_acme(redis_socket, tmp_path_factory):
    """For tests that only look at what a command says. There is a tenant acme."""
    async with running_gateway(tmp_path_factory.mktemp("home"), emptied(redis_socket, 3)) as running:
        run = commands_of(running)
        await run("tenants", "create", "acme")
        yield run


def commands_of(gateway):
    env = {
        "HEADGATE_URL": gateway.url,
        "HEADGATE_API_KEY": gateway.keys.admin_key,
        "HEADGATE_REDIS_URL": gateway.settings.redis_url,
    }

    async def run(
        *arguments: str,
        stdin: str = "",
        expect: int = 0,
        home: Path = gateway.settings.home,
        more: Mapping[str, str] | None = None,
    ) -> str:
        command = [*arguments, "--home", str(home)]
        done = await asyncio.to_thread(CliRunner().invoke, main, command, input=stdin, env=env | (more or {}))
        assert done.exit_code == expect, done.output
        return done.output.strip()

    return run


async def answer_of(gateway, key: str) -> int:
    async with gateway.session(key) as session, session.get("/v1/models") as answer:
        return answer.status


async def read(headgate, *arguments: str) -> Any:
    return json.loads(await headgate(*arguments, "--json"))


async def test_a_tenant_is_suspended_resumed_archived_and_deleted(gateway, headgate):
    await headgate("tenants", "create", "acme")
    key = await headgate("keys", "create", "acme")
    assert await headgate("tenants", "suspend", "acme", "--end-streams") == "suspended"
    assert await answer_of(gateway, key) == 403
    assert await headgate("tenants", "resume", "acme") == "active"
    assert await answer_of(gateway, key) == 200
    shown = await read(headgate, "tenants", "show", "acme")
    assert (shown["name"], shown["suspended"]) == ("acme", False)
    assert "archived project" in await headgate("tenants", "delete", "acme", "--yes", expect=1)
    await headgate("tenants", "archive", "acme", "--yes")
    report = await read(headgate, "tenants", "delete", "acme", "--yes")
    assert (report["deleted"], report["num_keys"]) == (True, 1)
    assert "acme" not in await headgate("tenants", "list", "--all")


async def test_a_deletion_is_asked_for_with_what_is_still_to_be_billed_and_its_draft_is_found_by_id(gateway, headgate):
    tenant = await headgate("tenants", "create", "acme")
    question = "What the tenant stored can never be read again. Go on?"
    await headgate("tenants", "archive", "acme", "--yes")
    asked = await headgate("tenants", "delete", "acme", stdin="n\n", expect=1)
    assert asked.startswith(question), "nothing is to be billed"
    charge = await spend(gateway, tenant)
    period = time.strftime("%Y-%m", time.gmtime())
    asked = await headgate("tenants", "delete", "acme", stdin="n\n", expect=1)
    assert asked.startswith(f"{cost(charge, 'USD')} of its charges are on no invoice yet ({period}): a later close"), (
        asked
    )
    assert f"{tenant}, without its name. {question}" in asked
    assert "No tenant has the id" in await headgate("invoice", "preview", "proj_unknown", expect=1)
    await headgate("tenants", "delete", "acme", stdin="y\n")
    draft = await read(headgate, "invoice", "preview", tenant, "--period", period)
    assert (draft["project_id"], draft["subtotal_micro_units"]) == (tenant, charge)
    refused = await headgate("invoice", "close", "--period", period, "--tenant", tenant, expect=1)
    assert "closes 48 hours after its end" in refused


async def test_a_key_is_bound_changed_rotated_and_reported(gateway, headgate):
    await headgate("tenants", "create", "acme")
    made = await read(headgate, "keys", "create", "acme", "--model", MODEL, "--address", "127.0.0.0/8")
    shown = await read(headgate, "keys", "show", made["id"])
    assert (shown["models"], shown["addresses"]) == ([MODEL], ["127.0.0.0/8"])
    changed = await read(headgate, "keys", "set", made["id"], "--any-model", "--running", "3", "--disable")
    assert (changed["models"], changed["max_running_requests"]) == (None, 3)
    assert changed["addresses"] == ["127.0.0.0/8"]
    assert await answer_of(gateway, made["value"]) == 401
    await headgate("keys", "set", made["id"], "--enable", "--running", "none")
    rotated = await headgate("keys", "rotate", made["id"], "--overlap-s", "600")
    assert [await answer_of(gateway, key) for key in (made["value"], rotated)] == [200, 200]
    assert await headgate("keys", "report-leaked", stdin=f"{rotated}\n") == made["id"]
    assert [await answer_of(gateway, key) for key in (made["value"], rotated)] == [401, 401]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_leaked_value_that_no_key_has_is_a_failure(headgate_with_acme):
    headgate = headgate_with_acme
    said = await headgate("keys", "report-leaked", stdin="hg_live_nonsense\n", expect=1)
    assert said == "headgate: No key that works has this value."
    said = await headgate("keys", "report-leaked", "--json", stdin="hg_live_nonsense\n", expect=1)
    assert json.loads(said.splitlines()[0])["api_key_id"] is None


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "command",
    [
        ("budgets", "add", "acme", "--limit", "5", "--period", "day", "--model"),
        ("quotas", "set", "acme", "requests_per_day", "5", "--level", "model", "--subject"),
        ("models-permissions", "allow", "acme"),
        ("keys", "create", "acme", "--model"),
    ],
)
async def test_a_model_that_is_not_served_is_named(headgate_with_acme, command):
    """A mistyped one would bind nothing, or shut out the tenant."""
    headgate = headgate_with_acme
    assert "Warning" not in await headgate(*command, MODEL)
    assert f"headgate: Warning: nope is not served now; served are: {MODEL}." in await headgate(*command, "nope")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (
            ("limits", "set", "acme", "--model", "nope", "--requests-per-minute", "5"),
            1,
            "There is no limit for the model nope, which has no price for this tenant: `headgate limits list` shows the"
            " models that have.",
        ),
        (
            ("credits", "correct", "acme", "req_nope", "1.50"),
            1,
            "Not found: req_nope. `headgate requests list` shows what there is.",
        ),
        (
            ("tenants", "set", "acme", "--weight", "nan"),
            2,
            "Invalid value for '--weight': 'nan' is not a finite number.",
        ),
        (("upstreams", "add", "x", "https://x.example"), 2, "Missing option '--model'."),
        (("rerate", "--period", "2026-10", "--sheet", "gold@2"), 1, "There is no price sheet gold@2."),
    ],
    ids=["limits", "credits", "weight", "upstreams", "rerate"],
)
async def test_a_refusal_says_what_is_wrong(headgate_with_acme, command, status, says):
    assert (await headgate_with_acme(*command, expect=status)).startswith(f"headgate: {says}")


async def test_a_key_whose_bounds_are_refused_does_not_work(gateway, headgate):
    await headgate("tenants", "create", "acme")
    said = await headgate("keys", "create", "acme", "--address", "nowhere", expect=1)
    assert "address" in said
    [row] = await gateway.sql(
        "SELECT disabled FROM api_key k JOIN tenant t ON t.id = k.tenant_id WHERE t.name = 'acme'"
    )
    assert row.disabled


async def test_limits_by_model_over_all_models_and_of_spending(headgate):
    await headgate("tenants", "create", "acme")
    await headgate("limits", "set", "acme", "--model", MODEL, "--requests-per-minute", "7")
    [limit] = await read(headgate, "limits", "list", "acme")
    assert (limit["model"], limit["max_requests_per_1_minute"]) == (MODEL, 7)
    await headgate("limits", "set", "acme", "--running", "2", "--tokens-per-minute", "100")
    shown = await read(headgate, "tenants", "show", "acme")
    assert (shown["max_running_requests"], shown["max_tokens_per_1_minute"]) == (2, 100)
    await headgate("limits", "set", "acme", "--running", "none")
    shown = await read(headgate, "tenants", "show", "acme")
    assert (shown["max_running_requests"], shown["max_tokens_per_1_minute"]) == (None, 100)
    await headgate("limits", "set", "acme", "--model", MODEL, "--running", "1", expect=2)
    for owner in (["acme"], []):
        await headgate("limits", "spend", *owner, "--usd", "12.34")
        found = await read(headgate, "limits", "spend", *owner)
        assert (found["threshold_amount"], found["currency"]) == (1234, "USD")
        await headgate("limits", "spend", *owner, "--remove")
        await headgate("limits", "spend", *owner, expect=1)


async def test_quotas_are_set_listed_and_taken_away(headgate):
    await headgate("tenants", "create", "acme")
    await headgate("quotas", "set", "acme", "requests_per_day", "500")
    await headgate("quotas", "set", "acme", "requests_per_minute", "3", "--level", "end_user", "--shadow")
    await headgate("quotas", "set", "acme", "tokens_per_minute", "9", "--level", "model", "--subject", MODEL)
    found = await read(headgate, "quotas", "list", "acme")
    shown = {(q["level"], q["subject"], q["dimension"], q["limit"], q["shadow"]) for q in found}
    assert shown == {
        ("tenant", None, "requests_per_day", 500, False),
        ("end_user", None, "requests_per_minute", 3, True),
        ("model", MODEL, "tokens_per_minute", 9, False),
    }
    assert "requests_per_day" in await headgate("quotas", "list", "acme")
    gone = await read(headgate, "quotas", "set", "acme", "requests_per_day", "none")
    assert gone["deleted"] is True
    assert len(await read(headgate, "quotas", "list", "acme")) == 2
    alone = ("quotas", "set", "acme", "tokens_per_minute", "9", "--level", "model")
    assert "--subject" in await headgate(*alone, expect=2)


async def test_journals_are_listed_with_what_the_books_do_not_have_yet(gateway, headgate):
    worker = gateway.settings.journals_dir / "worker-0" / "journal"
    worker.mkdir(parents=True)
    (worker / segment_name(1)).write_bytes(b"x" * 10)
    [mine, other] = await read(headgate, "journals", "list")
    assert (mine["slot"], mine["running"], mine["unshipped"], mine["dead_letters"]) == ("gateway-0", 0, 0, 0)
    assert mine["bytes"] > 0
    journal = gateway.app[METERING].journal
    opened = Opened(
        request_id="req_1",
        tenant_id="t",
        key_id="k",
        model="m",
        root="r",
        tier="interactive",
        price_version="standard@1",
        currency="USD",
        opened_at_ms=1,
        prompt_tokens=5,
        reserved=10,
    )
    await journal.open(opened)
    await asyncio.sleep(0.1)
    [mine, other] = await read(headgate, "journals", "list")
    assert mine["running"] == 1
    assert (other["slot"], other["segments"], other["bytes"], other["running"]) == ("worker-0", 1, 10, None)
    assert "worker-0" in await headgate("journals", "list")
    await journal.end(opened.void("internal", "internal", 2))


async def die_as_gateway_7(gateway) -> None:
    """With one request ended and not shipped, and one that runs."""
    tenant = gateway.keys.tenant_id
    [key] = await gateway.sql(f"SELECT id FROM api_key WHERE tenant_id = '{tenant}' LIMIT 1")
    opened_ms = clock.now_ms()
    dead = await open_journal(gateway.settings.journals_dir / "gateway-7" / "journal", 7)
    for name in ("req_ended", "req_running"):
        await dead.open(
            Opened(
                request_id=name,
                tenant_id=tenant,
                key_id=key.id,
                model=MODEL,
                root="r",
                tier="interactive",
                price_version="standard@1",
                currency="USD",
                opened_at_ms=opened_ms,
                prompt_tokens=5,
                reserved=10,
            )
        )
    await dead.end(
        posting(
            "req_ended",
            Usage(0, 0, 5, 2),
            tenant_id=tenant,
            key_id=key.id,
            model=MODEL,
            price_version="standard@1",
            charge=Charge(7, 0, 0, 0, 7),
            opened_at_ms=opened_ms,
            reserved=10,
        )
    )
    async with gateway.app[DATABASE].write() as conn:
        engine_record = record("req_ended", Usage(0, 0, 5, 2), tenant_id=tenant)
        await request_postings.post_engine_records(conn, [engine_record])
    os.close(dead._log.lock)  # killed: nothing is sealed or shipped


async def endings(gateway) -> list[tuple[Any, ...]]:
    rows = await gateway.sql(
        "SELECT request_id, kind, charge, outcome FROM ledger_entry ORDER BY request_id, kind DESC"
    )
    return [tuple(row) for row in rows]


ENDED_AND_VOID = [("req_ended", "settle", 7, "ok"), ("req_running", "void", 0, "gateway_crash")]


async def test_an_ending_waits_seconds_for_its_engine_record(gateway, monkeypatch):
    """A worker's records are gathered for a moment, so an ending may be in SQL before its record."""
    tenant, usage = gateway.keys.tenant_id, Usage(0, 0, 5, 2)
    [key] = await gateway.sql(f"SELECT id FROM api_key WHERE tenant_id = '{tenant}' LIMIT 1")
    ending = posting("req_late", usage, tenant_id=tenant, key_id=key.id, model=MODEL, charge=Charge(7, 0, 0, 0, 7))

    async def verified():
        found = await verify(gateway.app[DATABASE], gateway.settings.journals_dir, gateway.app[METERING].link)
        return {equation.id for equation in found.report.equations if not equation.ok}

    async with gateway.app[DATABASE].write() as conn:
        await request_postings.post(conn, 9, 1, [ending])
    before = await verified()
    now_ms = clock.now_ms() + RECORD_LATE_MS
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
    assert await verified() - before == {"I1"}
    async with gateway.app[DATABASE].write() as conn:
        await request_postings.post_engine_records(conn, [record("req_late", usage, tenant_id=tenant)])
    assert await verified() == before


async def test_what_a_gateway_of_another_machine_has_not_shipped_yet_breaks_no_equation(gateway, monkeypatch):
    database, link = gateway.app[DATABASE], gateway.app[METERING].link
    running = record("req_elsewhere", Usage(0, 0, 5, 2), tenant_id=gateway.keys.tenant_id)

    async def verified():
        return await verify(database, gateway.settings.journals_dir, link)

    async with database.write() as conn:
        await request_postings.post(conn, 1, 1, [])
    assert (await verified()).unreplayed == ()
    async with database.write() as conn:
        await request_postings.post_engine_records(conn, [running])
    found = await verified()
    assert (found.report.ok, found.unreplayed) == (True, (1,))
    now_ms = clock.now_ms() + OLD_MS
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
    assert {one.id for one in (await verified()).report.equations if not one.ok} == {"I1", "I4"}


async def test_the_journal_of_a_gateway_that_is_gone_is_replayed(gateway, headgate):
    """Its SETTLE is charged and what ran is void, once; what a living gateway owns is left to it."""
    await die_as_gateway_7(gateway)
    assert (await read(headgate, "verify-books"))["unreplayed"] == [7]
    mine, gone = await read(headgate, "journals", "replay")
    assert (mine["slot"], mine["owned"]) == ("gateway-0", True)
    nothing = {"slot": "gateway-7", "owned": False, "voided": 0, "shipped": 0, "brought_back": 0, "left_out": 0}
    assert gone == nothing | {"voided": 1, "shipped": 1}
    again = await read(headgate, "journals", "replay", "7")
    assert again == [nothing]
    assert await endings(gateway) == ENDED_AND_VOID
    checked = await read(headgate, "verify-books")
    assert (checked["ok"], checked["unreplayed"]) == (True, [])
    assert "There is no journal here of: 9" in await headgate("journals", "replay", "9", expect=2)


async def test_a_slot_that_runs_on_another_host_is_neither_replayed_nor_abandoned(gateway, headgate, tmp_path):
    """Redis tells: there is no lock between hosts. The running gateway keeps its keys, and its row as one that lists."""
    there = tmp_path / "there"
    await prepare_home(there, gateway.settings.database_url)
    database_url = {"HEADGATE_DATABASE_URL": gateway.settings.database_url}
    async with gateway.app[DATABASE].write() as conn:
        taken = {"fingerprint": b"f", "request_id": "req_1", "slot": 0, "now": int(time.time())}
        assert await idempotency_store.take(conn, gateway.keys.tenant_id, "k", **taken) is None
    of_it = "SELECT (SELECT count(*) FROM idempotent_reply), (SELECT count(*) FROM limiter_gateway)"
    before = await gateway.sql(of_it)
    said = await headgate("journals", "abandon", "0", "--yes", expect=1, home=there, more=database_url)
    assert "A living gateway owns slot 0." in said
    away = database_url | {"HEADGATE_REDIS_URL": "redis://127.0.0.1:1/0"}
    said = await headgate("journals", "abandon", "0", "--yes", expect=1, home=there, more=away)
    assert "Redis must answer" in said
    (there / "state" / "gateway-0" / "journal").mkdir(parents=True)
    [found] = json.loads(await headgate("journals", "replay", "0", "--json", home=there, more=database_url))
    assert found["owned"] is True
    assert await gateway.sql(of_it) == before


async def test_a_start_with_fewer_gateways_replays_the_others(gateway, capsys):
    await die_as_gateway_7(gateway)
    settings = gateway.settings
    start = Preparation(Home(settings.home), settings.database_url, settings.redis_url, migrates=True)
    await start.replay_unused_slots(1)
    assert await endings(gateway) == ENDED_AND_VOID
    assert "gateway-7 is no longer used: 1 endings" in capsys.readouterr().err
    await start.replay_unused_slots(1)
    assert capsys.readouterr().err == ""


async def test_a_start_says_that_a_model_is_free_until_it_has_a_price(gateway, tmp_path):
    settings = gateway.settings
    start = Preparation(Home(settings.home), settings.database_url, settings.redis_url, migrates=True)
    models = [ServedModel(name, tmp_path, WantedModel(name)) for name in (MODEL, "big")]
    await start.prepare_database(models)
    assert start.price_notes == ["big is free: its price on the sheet standard is 0 (headgate prices add)."]
    rates = {(name, "interactive"): Rates(1, 1, 1, 1) for name in (MODEL, "big")}
    async with gateway.app[DATABASE].write() as conn:
        await prices.add_version(conn, prices.DEFAULT_SHEET, rates, clock.now_ms() + 1)
    await asyncio.sleep(0.01)
    await start.prepare_database(models)
    assert start.price_notes == []


async def test_what_only_a_lost_journal_knew_is_abandoned(gateway, headgate):
    """Void: what an engine recorded long ago and nobody ended. Not what another slot holds or has in its journal, not what
    is young; a journal that is there is not abandoned."""
    tenant, database = gateway.keys.tenant_id, gateway.app[DATABASE]
    old_ms = time.time_ns() // 1_000_000 - OLD_MS
    lost, held, opened = "req_lost", "req_held_by_slot_1", "req_opened_by_slot_0"
    async with database.write() as conn:
        for name in (lost, held, opened):
            of_it = record(name, Usage(0, 0, 5, 2), tenant_id=tenant)
            await request_postings.post_engine_records(conn, [of_it], now_ms=old_ms)
        await limiter_state.join(conn, 6, old_ms)
        young = record("req_young", Usage(0, 0, 5, 2), tenant_id=tenant)
        await request_postings.post_engine_records(conn, [young])
    link = limiter_link(gateway.settings.redis_url)
    dead, other = (Limiter(link, slot, database, caught_up=gateway.settled) for slot in (6, 1))
    principal = Principal("tenant", tenant, "key_x", frozenset(), tenant_limits=Limits(concurrency=9))
    now_ms = time.time_ns() // 1_000_000
    for limiter, name in ((dead, lost), (other, held)):
        holder = LimitSubject.of(name, principal, MODEL, "interactive", now_ms=now_ms)
        await limiter.reserve(holder, 5, 5, [(2, 2)])
    await gateway.app[METERING].journal.open(
        Opened(
            request_id=opened,
            tenant_id=tenant,
            key_id="key_x",
            model=MODEL,
            root="r",
            tier="interactive",
            price_version="standard@1",
            currency="USD",
            opened_at_ms=1,
            prompt_tokens=5,
            reserved=10,
        )
    )
    await asyncio.sleep(0.1)
    said = await headgate("journals", "abandon", "0", "--yes", expect=1)
    assert "headgate journals replay 0" in said
    said = await headgate("journals", "abandon", "77", "--yes", expect=1)
    assert "There is no slot 77" in said
    assert "gateway-77" not in await headgate("journals", "list")
    assert not (gateway.settings.home / "state" / "gateway-77").exists()
    [found] = await read(headgate, "journals", "abandon", "6", "--yes")
    assert found == {"slot": "gateway-6", "voided": 1, "charged": 0, "younger": 1}
    assert await endings(gateway) == [(lost, "void", 0, "gateway_crash"), (lost, "gateway_crash", 0, "gateway_crash")]
    assert await link.command("ZRANGE", open_key(tenant), 0, -1) == [held.encode()]
    async with database.read() as conn:
        report = await books.verify(conn, running=frozenset({held, opened, "req_young"}))
    assert [e.id for e in report.equations if not e.ok] == []
    await gateway.app[METERING].journal.end(posting(opened, kind="void", tenant_id=tenant, key_id="key_x"))
    for limiter in (dead, other):
        await limiter.rebuilder.leave()
    await link.close()


async def test_an_answer_that_is_stored_is_charged_although_its_journal_is_lost(gateway, headgate):
    tenant, key_id, database = gateway.keys.tenant_id, "key_x", gateway.app[DATABASE]
    usage, old_ms = Usage(0, 0, 5, 2), time.time_ns() // 1_000_000 - OLD_MS
    async with database.write() as conn:
        await request_postings.post_engine_records(conn, [record("req_kept", usage, tenant_id=tenant)], now_ms=old_ms)
        await request_postings.post(conn, 6, 1, [])
        taken = {"fingerprint": b"f", "request_id": "req_kept", "slot": 6, "now": int(time.time())}
        assert await idempotency_store.take(conn, tenant, "k", **taken) is None
        kept = posting("req_kept", usage, tenant_id=tenant, key_id=key_id, charge=Charge(7, 0, 0, 3, 4))
        stored = {"request_id": "req_kept", "status": 200, "body": b"sealed", "postings": [kept]}
        assert await idempotency_store.store(conn, tenant, "k", **stored)
    [found] = await read(headgate, "journals", "abandon", "6", "--yes")
    assert found == {"slot": "gateway-6", "voided": 0, "charged": 1, "younger": 0}
    assert [row.charge for row in await gateway.sql("SELECT charge FROM ledger_entry WHERE kind = 'settle'")] == [7]


async def test_models_of_a_tenant_are_allowed_denied_and_cleared(headgate):
    await headgate("tenants", "create", "acme")
    said = await headgate("models-permissions", "deny", "acme", "m", "n")
    assert f"m, n are not served now; served are: {MODEL}." in said
    found = await read(headgate, "models-permissions", "show", "acme")
    assert (found["mode"], found["model_ids"]) == ("deny_list", ["m", "n"])
    await headgate("models-permissions", "allow", "acme", "m")
    found = await read(headgate, "models-permissions", "show", "acme")
    assert (found["mode"], found["model_ids"]) == ("allow_list", ["m"])
    await headgate("models-permissions", "clear", "acme")
    found = await read(headgate, "models-permissions", "show", "acme")
    assert found["model_ids"] == []


async def test_the_audit_log_is_read_and_filtered(headgate):
    await headgate("tenants", "create", "acme")
    await headgate("tenants", "rename", "acme", "apex")
    await headgate("keys", "create", "--admin", "--name", "second")
    entries = await read(headgate, "audit", "list", "--tenant", "apex")
    assert [entry["type"] for entry in entries] == ["project.updated", "project.created"]
    [made] = await read(headgate, "audit", "list", "--actor", "cli", "--days", "1")
    assert (made["type"], made["actor"]["session"]["user"]["id"]) == ("api_key.created", "cli")
    printed = await headgate("audit", "list", "--type", "project.updated", "--limit", "1")
    assert "apex" in printed
    assert "project.created" not in printed


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(group)
    found: list[tuple[str, ...]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        at = (*path, name)
        found += commands(command, at) if isinstance(command, click.Group) else [at]
    return found


ADMINISTRATION = [
    at
    for at in commands(main)
    if at[0] in {"tenants", "keys", "limits", "audit", "models-permissions", "quotas", "journals"}
]


@pytest.mark.parametrize("at", ADMINISTRATION, ids=" ".join)
def test_every_command_of_administration_has_json_and_says_what_it_does(at):
    output = CliRunner().invoke(main, [*at, "--help"]).output
    assert "--json" in output
    assert len(output.split("Options:")[0].splitlines()) >= 3, "a summary below the usage"
