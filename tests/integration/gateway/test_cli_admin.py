"""`headgate tenants`, `keys`, `usage`, `costs`, `verify-books` as an operator types them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from gateways import MODEL, running_gateway
from money import EQUATIONS, posting, record
from sqlalchemy import text

from accounting.books.equations import BALANCE, CONSERVATION, DOCUMENTED_IN
from accounting.requests import request_postings
from accounting.values.types import Usage
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main

HEADGATE = str(Path(sys.executable).parent / "headgate")


@pytest.fixture
async def gateway(tmp_path, redis_url):
    async with running_gateway(tmp_path, redis_url) as running:
        yield running


async def headgate(gateway, *arguments: str, **environment: str) -> tuple[int, str]:
    """(exit status, output) of one command, as the operator of this gateway; in a thread beside the gateway's loop."""
    command = [*arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=_env(gateway, environment))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


def _env(gateway, environment: dict[str, str]) -> dict[str, str]:
    return {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key, **environment}


async def test_the_installed_command_has_them_all(gateway):
    process = await asyncio.create_subprocess_exec(
        HEADGATE,
        "tenants",
        "list",
        "--home",
        str(gateway.settings.home),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **_env(gateway, {})},
    )
    output, _ = await process.communicate()
    assert (process.returncode, b"default" in output) == (0, True)
    listed = CliRunner().invoke(main, ["--help"]).output
    for name in ("costs", "keys", "tenants", "up", "usage", "verify-books"):
        assert f"  {name} " in listed


async def test_a_tenant_gets_a_key_that_works_until_it_is_revoked(gateway):
    status, tenant_id = await headgate(gateway, "tenants", "create", "acme")
    assert status == 0
    assert tenant_id.startswith("proj_")
    _, value = await headgate(gateway, "keys", "create", "acme", "--scope", "chat", "--name", "ci")
    await headgate(gateway, "keys", "create", "acme")
    async with gateway.client(value.strip()) as client:
        assert len((await client.models.list()).data) == 1
    _, listed = await headgate(gateway, "keys", "list", "acme", "--json")
    (mine,) = [key for key in json.loads(listed) if key["name"] == "ci"]
    assert mine["scopes"] == ["chat"]
    assert {key["owner"]["service_account"]["name"] for key in json.loads(listed)} == {"command line"}
    status, _ = await headgate(gateway, "keys", "revoke", tenant_id.strip(), mine["id"])
    assert status == 0
    async with gateway.session(value.strip()) as session, session.get("/v1/models") as answer:
        assert answer.status == 401


async def test_tenants_are_renamed_listed_and_archived(gateway):
    await headgate(gateway, "tenants", "create", "acme")
    assert await headgate(gateway, "tenants", "rename", "acme", "apex") == (0, "apex\n")
    _, output = await headgate(gateway, "tenants", "list")
    assert "apex" in output
    assert await headgate(gateway, "tenants", "archive", "apex", "--yes") == (0, "archived\n")
    assert "apex" not in (await headgate(gateway, "tenants", "list"))[1]
    assert "apex" in (await headgate(gateway, "tenants", "list", "--all"))[1]


async def test_o4_a_name_that_is_taken_is_refused_and_shown_to_scripts_that_say_so(gateway):
    status, tenant_id = await headgate(gateway, "tenants", "create", "acme")
    status, output = await headgate(gateway, "tenants", "create", "acme")
    assert (status, output) == (
        1,
        "headgate: A tenant is called 'acme' already; with --if-not-exists its id is shown.\n",
    )
    for name in ("acme", " acme "):
        assert await headgate(gateway, "tenants", "create", name, "--if-not-exists") == (0, tenant_id)
    status, _ = await headgate(gateway, "tenants", "create", "other", "--if-not-exists")
    assert status == 0
    status, output = await headgate(gateway, "tenants", "rename", "other", "acme")
    assert status == 1
    assert "The name is taken" in output
    async with gateway.session(gateway.keys.admin_key) as session:
        body = {"name": "acme"}
        async with session.post("/v1/organization/projects", json=body) as answer:
            refused = (await answer.json())["error"]
    assert (answer.status, refused["code"]) == (409, "name_taken")
    assert answer.headers["x-should-retry"] == "false"


async def test_times_are_read_by_people_in_tables_and_by_programs_in_json(gateway):
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    await headgate(gateway, "tenants", "create", "acme")
    for arguments in (("tenants", "list"), ("tenants", "show", "acme"), ("prices", "list")):
        _, output = await headgate(gateway, *arguments)
        assert f" {day} " in output, output
    _, output = await headgate(gateway, "tenants", "show", "acme", "--json")
    assert type(json.loads(output)["created_at"]) is int


async def test_usage_and_costs_name_the_tenant(gateway):
    await _post_one(gateway)
    status, output = await headgate(gateway, "usage")
    assert status == 0
    lines = [line.split() for line in output.splitlines() if "default" in line]
    assert len(lines) == 1, repr(output)
    line = lines[0]
    assert line[1:] == ["default", "m", "1", "60", "10", "20", "30", "40"]
    _, output = await headgate(gateway, "costs", "--tenant", "default")
    assert "m, output" in output
    assert "0.000016 USD" in output
    _, output = await headgate(gateway, "costs", "--json")
    assert json.loads(output)["data"][-1]["results"][0]["amount"]["currency"] == "usd"


async def _post_one(gateway, **changes) -> None:
    """A settled request with its engine record, under the first start's own key."""
    ((key_id,),) = await gateway.sql("SELECT id FROM api_key WHERE tenant_id = :t", t=gateway.keys.tenant_id)
    owner = {"tenant_id": gateway.keys.tenant_id}
    now_ms = time.time_ns() // 1_000_000
    usage = Usage(10, 20, 30, 40)
    async with gateway.app[DATABASE].write() as conn:
        await request_postings.post(
            conn, 9, 1, [posting("req_1", usage, key_id=key_id, opened_at_ms=now_ms, **owner, **changes)]
        )
        await request_postings.post_engine_records(conn, [record("req_1", usage, **owner)])


async def test_clean_books_verify_and_broken_ones_exit_with_the_requests_name(gateway):
    await _post_one(gateway)
    status, output = await headgate(gateway, "verify-books", "--json")
    report = json.loads(output)
    assert (status, report["ok"], report["unreplayed"]) == (0, True, [])
    assert {e["id"]: e["num_checked"] for e in report["equations"]}["I1"] == 1
    told = {(e["id"], e["name"], e["meaning"], e["documented_in"]) for e in report["equations"]}
    assert told == {(e.id, e.name, e.meaning, DOCUMENTED_IN) for e in EQUATIONS}
    async with gateway.app[DATABASE].write() as conn:
        ((key_id, tenant_id),) = await gateway.sql("SELECT key_id, tenant_id FROM ledger_entry WHERE kind = 'settle'")
        billed = posting("req_2", Usage(0, 0, 0, 5), tenant_id=tenant_id, key_id=key_id)
        await request_postings.post(conn, 9, 2, [billed])
        await request_postings.post_engine_records(conn, [record("req_2", Usage(0, 0, 0, 4), tenant_id=tenant_id)])
    status, output = await headgate(gateway, "verify-books")
    assert status == 1
    assert "conservation         FAILED" in output
    assert f"\n     {CONSERVATION.meaning}\n       req_2\n" in output
    assert f"\n     {BALANCE.meaning}\n" in output, "also of an equation that holds"
    assert f"\nThe equations are explained in {DOCUMENTED_IN}.\n" in output
    async with gateway.session(gateway.keys.admin_key) as session, session.post("/admin/v1/verify-books") as answer:
        over_http = await answer.json()
    assert (answer.status, over_http["ok"]) == (200, False)
    assert {e["id"]: e["failures"] for e in over_http["equations"]}["I1"] == ["req_2"]


async def test_an_admin_key_can_be_made_without_one(gateway):
    status, value = await headgate(gateway, "keys", "create", "--admin", HEADGATE_URL="http://127.0.0.1:1")
    assert status == 0
    assert value.startswith("hg_admin_")
    status, _ = await headgate(gateway, "tenants", "list", HEADGATE_API_KEY=value.strip())
    assert status == 0


async def test_an_admin_key_for_finance_reads_and_changes_nothing(gateway):
    _, value = await headgate(gateway, "keys", "create", "--admin", "--scope", "admin:read")
    finance = {"HEADGATE_API_KEY": value.strip()}
    assert (await headgate(gateway, "tenants", "list", **finance))[0] == 0
    status, output = await headgate(gateway, "tenants", "create", "acme", **finance)
    assert (status, "This API key may not do this." in output) == (1, True)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (("tenants", "list"), {"HEADGATE_URL": "http://127.0.0.1:1"}, "No Headgate answers at http://127.0.0.1:1"),
        (("keys", "list", "nobody"), {}, "No tenant is called 'nobody'"),
        (("tenants", "list"), {"HEADGATE_API_KEY": ""}, "There is no admin key"),
        (("tenants", "create", " "), {}, "A name must have 1 to 200 characters."),
        (("keys", "create"), {}, "Give either a tenant or --admin."),
        (("keys", "create", "--admin", "--scope", "chat"), {}, "A scope in the list does not exist"),
        (("keys", "create", "--admin", "--model", "m"), {}, "A key of the operator has no models"),
        (("prefixes", "remove", "prefix_x"), {}, "Not found: prefix_x. `headgate prefixes list` shows what there is."),
        (("adapters", "remove", "x"), {}, "Not found: x. `headgate adapters list` shows what there is."),
        (("keys", "show", "key_x"), {}, "Not found: key_x. `headgate keys list` shows what there is."),
        (("prices", "show", "none@1"), {}, "Not found: none@1. `headgate prices list` shows what there is."),
        (("keys", "list", "proj_x"), {}, "No tenant has the id 'proj_x'; `headgate tenants list` shows the ids."),
        (("credits", "correct", "default", "req_x", "0.0012"), {}, "Not found: req_x. `headgate requests list` shows"),
        (("limits", "spend"), {}, "headgate: No spend limit is set."),
        (("limits", "spend", "default"), {}, "headgate: No spend limit is set."),
        (
            ("verify-books",),
            {"HEADGATE_DATABASE_URL": "sqlite+aiosqlite:////nowhere/x.db"},
            "/nowhere/x.db cannot be used",
        ),
    ],
)
async def test_what_cannot_be_done_is_one_sentence_and_a_non_zero_exit(
    shared_gateway, arguments, environment, sentence
):
    status, output = await headgate(shared_gateway, *arguments, **environment)
    assert status != 0
    assert sentence in output
    assert "Traceback" not in output


async def test_two_tenants_of_one_name_must_be_told_apart_by_id(gateway):
    """Older versions let a name be given twice."""
    for name in ("twin", "other"):
        await headgate(gateway, "tenants", "create", name)
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text("UPDATE tenant SET name = 'twin' WHERE name = 'other'"))
    status, output = await headgate(gateway, "keys", "list", "twin")
    assert status == 1
    assert "2 tenants are called 'twin'" in output


async def test_a_limit_is_previewed_and_unusual_keys_are_listed(gateway):
    await _post_one(gateway)
    budget = ("--budget", "0.01", "--period", "day", "--tier", "batch", "--json")
    _, output = await headgate(gateway, "limits", "preview", "default", *budget)
    assert (json.loads(output)["limit_micro_units"], json.loads(output)["num_minutes"]) == (10_000, None)
    _, output = await headgate(gateway, "limits", "preview", "default", "--requests-per-minute", "0", "--json")
    seen = json.loads(output)
    assert (seen["num_requests"], seen["num_refused"]) == (1, 1)
    _, output = await headgate(gateway, "anomalies", "list", "--tenant", "default", "--json")
    assert json.loads(output) == [], "the key was made a moment ago"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("body", [{}, {"model": MODEL}, {"max_requests_per_1_minute": None}])
async def test_a_preview_without_a_limit_is_a_400_that_names_one(shared_gateway, body):
    """It said that 0 requests would be refused."""
    path = "/admin/v1/tenants/default/limits/preview"
    async with (
        shared_gateway.session(shared_gateway.keys.admin_key) as session,
        session.post(path, json=body) as answer,
    ):
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert (error["code"], error["param"]) == ("missing_required_parameter", "max_requests_per_1_minute")
    assert "max_tokens_per_1_minute" in error["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_requests_per_1_day": 1, "max_requests_per_1_minute": 1}, None),
        ({"max_requests_per_1_day": 1, "limit_micro_units": 1, "period": "day"}, None),
        ({"limit_micro_units": 1}, "period"),
        ({"max_tokens_per_1_minute": 1, "period": "day"}, "period"),
    ],
)
async def test_a_preview_of_several_kinds_or_of_half_a_budget_is_a_400(shared_gateway, body, param):
    path = "/admin/v1/tenants/default/limits/preview"
    async with (
        shared_gateway.session(shared_gateway.keys.admin_key) as session,
        session.post(path, json=body) as answer,
    ):
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
