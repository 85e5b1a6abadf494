"""Endings of requests that an upstream answers: stored answers, clients and gateways that leave, budgets, false bills."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from gateways import MODEL, RunningGateway, running_gateway
from provider import KEY, TEXT, Provider, Script, declared, price, running_provider

from gateway.base.app_keys import LIFECYCLE
from gateway.base.settings import SettingsError
from gateway.configuration.file import read
from gateway.routes import bought
from gateway.upstreams import answer as answers
from gateway.upstreams import exchange
from gateway.upstreams.breaker import MOST_FAILURES
from gateway.upstreams.market import MARKET
from gateway.upstreams.witness import LONG_BYTES, Seen

WORDS = [{"role": "user", "content": "Say something about foxes."}]
LONG = TEXT * 60


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with running_provider() as found:
        yield found


@pytest.fixture
async def gateway(tmp_path: Path, redis_url: str, provider: Provider) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path / "home", redis_url, upstreams={"mock": declared(provider)}) as found:
        await price(found, "bought", "vectors")
        yield found


async def test_an_answer_under_a_key_is_bought_once(gateway: RunningGateway, provider: Provider) -> None:
    headers = {"idempotency-key": "once"}
    answers = []
    async with gateway.session() as session:
        for _ in range(2):
            body = {"model": "bought", "messages": WORDS}
            async with session.post("/v1/chat/completions", json=body, headers=headers) as answer:
                answers.append(await answer.json())
    assert answers[0] == answers[1]
    assert len(provider.asked) == 1
    await gateway.balanced()


async def asked_everywhere(gateway: RunningGateway, tools: bool = True) -> tuple[Any, Any, Any]:
    """What chat, Messages and Responses answer."""
    schema = {"type": "object", "properties": {}}
    bodies: dict[str, Any] = {
        "chat/completions": {"messages": WORDS, "max_tokens": 90},
        "messages": {"messages": WORDS, "max_tokens": 90},
        "responses": {"input": "Say something.", "max_output_tokens": 90},
    }
    if tools:
        named: dict[str, Any] = {"type": "function", "name": "look"}
        function = {"type": "function", "function": {"name": "look", "parameters": schema}}
        bodies["chat/completions"] |= {"tools": [function], "tool_choice": {"type": "function", "function": named}}
        named_tool = {"type": "tool", "name": "look"}
        bodies["messages"] |= {"tools": [{"name": "look", "input_schema": schema}], "tool_choice": named_tool}
        bodies["responses"] |= {"tools": [named | {"parameters": schema, "strict": False}], "tool_choice": named}
    answers = []
    async with gateway.session() as session:
        for path, body in bodies.items():
            async with session.post(f"/v1/{path}", json=body | {"model": "bought"}) as answer:
                answers.append(await answer.json())
                assert answer.status == 200, answers[-1]
    chat, message, response = answers
    return chat["choices"][0], message, response


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_an_answer_that_the_providers_filter_cut_says_so(
    tmp_path: Path, redis_url: str, provider: Provider, kind: str
) -> None:
    upstreams = {"mock": declared(provider, kind=kind)}
    if kind == "anthropic":
        del upstreams["mock"]["models"]["vectors"]
    async with running_gateway(tmp_path / "home", redis_url, upstreams=upstreams) as gateway:
        await price(gateway, "bought")
        for calls in ((), [("look", '{"at"')]):
            provider.scripts = [Script(text="Foxes", calls=calls, finish="content_filter") for _ in range(3)]
            choice, message, response = await asked_everywhere(gateway, tools=bool(calls))
            assert choice["finish_reason"] == "content_filter"
            assert message["stop_reason"] == "refusal"
            ending = response["status"], response["incomplete_details"], response["output"][-1]["status"]
            assert ending == ("incomplete", {"reason": "content_filter"}, "incomplete")
        await gateway.balanced()


async def test_a_named_call_that_a_provider_ends_with_stop_is_a_call(
    gateway: RunningGateway, provider: Provider
) -> None:
    provider.scripts = [Script(text="", calls=[("look", '{"at": 1}')], finish="stop") for _ in range(3)]
    choice, message, response = await asked_everywhere(gateway)
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["name"]) == ("stop", "look")
    assert (message["stop_reason"], message["content"][0]["type"]) == ("tool_use", "tool_use")
    assert (response["status"], response["output"][0]["type"]) == ("completed", "function_call")


async def test_a_draining_gateway_cuts_and_what_was_bought_is_known(
    gateway: RunningGateway, provider: Provider
) -> None:
    provider.scripts = [Script(text=LONG, pause_s=0.05)]
    async with gateway.session() as session:
        body = {"model": "bought", "messages": WORDS, "stream": True, "max_tokens": 900}
        async with session.post("/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            for cut in list(gateway.app[LIFECYCLE].on_cut):
                cut()
            text = await answer.text()
    assert "server_draining" in text
    await gateway.balanced()
    [row] = await gateway.sql("SELECT state, drift, judged_output FROM upstream_call")
    assert (row.state, row.drift) == ("cut", "cut")
    [(charge,)] = await gateway.sql("SELECT sum(charge) FROM ledger_entry")
    assert charge == 0


async def test_many_at_once_are_each_charged_what_the_provider_bills(
    gateway: RunningGateway, provider: Provider
) -> None:
    async def ask(number: int) -> int:
        body = {"model": "bought", "messages": WORDS, "max_tokens": number + 1, "stream": bool(number % 2)}
        async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
            await answer.read()
            return answer.status

    statuses = await asyncio.gather(*(ask(number) for number in range(24)))
    assert set(statuses) == {200}
    await gateway.balanced()
    [(charged,)] = await gateway.sql("SELECT sum(charge) FROM ledger_entry")
    assert charged == sum(row["amount"] for row in provider.bills)
    assert gateway.app[MARKET].places["mock"].num_running == 0


async def test_prompts_for_an_upstream_are_counted_off_the_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer takes seconds for the longest prompts, and every tenant's stream waited for it."""
    threads: list[int] = []
    for name in ("_counted", "_interval_of"):
        count = getattr(bought, name)

        def noted(*given: Any, count: Callable[..., Any] = count) -> Any:
            threads.append(threading.get_ident())
            return count(*given)

        monkeypatch.setattr(bought, name, noted)
    text = "foxes " * 2_000
    asked = {
        "chat/completions": {"model": "bought", "messages": [{"role": "user", "content": text}]},
        "completions": {"model": "bought", "prompt": text},
        "embeddings": {"model": "vectors", "input": text},
    }
    async with gateway.session() as session:
        for path, body in asked.items():
            async with session.post(f"/v1/{path}", json=body) as answer:
                assert answer.status == 200, await answer.text()
    assert len(threads) == 3
    assert threading.get_ident() not in threads


async def test_a_long_answer_is_counted_once_and_off_the_loop(
    gateway: RunningGateway, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens were counted twice on the loop, which stood still for all tenants."""
    threads: list[int] = []

    def count(text: str) -> int:
        if len(text) > LONG_BYTES:
            threads.append(threading.get_ident())
        return -(-len(text) // 4)

    monkeypatch.setattr(answers, "Seen", lambda num_choices, _: Seen(num_choices, count))
    provider.scripts = [Script(text=LONG)]
    body = {"model": "bought", "messages": WORDS}
    async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    await gateway.balanced()


async def test_a_call_that_the_bound_cuts_is_paid_and_keeps_nobody_from_the_model(
    gateway: RunningGateway, provider: Provider
) -> None:
    """It was a failure of the provider: free, and after five of them the model was closed to everybody."""
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": WORDS, "tools": [{"type": "function", "function": tool}]}),
        ("responses", {"input": "Say something.", "tools": [{"type": "function", **tool}]}),
        ("messages", {"messages": WORDS, "tools": [{"name": "look", "input_schema": tool["parameters"]}]}),
    ]
    ends = {"chat/completions": "length", "responses": "incomplete", "messages": "max_tokens"}
    async with gateway.session() as session:
        for path, body in asked * 2:
            provider.scripts = [Script(text="", calls=[("look", '{"at": "the bro')], finish="length")]
            bound = "max_output_tokens" if path == "responses" else "max_tokens"
            async with session.post(f"/v1/{path}", json=body | {"model": "bought", bound: 8}) as answer:
                found = await answer.json()
            assert answer.status == 200, found
            end = found.get("status") or found.get("stop_reason") or found["choices"][0]["finish_reason"]
            assert end == ends[path]
    assert gateway.app[MARKET].places["mock"].state == "closed"
    await gateway.balanced()
    [(charged,)] = await gateway.sql("SELECT sum(charge) FROM ledger_entry")
    assert charged == sum(row["amount"] for row in provider.bills) > 0


async def test_a_fault_of_ours_leaves_no_upstream_on_trial(
    gateway: RunningGateway, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage one request is the trial. If it ended by a fault of ours, none was ever sent again."""
    place = gateway.app[MARKET].places["mock"]
    for _ in range(MOST_FAILURES):
        place.breaker.failed(0.0, "away")
    assert place.breaker.state(time.monotonic()) == "half_open"
    body = {"model": "bought", "messages": WORDS}
    async with gateway.session() as session:
        with monkeypatch.context() as patch:
            patch.setattr(exchange, "chunks", lambda *_: 1 / 0)
            async with session.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 503
        async with session.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()


async def test_the_request_log_and_the_workers_page_name_no_address(
    gateway: RunningGateway, provider: Provider
) -> None:
    async with gateway.session() as session:
        async with session.post("/v1/chat/completions", json={"model": "bought", "messages": WORDS}) as answer:
            headgate = (await answer.json())["headgate"]
        request_id = headgate["request_id"]
        await gateway.settled()
    assert headgate["charge_micro_units"] > 0
    entries = str(await gateway.sql("SELECT * FROM ledger_entry")) + str(
        await gateway.sql("SELECT * FROM engine_record")
    )
    assert request_id in entries
    assert provider.url not in entries


async def test_a_file_declares_upstreams_and_fallbacks_to_them(tmp_path: Path) -> None:
    path = tmp_path / "headgate.toml"
    path.write_text(
        '[models.own]\npath = "/m"\nfallbacks = ["llama"]\n\n'
        '[upstreams.router]\nurl = "https://openrouter.ai/api/v1"\nkey_env = "ROUTER_KEY"\n\n'
        '[upstreams.router.models.llama]\nname = "meta/llama"\ninput = 0.05\n'
    )
    found = read(path)
    told = json.loads(found.variables["HEADGATE_UPSTREAMS"])
    assert told["router"]["models"] == {"llama": {"name": "meta/llama", "input": 0.05}}
    assert found.foreign == {"llama"}
    path.write_text('[upstreams.router]\nurl = "https://x/v1"\napi_key = "sk-secret"\n[upstreams.router.models.a]\n')
    with pytest.raises(SettingsError) as refused:
        read(path)
    assert "key_env" in str(refused.value)
    assert "sk-secret" not in str(refused.value)


async def test_a_model_of_ours_keeps_its_name_beside_an_upstreams(
    tmp_path: Path, redis_url: str, provider: Provider
) -> None:
    entry = declared(provider)
    entry["models"] = {MODEL: {}}
    async with running_gateway(tmp_path / "home2", redis_url, upstreams={"mock": entry}) as gateway:
        async with gateway.session() as session, session.get("/v1/models") as answer:
            served = [one["id"] for one in (await answer.json())["data"]]
        assert served.count(MODEL) == 1


@pytest.mark.parametrize("script", [Script(before_s=5), Script(stall_after=0), Script(stall_after=2)])
async def test_an_upstream_that_stalls_is_left_and_costs_nothing(
    tmp_path: Path, redis_url: str, provider: Provider, script: Script
) -> None:
    entry = declared(provider, first_byte_s=0.2, idle_s=0.2, attempts=2)
    provider.scripts = [script, script]
    async with running_gateway(tmp_path / "home3", redis_url, upstreams={"mock": entry}) as gateway:
        await price(gateway, "bought")
        body = {"model": "bought", "messages": WORDS}
        async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"][:9]) == (503, "upstream_")
        assert len(provider.asked) == (1 if script.stall_after == 2 else 2)
        await gateway.balanced()
        assert (await gateway.sql("SELECT sum(charge) FROM ledger_entry"))[0][0] == 0


async def test_the_cost_that_an_answer_states_stands_beside_ours(gateway: RunningGateway, provider: Provider) -> None:
    provider.scripts = [Script(cost=0.0005)]
    body = {"model": "bought", "messages": WORDS}
    async with gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        charge = (await answer.json())["headgate"]["charge_micro_units"]
    await gateway.settled()
    async with gateway.session(gateway.keys.admin_key) as session, session.get("/admin/v1/upstreams/mock") as answer:
        [usage] = (await answer.json())["usage"]
    assert (usage["expected_cost_micro_units"], usage["stated_cost_micro_units"]) == (charge, 500)
