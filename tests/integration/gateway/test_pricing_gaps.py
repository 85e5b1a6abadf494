"""O5: a sheet that lacks a served model says so when it is made and assigned, and requests are told what to do."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from gateways import MODEL, running_gateway

from gateway.cli.main import main

BILLING = Path(__file__).resolve().parents[3] / "docs" / "billing.md"
RATES = {"cache_read": 1, "cache_write": 2, "uncached": 3, "output": 4}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BOTH = [{"model": MODEL, "tier": "batch"}, {"model": MODEL, "tier": "interactive"}]


async def headgate(gateway, *arguments: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error)."""
    environment = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    command = [*arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


async def chat(gateway, key: str) -> tuple[int, dict, dict]:
    path = "/v1/chat/completions"
    async with gateway.session(key) as session, session.post(path, json=CHAT) as answer:
        return answer.status, await answer.json(), dict(answer.headers)


@pytest.mark.parametrize(
    ("rates", "unpriced"),
    [
        ([{"model": "other", **RATES}], BOTH),
        ([{"model": MODEL, **RATES}], BOTH[:1]),
        ([{"model": MODEL, "tier": tier, **RATES} for tier in ("batch", "interactive")], []),
    ],
)
async def test_o5_the_answer_names_served_models_without_a_price(gateway, rates, unpriced):
    tenant = gateway.keys.tenant_id
    async with gateway.session(gateway.keys.admin_key) as session:
        body = {"sheet": "gold", "rates": rates}
        async with session.post("/admin/v1/price-sheets", json=body) as answer:
            assert (answer.status, (await answer.json())["unpriced"]) == (200, unpriced)
        path = f"/admin/v1/tenants/{tenant}/price-sheet"
        async with session.put(path, json={"sheet": "gold"}) as answer:
            assert (answer.status, (await answer.json())["unpriced"]) == (200, unpriced)


async def test_o5_a_version_that_leaves_out_a_model_of_an_upstream_says_so(tmp_path, redis_url):
    upstreams = {"spare": {"url": "http://127.0.0.1:9/v1", "models": {"theirs": {}}}}
    async with running_gateway(tmp_path, redis_url, upstreams=upstreams) as gateway:
        rates = f"{MODEL}=1,2,3,4"
        status, _, said = await headgate(gateway, "prices", "add", "gold", "--rate", rates, "--batch-percent", "50")
        assert (status, "no price for theirs (batch, interactive)" in said) == (0, True), said
        status, _, said = await headgate(gateway, "prices", "assign", "default", "gold")
        assert (status, "no price for theirs (batch, interactive)" in said) == (0, True), said


async def test_a_percentage_makes_the_batch_rates_of_a_file_too(gateway, tmp_path):
    file, rate = tmp_path / "sheet.json", {"model": "a", **dict.fromkeys(RATES, 3)}
    file.write_text(json.dumps({"rates": [rate, {**rate, "model": "b"}, {**rate, "model": "b", "tier": "batch"}]}))
    options = ("--file", str(file), "--rate", f"{MODEL}=1,2,3,4", "--batch-percent", "50", "--json")
    status, made, _ = await headgate(gateway, "prices", "add", "gold", *options)
    assert status == 0
    batch = {one["model"]: one["output"] for one in json.loads(made)["rates"] if one["tier"] == "batch"}
    assert batch == {"a": 2, "b": 3, MODEL: 2_000_000}
    file.write_text(json.dumps({"rates": [{"model": "a"}]}))
    status, _, said = await headgate(gateway, "prices", "add", "gold", *options)
    assert (status, "--batch-percent needs rates" in said) == (2, True)


async def test_o5_a_sheet_that_is_not_in_force_yet_prices_nothing_yet(gateway):
    async with gateway.session(gateway.keys.admin_key) as session:
        later = int(time.time()) + 3_600
        body = {"sheet": "gold", "rates": [{"model": MODEL, **RATES}], "from": later}
        await session.post("/admin/v1/price-sheets", json=body)
        path = f"/admin/v1/tenants/{gateway.keys.tenant_id}/price-sheet"
        async with session.put(path, json={"sheet": "gold"}) as answer:
            assert (await answer.json())["unpriced"] == BOTH
        # From then on it does.
        tenant_id, _ = await gateway.new_tenant("late")
        path = f"/admin/v1/tenants/{tenant_id}/price-sheet"
        async with session.put(path, json={"sheet": "gold", "from": later}) as answer:
            assert (await answer.json())["unpriced"] == BOTH[:1]


async def test_o5_a_request_without_a_price_is_a_403_that_says_whom_to_ask(gateway):
    await headgate(gateway, "prices", "add", "gold", "--rate", "other=1,2,3,4")
    status, _, said = await headgate(gateway, "prices", "assign", "default", "gold")
    assert status == 0
    assert said.startswith("headgate: Warning: "), said
    assert f"{MODEL} (batch, interactive)" in said
    assert "403 price_unknown" in said
    status, body, headers = await chat(gateway, gateway.keys.api_key)
    assert (status, body["error"]["code"]) == (403, "price_unknown")
    assert body["error"]["type"] == "invalid_request_error"
    assert "operator" in body["error"]["message"]
    assert "retry-after" not in {name.lower() for name in headers}


async def test_what_is_given_back_dated_makes_no_charge_before_it_wrong(gateway):
    """A sheet and its next version are given an hour back-dated. What was charged within that hour had another price, and
    the books know why.
    """
    began = int(time.time()) - 7_200
    sheet = {"sheet": "gold", "rates": [{"model": MODEL, "tier": tier, **RATES} for tier in ("batch", "interactive")]}

    async def charged_by(version: str) -> None:
        while True:
            status, body, _ = await chat(gateway, gateway.keys.api_key)
            assert status == 200
            if body["headgate"]["price_version"] == version:
                return

    async with gateway.session(gateway.keys.admin_key) as session:
        await charged_by("standard@1")
        assert (await session.post("/admin/v1/price-sheets", json=sheet | {"from": began})).status == 200
        path = f"/admin/v1/tenants/{gateway.keys.tenant_id}/price-sheet"
        assert (await session.put(path, json={"sheet": "gold", "from": began})).status == 200
        await charged_by("gold@1")
        assert (await session.post("/admin/v1/price-sheets", json=sheet | {"from": began + 3_600})).status == 200
        await charged_by("gold@2")
    await gateway.balanced()


async def test_o9_assigning_a_sheet_twice_changes_nothing(gateway):
    await headgate(gateway, "prices", "add", "gold", "--rate", f"{MODEL}=1,2,3,4")
    once = await headgate(gateway, "prices", "assign", "default", "gold")
    await asyncio.sleep(1.1)  # another second, which would begin another interval
    assert await headgate(gateway, "prices", "assign", "default", "gold") == once
    told = await gateway.sql("SELECT count(*) FROM audit_log WHERE event = 'headgate.price_sheet.assigned'")
    assert told[0][0] == 1


async def test_o5_the_first_rows_of_the_billing_page_work_as_printed(gateway):
    """For the model that the page names: the one that `make serve` serves."""
    page = BILLING.read_text()
    _, key = await gateway.new_tenant("acme")
    for step in ("price", "assign"):
        (command,) = re.findall(rf"^\| {step} \| `headgate ([^`]+)`", page, re.MULTILINE)
        words = shlex.split(command.replace("headgate-demo", MODEL))
        status, _, said = await headgate(gateway, *words)
        assert (status, said) == (0, ""), command
    status, body, _ = await chat(gateway, key)
    assert status == 200, body
