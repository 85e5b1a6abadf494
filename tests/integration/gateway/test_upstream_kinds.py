"""Anthropic and Azure as upstreams, overflow, the breaker, and the operator's commands over them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from provider import KEY, RATES, TEXT, Provider, Script, declared, price, running_provider

from gateway.cli.main import main
from gateway.generation.stream import GENERATION
from gateway.telemetry.metrics import METRICS
from gateway.upstreams.market import MARKET

WORDS = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say something."}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
async def provider(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Provider]:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with running_provider() as found:
        yield found


def one_model(provider: Provider, kind: str, path: str, **more: Any) -> dict[str, Any]:
    models = {"bought": {"name": "theirs", "max_output_tokens": 900, **RATES}}
    return {"kind": kind, "url": provider.url + path, "key_env": "PROVIDER_KEY", "models": models, **more}


async def post(gateway: RunningGateway, body: dict[str, Any], key: str | None = None) -> tuple[int, Any, Any]:
    async with gateway.session(key) as session, session.post("/v1/chat/completions", json=body) as answer:
        return answer.status, json.loads(await answer.text()), answer.headers


async def admin(gateway: RunningGateway, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with gateway.session(gateway.keys.admin_key) as session, session.request(method, path, json=body) as answer:
        return answer.status, await answer.json()


async def test_anthropic_answers_chat_with_tools_and_thoughts(
    tmp_path: Path, redis_url: str, provider: Provider
) -> None:
    provider.scripts = [Script(reasoning="Foxes. ", calls=[("look", '{"at": 1}')], cached=4)]
    upstreams = {"claude": one_model(provider, "anthropic", "/v1")}
    async with running_gateway(tmp_path / "home", redis_url, upstreams=upstreams) as gateway:
        await price(gateway, "bought")
        history = [
            *WORDS,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 2}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "a fox"},
        ]
        body = {"model": "bought", "messages": history, "tools": TOOLS, "stop": ["END"], "max_tokens": 300}
        status, answer, _ = await post(gateway, body)
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == (TEXT, "Foxes. ")
        assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        status, answer, _ = await post(gateway, {"model": "bought", "messages": WORDS, "seed": 3})
        assert (status, answer["error"]["param"]) == (400, "seed")
        await gateway.balanced()
    [asked] = provider.asked
    assert (asked["system"], asked["stop_sequences"], asked["max_tokens"]) == ("Be short.", ["END"], 300)
    assert [turn["role"] for turn in asked["messages"]] == ["user", "assistant", "user"]
    assert asked["messages"][1]["content"] == [{"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": 2}}]
    assert provider.heads[0]["x-api-key"] == KEY


async def test_what_anthropic_cannot_say_is_refused_in_the_callers_words(
    tmp_path: Path, redis_url: str, provider: Provider
) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    asked = {
        "chat/completions": {
            "messages": WORDS,
            "tools": [{"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}],
        },
        "messages": {
            "messages": WORDS[1:],
            "max_tokens": 50,
            "tools": [{"name": "look", "input_schema": schema, "strict": True}],
        },
        "responses": {
            "input": "Say something.",
            "tools": [{"type": "function", "name": "look", "parameters": schema, "strict": True}],
        },
    }
    told = {}
    upstreams = {"claude": one_model(provider, "anthropic", "/v1")}
    async with running_gateway(tmp_path / "home", redis_url, upstreams=upstreams) as gateway:
        await price(gateway, "bought")
        async with gateway.session() as session:
            for path, body in asked.items():
                async with session.post(f"/v1/{path}", json={"model": "bought"} | body) as answer:
                    told[path] = (answer.status, (await answer.json())["error"]["param"])
            statuses = {}
            for kind in ("disabled", "adaptive", "enabled"):
                body = {"messages": WORDS[1:], "max_tokens": 50, "thinking": {"type": kind}}
                async with session.post("/v1/messages", json={"model": "bought"} | body) as answer:
                    statuses[kind] = answer.status
    assert told == {
        "chat/completions": (400, "tools[0].function.strict"),
        "messages": (400, "tools[0].strict"),
        "responses": (400, "tools[0].strict"),
    }
    assert statuses == {"disabled": 200, "adaptive": 200, "enabled": 400}


async def test_azure_is_asked_by_deployment_and_key_header(tmp_path: Path, redis_url: str, provider: Provider) -> None:
    upstreams = {"azure": one_model(provider, "azure", "", output_field="max_completion_tokens")}
    async with running_gateway(tmp_path / "home", redis_url, upstreams=upstreams) as gateway:
        await price(gateway, "bought")
        status, answer, _ = await post(gateway, {"model": "bought", "messages": WORDS, "max_tokens": 50})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, TEXT)
        await gateway.balanced()
    assert provider.paths == ["/openai/deployments/theirs/chat/completions?api-version=2024-10-21"]
    assert (provider.heads[0]["api-key"], provider.asked[0]["max_completion_tokens"]) == (KEY, 50)


async def test_a_request_moves_to_the_next_upstream_and_the_breaker_opens(
    tmp_path: Path, redis_url: str, provider: Provider
) -> None:
    gone = one_model(provider, "openai", "/v1") | {"url": "http://127.0.0.1:9/v1", "rank": 0}
    upstreams = {"gone": gone, "mock": one_model(provider, "openai", "/v1", rank=1)}
    async with running_gateway(tmp_path / "home", redis_url, upstreams=upstreams) as gateway:
        await price(gateway, "bought")
        for _ in range(6):
            status, answer, _ = await post(gateway, {"model": "bought", "messages": WORDS})
            assert status == 200, answer
        places = gateway.app[MARKET].places
        assert (places["gone"].state, places["gone"].attempts["connect"]) == ("open", 5)
        assert places["mock"].attempts["delivered"] == 6
        value = gateway.app[METRICS].registry.get_sample_value
        assert value("headgate_upstream_breaker", {"upstream": "gone"}) == 2.0
        assert value("headgate_upstream_attempts_total", {"upstream": "gone", "end": "connect"}) == 5.0
        await gateway.balanced()


async def test_overflow_is_bought_only_where_workers_are_late_and_the_tenant_allows_it(
    tmp_path: Path, redis_url: str, provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    entry = one_model(provider, "openai", "/v1")
    entry["models"] = {MODEL: {"name": "theirs", "max_output_tokens": 900, **RATES}}
    async with running_gateway(tmp_path / "home", redis_url, upstreams={"mock": entry}) as gateway:
        await price(gateway, f"{MODEL}:overflow")
        body = {"model": MODEL, "messages": WORDS[1:], "max_tokens": 40}
        status, answer, _ = await post(gateway, body)
        assert (status, answer["error"]["code"]) == (503, "no_worker")
        tenant = gateway.keys.tenant_id
        _, changed = await admin(gateway, "PATCH", f"/admin/v1/tenants/{tenant}", {"buys_overflow": True})
        assert changed["buys_overflow"] is True
        status, answer, _ = await post(gateway, body)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, TEXT)
        assert answer["headgate"]["billed_as"] == f"{MODEL}:overflow"
        async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0"):
            await gateway.workers(1)
            status, answer, _ = await post(gateway, body)
            assert status == 200
            assert "billed_as" not in answer["headgate"], "own workers come first"
            gateway.app[GENERATION].capacity.promise_s = 1e-9
            gateway.app[MARKET].places["mock"].first_token_s = 1e-10
            status, answer, _ = await post(gateway, body)
            assert answer["headgate"]["billed_as"] == f"{MODEL}:overflow"
            status, answer, _ = await post(gateway, body | {"logprobs": True})
            assert (status, "billed_as" in answer["headgate"]) == (200, False), "an upstream cannot say this"
            status, answer, _ = await post(gateway, body | {"skip_special_tokens": False})
            assert (status, "billed_as" in answer["headgate"]) == (200, False), "nor that something is not to be done"
            switches: list[dict[str, Any]] = [
                {"add_generation_prompt": False},
                {"add_generation_prompt": False, "continue_final_message": True},
                {"chat_template_kwargs": {"enable_thinking": False}},
                {"enable_thinking": False},
                {"thinking_token_budget": 0},
            ]
            for switch in switches:
                caplog.clear()
                say = {"role": "assistant", "content": "Foxes"}
                more = {"messages": [*WORDS[1:], say]} if len(switch) > 1 else {}
                status, answer, _ = await post(gateway, body | switch | more)
                seen = {"param": answer["error"]["param"]} if status == 400 else answer["headgate"]
                assert "billed_as" not in seen, switch
                if status == 200:
                    [told] = [record for record in caplog.records if record.message == "overflow_not_bought"]
                    assert (told.field in switch, told.why) == (True, "slow")
            status, answer, _ = await post(gateway, body | {"add_generation_prompt": True})
            assert answer["headgate"]["billed_as"] == f"{MODEL}:overflow"
            assert "add_generation_prompt" not in provider.asked[-1]
            provider.scripts = [Script(finish="length")]
            words = [{"role": "user", "content": "x" * 1500}]
            for_message = {"model": MODEL, "messages": words, "max_tokens": 600}
            async with gateway.session() as session, session.post("/v1/messages", json=for_message) as found:
                message = await found.json()
            assert message["headgate"]["billed_as"] == f"{MODEL}:overflow"
            assert message["stop_reason"] == "max_tokens", "it is not known what fills the provider's context"
            await gateway.balanced()
        models = await gateway.sql(
            "SELECT model, count(*) FROM ledger_entry WHERE kind = 'settle' GROUP BY 1 ORDER BY 1"
        )
        assert [tuple(row) for row in models] == [(MODEL, 5), (f"{MODEL}:overflow", 4)]


async def headgate(gateway: RunningGateway, *arguments: str, **env: str) -> tuple[int, str]:
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key, **env}
    command = [*arguments, "--home", str(gateway.settings.home)]
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.output


async def test_an_operator_adds_checks_and_removes_an_upstream_and_its_key_is_never_seen(
    tmp_path: Path, redis_url: str, provider: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = ""
    async with running_gateway(tmp_path / "home", redis_url) as gateway:
        url = f"{provider.url}/v1"
        add = ("upstreams", "add", "mock", url, "--model", "bought=theirs", "--input", "1", "--output", "2")
        code, output = await headgate(gateway, *add, "--key-variable", "SECRET", SECRET=KEY)
        assert code == 0, output
        assert "Warning: standard has no price for bought (batch, interactive): " in output
        shown += output
        await price(gateway, "bought")
        status, answer, _ = await post(gateway, {"model": "bought", "messages": WORDS})
        assert status == 200, answer
        for command in (("list",), ("show", "mock"), ("check", "mock"), ("list", "--json"), ("show", "mock", "--json")):
            code, output = await headgate(gateway, "upstreams", *command)
            assert code == 0, output
            shown += output
        code, output = await headgate(gateway, "upstreams", "check", "mock", "--json")
        assert json.loads(output)["ok"] is True
        provider.scripts = [Script(status=401)] * 3
        status, answer, headers = await post(gateway, {"model": "bought", "messages": WORDS})
        assert (status, answer["error"]["code"]) == (503, "upstream_unavailable")
        shown += json.dumps(answer) + str(headers)
        async with gateway.session(gateway.keys.admin_key) as session, session.get("/metrics") as page:
            shown += await page.text()
        await gateway.settled()
        audit = str(await gateway.sql("SELECT * FROM audit_log"))
        stored = await gateway.sql("SELECT declared, sealed_key FROM upstream")
        assert "headgate.upstream.created" in audit
        assert KEY.encode() not in stored[0].sealed_key
        seen = shown + audit + stored[0].declared + caplog.text + "".join(map(str, caplog.records))
        assert KEY not in seen
        assert KEY.encode() not in (gateway.settings.home / "headgate.db").read_bytes()
        code, output = await headgate(gateway, "upstreams", "remove", "mock")
        assert code == 0, output
        status, answer, _ = await post(gateway, {"model": "bought", "messages": WORDS})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        await gateway.balanced()


async def test_no_tenant_declares_an_upstream_and_a_wrong_declaration_is_named(
    tmp_path: Path, redis_url: str, provider: Provider
) -> None:
    async with running_gateway(tmp_path / "home", redis_url, upstreams={"ours": declared(provider)}) as gateway:
        body = {"name": "mine", "url": f"{provider.url}/v1", "models": {"x": {}}}
        async with gateway.session() as session, session.post("/admin/v1/upstreams", json=body) as answer:
            assert answer.status in (401, 403)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"url": "file:///etc/passwd"}, "url"),
            ({"url": "http://user:word@host/v1"}, "url"),
            ({"models": {}}, "models"),
            ({"models": {"x": {"inptu": 1}}}, "models.x.inptu"),
            ({"kind": "smtp"}, "kind"),
            ({"name": "Not Good"}, "name"),
            ({"key_env": "MASTER_KEY"}, "key_env"),
        ]
        for change, param in wrong:
            status, found = await admin(gateway, "POST", "/admin/v1/upstreams", body | change)
            assert (status, found["error"]["param"]) == (400, param), found
        status, _ = await admin(gateway, "POST", "/admin/v1/upstreams", body | {"name": "ours"})
        assert status == 409
