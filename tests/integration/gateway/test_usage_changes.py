"""`/v1/usage/changes`, `/admin/v1/usage/changes` and `headgate usage-changes`: who sees what, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from click.testing import CliRunner
from gateways import MODEL, RunningGateway, running_gateway
from money import posting
from redis_db import emptied

from accounting.comparison.causes import CAUSES
from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.values.periods import DAY_S, bounds
from accounting.values.types import Usage
from gateway.base.app_keys import DATABASE
from gateway.cli.main import main

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWN, ADMIN = "/v1/usage/changes", "/admin/v1/usage/changes"
BEFORE, AFTER = bounds("2025-09"), bounds("2025-10")
ASKED = dict(zip(("before_start_time", "before_end_time", "start_time", "end_time"), (*BEFORE, *AFTER), strict=True))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(redis_socket, tmp_path_factory) -> AsyncIterator[RunningGateway]:
    """A tenant whose outputs became four times as long, and another one that only began."""
    async with running_gateway(tmp_path_factory.mktemp("gateway"), emptied(redis_socket, 3)) as running:
        other, _ = await running.new_tenant("other")
        await use(running, running.keys.tenant_id, BEFORE[0], 10, Usage(100, 0, 400, 100))
        await use(running, running.keys.tenant_id, AFTER[0], 11, Usage(100, 0, 400, 400))
        await use(running, other, AFTER[0], 5, Usage(0, 0, 9_000, 9_000), key="key_other")
        yield running


async def use(gateway: RunningGateway, tenant: str, start: int, num: int, usage: Usage, key: str = "key_own") -> None:
    async with gateway.app[DATABASE].write() as conn:
        rates = await prices.rates_of(conn, "standard@1", MODEL, "interactive")
        assert rates is not None
        made = [
            posting(
                f"req_{tenant}_{start}_{day}",
                usage,
                tenant_id=tenant,
                key_id=key,
                model=MODEL,
                opened_at_ms=(start + day * DAY_S) * 1000,
                charge=pricing.charge(usage, rates),
            )
            for day in range(num)
        ]
        await request_postings.post(conn, 9, int(time.time()), made)


async def ask(gateway: RunningGateway, path: str = OWN, key: str | None = None, **params: Any) -> tuple[int, Any]:
    async with gateway.session(key) as session, session.get(path, params={**ASKED, **params}) as answer:
        return answer.status, await answer.json()


async def costs(gateway: RunningGateway, interval: tuple[int, int]) -> int:
    """What `/v1/organization/costs` has for the tenant, in micro-units."""
    asked = {"start_time": interval[0], "end_time": interval[1], "limit": 31}
    async with gateway.session() as session, session.get("/v1/organization/costs", params=asked) as answer:
        page = json.loads(await answer.text(), parse_float=str)
    amounts = [str(one["amount"]["value"]) for bucket in page["data"] for one in bucket["results"]]
    return sum(
        int(whole or 0) * 10**6 + int(rest.ljust(6, "0")) for whole, _, rest in (a.partition(".") for a in amounts)
    )


async def test_a_tenant_is_told_the_cause_and_parts_that_add_up_to_its_costs(gateway):
    status, found = await ask(gateway)
    assert status == 200
    assert (found["object"], found["project_id"], found["currency"]) == ("usage.changes", gateway.keys.tenant_id, "usd")
    assert found["first_cause"] == found["parts"][0]["cause"] == "output_length"
    assert sorted(part["cause"] for part in found["parts"]) == sorted(CAUSES)
    charges = [found[name]["charge_micro_units"] for name in ("before", "after")]
    assert charges == [await costs(gateway, BEFORE), await costs(gateway, AFTER)]
    difference = found["difference_micro_units"]
    assert difference == charges[1] - charges[0] == sum(part["amount_micro_units"] for part in found["parts"]) > 0
    (model,) = found["models"]
    assert (model["model"], model["difference_micro_units"]) == (MODEL, difference)
    assert found["api_keys"] == [
        {
            "api_key_id": "key_own",
            "before_micro_units": charges[0],
            "after_micro_units": charges[1],
            "difference_micro_units": difference,
        }
    ]
    assert (found["after"]["start_time"], found["after"]["end_time"]) == AFTER
    tokens = ("input_tokens", "input_cached_tokens", "input_uncached_tokens", "output_tokens", "num_model_requests")
    assert [found["after"][name] for name in tokens] == [5_500, 1_100, 4_400, 4_400, 11]
    _, turned = await ask(
        gateway, start_time=BEFORE[0], end_time=BEFORE[1], before_start_time=AFTER[0], before_end_time=AFTER[1]
    )
    amounts = {part["cause"]: part["amount_micro_units"] for part in found["parts"]}
    assert {part["cause"]: -part["amount_micro_units"] for part in turned["parts"]} == amounts


async def test_a_tenant_sees_its_own_whatever_it_asks_for(gateway):
    ((other,),) = await gateway.sql("SELECT id FROM tenant WHERE name = 'other'")
    _, own = await ask(gateway)
    assert await ask(gateway, project_id=other) == (200, own)
    for foreign in ({"api_key_id": "key_other"}, {"api_key_id": "key_none"}, {"model": "no-such-model"}):
        status, found = await ask(gateway, **foreign)
        assert (status, found["first_cause"], found["models"], found["api_keys"]) == (200, None, [], [])
        assert {part["amount_micro_units"] for part in found["parts"]} == {0}
        assert {name: found[name] for name in foreign} == foreign
    assert (await ask(gateway, ADMIN))[0] == 403
    _, blind = await gateway.new_tenant("blind", ["chat"])
    assert (await ask(gateway, key=blind))[0] == 403


@pytest.mark.parametrize("path", [OWN, ADMIN])
async def test_the_operator_names_the_tenant(gateway, path):
    ((other,),) = await gateway.sql("SELECT id FROM tenant WHERE name = 'other'")
    status, found = await ask(gateway, path, gateway.keys.admin_key, project_id=other, api_key_id="key_other")
    assert (status, found["project_id"], found["first_cause"]) == (200, other, "volume")
    status, answer = await ask(gateway, path, gateway.keys.admin_key)
    assert (status, answer["error"]["param"]) == (400, "project_id")
    status, answer = await ask(gateway, path, gateway.keys.admin_key, project_id="proj_none")
    assert (status, answer["error"]["message"]) == (404, "Not found.")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"start_time": AFTER[1], "end_time": AFTER[0]}, "start_time"),
        ({"start_time": AFTER[0], "end_time": AFTER[0] + 59}, "start_time"),
        ({"before_start_time": BEFORE[1], "before_end_time": BEFORE[0]}, "before_start_time"),
        ({"start_time": "yesterday"}, "start_time"),
        ({"start_time": "-5"}, "start_time"),
        ({"end_time": 10**17}, "start_time"),
        ({"before_start_time": 0, "before_end_time": AFTER[0]}, "before_end_time"),
        ({"model": "m\0"}, "model"),
        ({"api_key_id": "\0"}, "api_key_id"),
        ({"group_by": "model"}, None),
    ],
)
async def test_what_cannot_be_compared_is_a_400_that_names_the_parameter(gateway, wrong, param):
    status, answer = await ask(gateway, **wrong)
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (400, "invalid_request_error", param)


async def test_a_start_is_needed_and_nothing_else(gateway):
    async with gateway.session() as session:
        async with session.get(OWN) as answer:
            refused = (await answer.json())["error"]
            assert (answer.status, refused["param"], refused["code"]) == (
                400,
                "start_time",
                "missing_required_parameter",
            )
        start = int(time.time()) - DAY_S
        async with session.get(OWN, params={"start_time": start}) as answer:
            found = await answer.json()
    assert (answer.status, found["first_cause"]) == (200, None)
    assert found["before"]["end_time"] == found["after"]["start_time"] == start - start % 60


async def headgate(gateway: RunningGateway, *arguments: str) -> tuple[int, str]:
    environment = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    command = ["usage-changes", *arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


async def test_the_command_names_the_first_cause_and_prints_the_parts(gateway):
    status, output = await headgate(gateway, "default", "--period", "2025-10")
    assert status == 0, output
    _, found = await ask(gateway)
    lines = output.splitlines()
    assert "from 2025-09-01T00:00Z to 2025-10-01T00:00Z" in lines[0]
    assert lines[1].endswith("First cause: output_length, the length of answers.")
    rows = [line.split() for line in lines]
    named = [row[0] for row in rows if row and row[0] in CAUSES]
    assert named == [part["cause"] for part in found["parts"] if part["amount_micro_units"]]
    (outputs,) = [line for line in lines if line.startswith("output_length")]
    assert "100 tokens a request" in outputs
    assert "400 tokens a request" in outputs
    assert any(row[:1] == ["key_own"] for row in rows)
    _, whole = await headgate(gateway, "default", "--period", "2025-10", "--before", "2025-09", "--json")
    assert json.loads(whole) == found
    times = ("--from", "2025-10-01", "--to", "2025-11-01", "--before-from", "2025-09-01", "--before-to", "2025-10-01")
    assert json.loads((await headgate(gateway, "default", *times, "--json"))[1]) == found
    status, output = await headgate(gateway, "default", "--period", "2025-10", "--model", "none", "--key", "key_own")
    assert (status, output.splitlines()[1]) == (0, "Nothing changed.")


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (("default",), "Give --period"),
        (("default", "--before", "2025-09", "--from", "2025-10-01"), "Give --period"),
        (("default", "--period", "2025-10", "--to", "2025-11-01"), "Give --period"),
        (("default", "--period", "2025-13"), "is not a month"),
        (("default", "--from", "2025-10-02", "--to", "2025-10-01"), "start_time must lie"),
        (("nobody", "--period", "2025-10"), "No tenant is called 'nobody'"),
    ],
)
async def test_what_was_typed_wrong_is_one_sentence(gateway, typed, sentence):
    status, output = await headgate(gateway, *typed)
    assert status != 0
    assert sentence in output
    assert "Traceback" not in output


async def test_the_first_month_has_one_before_it(gateway):
    status, output = await headgate(gateway, "default", "--period", "2000-01")
    assert (status, "from 1999-12-01T00:00Z" in output) == (0, True)
