"""A provider for tests: it speaks OpenAI's, Azure's and Anthropic's APIs, bills what it says, and misbehaves on order.

What it is to do stands in `Script`s, one for each request that comes; without one it answers well. Texts are bytes, so a
token is a word of our own choosing: it counts four bytes as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from gateways import RunningGateway

from accounting.prices import prices
from accounting.values import clock
from accounting.values.types import Rates
from gateway.base.app_keys import DATABASE

KEY = "sk-provider-secret-0123456789"
TEXT = "The quick brown fox jumps over the lazy dog. "


RATES = {"input": 1.0, "cached": 0.1, "output": 2.0}
PRICE = Rates(100_000, 1_000_000, 1_000_000, 2_000_000)


def tokens_of(num_bytes: int) -> int:
    return -(-num_bytes // 4)


@dataclass
class Script:
    """A script says what becomes of one request."""

    text: str = TEXT
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()
    """Names and arguments of tool calls."""
    finish: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: Any = None
    usage: Any = "true"
    """`true` for the right usage, None for none, or any value that is sent in its place."""
    cached: int = 0
    cost: float | None = None
    piece_bytes: int = 8
    pause_s: float = 0.0
    """The time between two pieces."""
    before_s: float = 0.0
    """The time before the head of the answer."""
    cut_after: int = -1
    """The connection breaks after this many pieces; -1: never."""
    stall_after: int = -1
    """The answer stalls after this many pieces; -1: never."""
    raw: bytes | None = None
    """Sent in place of all events."""
    content_type: str = "text/event-stream"
    ignores_bound: bool = False
    error_event: Any = None
    """Sent after the first piece."""
    bills: bool = True


@dataclass
class Provider:
    url: str = ""
    scripts: list[Script] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    bills: list[dict[str, Any]] = field(default_factory=list)
    """The answers of its cost API: one row for each answer, in micro-units."""
    num_hung_up: int = 0
    rates: tuple[int, int, int] = (1_000_000, 100_000, 2_000_000)
    """Micro-units for a million tokens: prompt, cached, output."""

    def _next(self) -> Script:
        return self.scripts.pop(0) if self.scripts else Script()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "chat")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "completions")

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, "messages")

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        body, script = await self._heard(request), self._next()
        if script.status != 200:
            return web.json_response(script.error or {"error": {"message": "no"}}, status=script.status)
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        data = [{"object": "embedding", "index": i, "embedding": [len(one), 0.5, -1.0]} for i, one in enumerate(texts)]
        prompt = tokens_of(sum(map(len, texts)))
        answer = {"object": "list", "data": data, "model": body["model"], "id": f"emb-{len(self.asked)}"}
        usage = {"prompt_tokens": prompt, "total_tokens": prompt} if script.usage == "true" else script.usage
        self._bill(answer["id"], prompt, 0, 0)
        return web.json_response(answer | ({"usage": usage} if usage is not None else {}))

    async def models(self, request: web.Request) -> web.Response:
        given = request.headers.get("authorization", "") + request.headers.get("api-key", "")
        given += request.headers.get("x-api-key", "")
        if KEY not in given:
            return web.json_response({"error": {"message": f"Incorrect API key provided: {given}"}}, status=401)
        return web.json_response({"object": "list", "data": []})

    async def costs(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.bills})

    async def costs_by_day(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "page", "data": [], "has_more": False})

    async def _heard(self, request: web.Request) -> dict[str, Any]:
        body = json.loads(await request.read())
        self.asked.append(body)
        self.heads.append(dict(request.headers))
        self.paths.append(request.path_qs)
        return body

    async def _answer(self, request: web.Request, kind: str) -> web.StreamResponse:
        body, script = await self._heard(request), self._next()
        number = len(self.asked)
        if script.before_s:
            await asyncio.sleep(script.before_s)
        if script.status != 200:
            error = script.error or {"error": {"message": f"failed with {KEY} at {request.url}", "type": "api_error"}}
            return web.json_response(error, status=script.status, headers=script.headers)
        response = web.StreamResponse(headers={"content-type": script.content_type} | script.headers)
        await response.prepare(request)
        try:
            if script.raw is not None:
                await response.write(script.raw)
                return response
            await self._write(response, body, script, kind, number)
        except (ConnectionError, asyncio.CancelledError):
            self.num_hung_up += 1
            raise
        return response

    async def _write(
        self, response: web.StreamResponse, body: dict[str, Any], script: Script, kind: str, number: int
    ) -> None:
        writer = (_Anthropic if kind == "messages" else _OpenAI)(response, body, kind, f"id-{number}-{id(self)}")
        n = body.get("n", 1)
        bound = body.get("max_completion_tokens") or body.get("max_tokens") or 10**6
        text = script.text if script.ignores_bound else script.text[: bound * 4]
        prompt = tokens_of(len(json.dumps(body.get("messages") or body.get("prompt"))))
        await writer.begin(prompt, script)
        num_pieces = 0
        for index in range(n):
            if script.reasoning:
                await writer.reasoning(index, script.reasoning)
            for start in range(0, len(text), script.piece_bytes):
                if num_pieces == script.cut_after:
                    assert response._req is not None
                    assert response._req.transport is not None
                    response._req.transport.abort()
                    return
                if num_pieces == script.stall_after:
                    await asyncio.sleep(30)
                await writer.text(index, text[start : start + script.piece_bytes])
                num_pieces += 1
                if script.error_event is not None:
                    await asyncio.sleep(0.1)
                    await writer.send(script.error_event)
                    return
                if script.pause_s:
                    await asyncio.sleep(script.pause_s)
            for place, (name, arguments) in enumerate(script.calls):
                await writer.call(index, place, name, arguments)
        words = len(text) + len(script.reasoning) + sum(len(name) + len(args) for name, args in script.calls)
        output = tokens_of(words) * n if not script.ignores_bound else tokens_of(words)
        finish = script.finish or (
            "tool_calls" if script.calls else "length" if len(text) < len(script.text) else "stop"
        )
        right = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        right["prompt_tokens_details"] = {"cached_tokens": script.cached}
        if script.cost is not None:
            right["cost"] = script.cost
        usage = right if script.usage == "true" else script.usage
        await writer.end(n, finish, usage)
        if script.bills:
            self._bill(writer.id, prompt - script.cached, script.cached, output)

    def _bill(self, provider_id: str, prompt: int, cached: int, output: int) -> None:
        products = sum(n * rate for n, rate in zip((prompt, cached, output), self.rates, strict=True))
        row = {"id": f"row-{len(self.asked)}-{id(self)}", "provider_id": provider_id, "amount": -(-products // 10**6)}
        self.bills.append(row)


class _OpenAI:
    def __init__(self, response: web.StreamResponse, body: dict[str, Any], kind: str, answer_id: str) -> None:
        self._response, self._body, self._is_chat, self.id = response, body, kind == "chat", answer_id

    async def send(self, value: Any) -> None:
        data = value if isinstance(value, str) else json.dumps(value)
        await self._response.write(f"data: {data}\n\n".encode())

    async def _choice(self, index: int, delta: dict[str, Any], finish: str | None = None) -> None:
        text = delta.get("content", "")
        choice = {"index": index, "finish_reason": finish} | ({"delta": delta} if self._is_chat else {"text": text})
        await self.send({"id": self.id, "object": "chunk", "model": self._body["model"], "choices": [choice]})

    async def begin(self, prompt: int, script: Script) -> None:
        await self._response.write(b": hello\n\n")

    async def text(self, index: int, text: str) -> None:
        await self._choice(index, {"content": text})

    async def reasoning(self, index: int, text: str) -> None:
        await self._choice(index, {"reasoning_content": text})

    async def call(self, index: int, place: int, name: str, arguments: str) -> None:
        first = {"index": place, "id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": ""}}
        await self._choice(index, {"tool_calls": [first]})
        half = len(arguments) // 2
        for piece in (arguments[:half], arguments[half:]):
            await self._choice(index, {"tool_calls": [{"index": place, "function": {"arguments": piece}}]})

    async def end(self, n: int, finish: str, usage: Any) -> None:
        for index in range(n):
            await self._choice(index, {}, finish)
        if usage is not None and self._body.get("stream_options", {}).get("include_usage"):
            await self.send({"id": self.id, "choices": [], "usage": usage})
        await self.send("[DONE]")


class _Anthropic:
    def __init__(self, response: web.StreamResponse, body: dict[str, Any], kind: str, answer_id: str) -> None:
        self._response, self.id = response, answer_id
        self._open = -1
        self._num_blocks = 0
        self._prompt = 0

    async def send(self, value: Any) -> None:
        await self._response.write(f"event: {value['type']}\ndata: {json.dumps(value)}\n\n".encode())

    async def begin(self, prompt: int, script: Script) -> None:
        self._prompt = prompt
        usage = {"input_tokens": prompt - script.cached, "cache_read_input_tokens": script.cached, "output_tokens": 1}
        message = {"id": self.id, "type": "message", "role": "assistant", "content": []}
        if script.usage is not None:
            message["usage"] = usage
        await self.send({"type": "message_start", "message": message})
        await self.send({"type": "ping"})

    async def _block(self, block: dict[str, Any]) -> int:
        index = self._num_blocks
        self._num_blocks += 1
        await self.send({"type": "content_block_start", "index": index, "content_block": block})
        return index

    async def text(self, index: int, text: str) -> None:
        if self._open < 0:
            self._open = await self._block({"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": text}
        await self.send({"type": "content_block_delta", "index": self._open, "delta": delta})

    async def reasoning(self, index: int, text: str) -> None:
        block = await self._block({"type": "thinking", "thinking": ""})
        delta = {"type": "thinking_delta", "thinking": text}
        await self.send({"type": "content_block_delta", "index": block, "delta": delta})

    async def call(self, index: int, place: int, name: str, arguments: str) -> None:
        block = await self._block({"type": "tool_use", "id": f"toolu_{place}", "name": name, "input": {}})
        delta = {"type": "input_json_delta", "partial_json": arguments}
        await self.send({"type": "content_block_delta", "index": block, "delta": delta})

    async def end(self, n: int, finish: str, usage: Any) -> None:
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
        reason = reasons[finish]
        stated = {"output_tokens": usage["completion_tokens"]} if isinstance(usage, dict) else {}
        await self.send({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": stated})
        await self.send({"type": "message_stop"})


@contextlib.asynccontextmanager
async def running_provider(port: int = 0, **fields: Any) -> AsyncIterator[Provider]:
    provider = Provider(**fields)
    app = web.Application()
    for prefix in ("/v1", "/openai/deployments/{deployment}"):
        app.router.add_post(f"{prefix}/chat/completions", provider.chat)
        app.router.add_post(f"{prefix}/completions", provider.completions)
        app.router.add_post(f"{prefix}/embeddings", provider.embeddings)
    app.router.add_post("/v1/messages", provider.messages)
    app.router.add_get("/v1/models", provider.models)
    app.router.add_get("/openai/models", provider.models)
    app.router.add_get("/v1/costs", provider.costs)
    app.router.add_get("/v1/organization/costs", provider.costs_by_day)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    sock = socket.create_server(("127.0.0.1", port))
    provider.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    await web.SockSite(runner, sock).start()
    try:
        yield provider
    finally:
        await runner.cleanup()


def declared(provider: Provider, **more: Any) -> dict[str, Any]:
    """The provider as an upstream with the models `bought` and `vectors`; its credential is in PROVIDER_KEY."""
    models = {
        "bought": {"name": "theirs", "max_output_tokens": 1000, **RATES},
        "vectors": {"task": "embed", "vector_size": 3, **RATES},
    }
    return {"url": f"{provider.url}/v1", "key_env": "PROVIDER_KEY", "models": models, **more}


async def price(gateway: RunningGateway, *models: str) -> None:
    """Prices models as the provider does."""
    async with gateway.app[DATABASE].write() as conn:
        rates = {"interactive": PRICE, "batch": PRICE}
        assert await prices.bootstrap(conn, dict.fromkeys(models, rates), clock.now_ms()) == []
