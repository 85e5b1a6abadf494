"""Aliases, fallbacks, and models that come and go, with scripted workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, running_gateway, until

from accounting.lifecycle.bootstrap import EXAMPLE_RATES, bootstrap
from gateway.base.settings import SettingsError
from gateway.generation.stream import GENERATION
from gateway.resources import serve_models

PROMPT = {"prompt": "abcdefgh", "max_tokens": 4, "temperature": 0}


def write_models(path: Path, **models: dict[str, Any]) -> None:
    """Every model has the scripted one's tokenizer."""
    directory = str(path.parent / "home" / "model")
    path.write_text(json.dumps({name: {"path": directory, **more} for name, more in models.items()}))


@pytest.fixture
async def two(tmp_path: Path, redis_url: str) -> AsyncIterator[RunningGateway]:
    """The scripted model, which has a worker, and `big`, which has none and falls back to it."""
    models = tmp_path / "models.json"
    write_models(models, **{MODEL: {"aliases": ["small"]}, "big": {"aliases": ["gpt-4o"], "fallbacks": [MODEL]}})
    async with (
        running_gateway(tmp_path / "home", redis_url, models_file=models) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0"),
    ):
        await bootstrap(gateway.settings.sql_url, PEPPER, {"big": EXAMPLE_RATES}, gateway.keys)
        await gateway.workers(1)
        yield gateway


async def ask(gateway: RunningGateway, model: str, key: str | None = None, **more: Any) -> tuple[int, Any, Any]:
    async with (
        gateway.session(key) as session,
        session.post("/v1/completions", json={"model": model, **PROMPT, **more}) as answer,
    ):
        return answer.status, await (answer.text() if more.get("stream") else answer.json()), answer.headers


async def test_an_alias_is_answered_as_asked_and_charged_to_its_model(two: RunningGateway) -> None:
    status, body, headers = await ask(two, "small")
    assert (status, body["model"]) == (200, "small")
    assert "x-headgate-fallback" not in headers
    assert "fallback_from" not in body["headgate"]
    await two.balanced()
    assert await two.sql("SELECT model FROM ledger_entry WHERE kind = 'settle'") == [(MODEL,)]


@pytest.mark.parametrize("asked", ["big", "gpt-4o"])
async def test_a_fallback_answers_says_so_and_is_what_is_charged(two: RunningGateway, asked: str) -> None:
    status, body, headers = await ask(two, asked)
    assert (status, body["model"], headers["x-headgate-fallback"]) == (200, asked, MODEL)
    assert (body["headgate"]["model"], body["headgate"]["fallback_from"]) == (MODEL, "big")
    status, text, headers = await ask(two, asked, stream=True)
    assert (status, headers["x-headgate-fallback"]) == (200, MODEL)
    assert '"fallback_from":"big"' in text
    await two.balanced()
    assert await two.sql("SELECT DISTINCT model FROM ledger_entry WHERE kind = 'settle'") == [(MODEL,)]


async def test_a_model_with_a_worker_needs_no_fallback(two: RunningGateway, tmp_path: Path, redis_url: str) -> None:
    async with ScriptedWorker(tmp_path / "w1.sock", redis_url=redis_url, model="big", slot=1):
        await two.workers(2)
        _, body, headers = await ask(two, "big")
        assert "x-headgate-fallback" not in headers
        assert "fallback_from" not in body["headgate"]


async def test_an_allow_list_follows_the_target(two: RunningGateway) -> None:
    _, big_alone = await two.new_tenant("big alone", models=["big"])
    status, body, _ = await ask(two, "small", big_alone)
    assert (status, body["error"]["code"]) == (403, "model_not_allowed")
    status, body, _ = await ask(two, "big", big_alone)  # its fallback is not allowed to this key
    assert (status, body["error"]["code"]) == (503, "no_worker")


async def test_the_list_shows_aliases_and_an_alias_can_be_retrieved(two: RunningGateway) -> None:
    async with two.client() as client:
        listed = {model.id: model.model_dump() for model in (await client.models.list()).data}
        assert {name: model["aliases"] for name, model in listed.items()} == {MODEL: ["small"], "big": ["gpt-4o"]}
        assert listed[MODEL]["capabilities"] == ["completions", "chat"]
        assert (await client.models.retrieve("gpt-4o")).id == "big"


async def test_models_come_and_go_while_the_gateway_serves(two: RunningGateway, tmp_path: Path) -> None:
    write_models(tmp_path / "models.json", **{MODEL: {"aliases": ["tiny"], "max_model_len": 8}})
    await serve_models(two.app)
    for gone in ("big", "gpt-4o", "small"):
        status, body, _ = await ask(two, gone)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, body, _ = await ask(two, "tiny")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_file_that_cannot_be_used_changes_nothing(two: RunningGateway, tmp_path: Path) -> None:
    write_models(tmp_path / "models.json", **{MODEL: {"fallbacks": ["bigg"]}, "big": {}})
    with pytest.raises(SettingsError, match=r"has the fallback bigg, which is not served\. Did you mean big\?"):
        await serve_models(two.app)
    write_models(tmp_path / "models.json", **{MODEL: {"aliases": ["big"]}, "big": {}})
    with pytest.raises(SettingsError, match=f"The alias big of the model {MODEL} is already a name of big"):
        await serve_models(two.app)
    assert (await ask(two, "small"))[0] == 200


async def test_a_worker_that_stops_leaves_its_requests_to_the_fallback(
    two: RunningGateway, tmp_path: Path, redis_url: str
) -> None:
    async with ScriptedWorker(tmp_path / "w1.sock", redis_url=redis_url, model="big", slot=1):
        await two.workers(2)
    fleet = two.app[GENERATION].fleet
    await until(lambda: not any(link.takes_work for link in fleet.links if link.registration.model == "big"))
    assert (await ask(two, "big"))[2]["x-headgate-fallback"] == MODEL


async def test_workers_with_another_tokenizer_leave_their_requests_to_the_fallback(
    two: RunningGateway, tmp_path: Path, redis_url: str
) -> None:
    path, runner = tmp_path / "w1.sock", ScriptedRunner(vocabulary="of others")
    async with ScriptedWorker(path, redis_url=redis_url, model="big", slot=1, runner=runner):
        await two.workers(2)
        status, _, headers = await ask(two, "big")
        assert (status, headers.get("x-headgate-fallback")) == (200, MODEL)
