"""Forty cases about limits and charges of a gateway in front of a provider, asked over HTTP alone.

    python tests/limit_conformance.py --base-url http://127.0.0.1:8080 --key KEY --provider-port 9911 \
        --spend-url http://127.0.0.1:8080/v1/spend --spend-path spent

The gateway must know the model `bought` at `http://127.0.0.1:9911/v1` (OpenAI's API, credential `provider.KEY`), at 1, 0.1
and 2 of its currency for a million tokens of prompt, cached prompt and output. What else a case needs is named by flags;
a case whose flag is not given is skipped. Spend is read before and after each case: a charge is what it grew by.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from provider import KEY, TEXT, Provider, Script, running_provider, tokens_of

Spend = Callable[[str], Awaitable[int]]
"""Returns what a key has spent, in micro-units, once every ending is booked."""
WORDS = [{"role": "user", "content": "Say something about foxes."}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
OUTPUT_RATE = 2
LONG = TEXT * 60


@dataclass
class Target:
    """The gateway under test."""

    base_url: str
    provider: Provider
    key: str
    spend: Spend
    model: str = "bought"
    unpriced_model: str = ""
    fallback_model: str = ""
    """A model whose own servers are away and whose fallback is `model`."""
    poor_key: str = ""
    """A key that may spend `poor_budget` micro-units."""
    poor_budget: int = 0
    rate_key: str = ""
    """A key with one request a minute."""
    vectors_model: str = ""
    between: Callable[[], None] = lambda: None
    """Called in front of each case: it closes breakers."""


@dataclass
class Seen:
    """The outcome of one request."""

    status: int = 0
    body: str = ""
    events: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        if self.events:
            found = [c["delta"].get("content") or "" for e in self.events for c in e.get("choices", ())]
            return "".join(found)
        message = json.loads(self.body)["choices"][0]["message"]
        return message["content"] or ""

    @property
    def failed_in_stream(self) -> bool:
        return any("error" in event for event in self.events)

    @property
    def leaks(self) -> bool:
        return KEY in self.body or "127.0.0.1" in self.body


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Target], Awaitable[None]]
    needs: str = ""


CASES: list[Case] = []


def case(
    name: str, needs: str = ""
) -> Callable[[Callable[[Target], Awaitable[None]]], Callable[[Target], Awaitable[None]]]:
    def keep(run: Callable[[Target], Awaitable[None]]) -> Callable[[Target], Awaitable[None]]:
        CASES.append(Case(name, run, needs))
        return run

    return keep


async def ask(
    target: Target, *, path: str = "/v1/chat/completions", key: str = "", stop_after: int = -1, **fields: Any
) -> Seen:
    """Sends a request. With `stop_after` it leaves after so many events."""
    body = {"model": target.model, **({"messages": WORDS} if "chat" in path else {}), **fields}
    headers = {"authorization": f"Bearer {key or target.key}"}
    seen = Seen()
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(target.base_url, headers=headers, timeout=timeout) as session:
        try:
            async with session.post(path, json=body) as answer:
                seen.status = answer.status
                async for line in answer.content:
                    seen.body += line.decode()
                    if line.startswith(b"data: {"):
                        seen.events.append(json.loads(line[6:]))
                    if len(seen.events) == stop_after:
                        return seen
        except (aiohttp.ClientError, TimeoutError):
            pass
    return seen


async def charged(target: Target, work: Awaitable[Seen], key: str = "") -> tuple[Seen, int]:
    before = await target.spend(key or target.key)
    seen = await work
    return seen, await target.spend(key or target.key) - before


async def exact(target: Target, script: Script | None = None, **fields: Any) -> Seen:
    """The request is charged what the provider bills, to the micro-unit."""
    if script is not None:
        target.provider.scripts.append(script)
    seen, cost = await charged(target, ask(target, **fields))
    assert seen.status == 200, seen.body
    assert not seen.failed_in_stream, seen.body
    billed = target.provider.bills[-1]["amount"]
    assert cost == billed, f"charged {cost}, billed {billed}"
    return seen


async def free(target: Target, script: Script, status: int, times: int = 1, **fields: Any) -> Seen:
    """The request fails and nobody is charged."""
    target.provider.scripts += [script] * times
    seen, cost = await charged(target, ask(target, **fields))
    target.provider.scripts.clear()
    assert seen.status == status, f"{seen.status}: {seen.body}"
    assert cost == 0, f"charged {cost}"
    assert not seen.leaks, seen.body
    return seen


async def bounded(target: Target, script: Script, most: int, **fields: Any) -> Seen:
    """The request is charged something, and no more than `most` tokens of output."""
    target.provider.scripts.append(script)
    seen, cost = await charged(target, ask(target, **fields))
    assert seen.status == 200, seen.body
    prompt = len(json.dumps(WORDS)) + 200
    assert 0 < cost <= prompt + OUTPUT_RATE * most, f"charged {cost}"
    return seen


# What goes well


@case("a body is charged by its usage")
async def _(target: Target) -> None:
    await exact(target)


@case("a stream is charged by its usage")
async def _(target: Target) -> None:
    seen = await exact(target, stream=True, stream_options={"include_usage": True})
    assert seen.events[-1]["usage"]["completion_tokens"] == tokens_of(len(TEXT))


@case("a stream whose client wants no usage is charged too")
async def _(target: Target) -> None:
    await exact(target, stream=True)


@case("cached tokens cost the cached rate")
async def _(target: Target) -> None:
    await exact(target, Script(cached=8))


@case("three choices are charged together")
async def _(target: Target) -> None:
    await exact(target, n=3)


@case("three choices of a stream are charged together")
async def _(target: Target) -> None:
    await exact(target, n=3, stream=True)


@case("tool calls are charged")
async def _(target: Target) -> None:
    await exact(target, Script(text="", calls=[("look", '{"at": "the fox"}')]), tools=TOOLS)


@case("tool calls of a stream are charged")
async def _(target: Target) -> None:
    await exact(target, Script(calls=[("look", "{}"), ("look", '{"at": 1}')]), tools=TOOLS, stream=True)


@case("reasoning is charged")
async def _(target: Target) -> None:
    await exact(target, Script(reasoning="I think of foxes. "))


@case("an answer of one token is charged as one")
async def _(target: Target) -> None:
    seen = await exact(target, max_tokens=1)
    assert seen.text == TEXT[:4]


@case("an answer beyond the first lease is charged whole")
async def _(target: Target) -> None:
    await exact(target, Script(text=LONG), max_tokens=900)


@case("an answer in large pieces is charged whole")
async def _(target: Target) -> None:
    await exact(target, Script(text=LONG, piece_bytes=1400), max_tokens=900, stream=True)


@case("completions are charged by their usage")
async def _(target: Target) -> None:
    await exact(target, path="/v1/completions", prompt="Once upon a time")


@case("embeddings are charged by their usage", needs="vectors_model")
async def _(target: Target) -> None:
    await exact(target, path="/v1/embeddings", model=target.vectors_model, input=["a fox", "a dog"])


# What the provider states falsely, or not at all


@case("a body without usage is charged by a count of ours")
async def _(target: Target) -> None:
    await bounded(target, Script(usage=None), 2 * tokens_of(len(TEXT)))


@case("a stream without usage is charged by a count of ours")
async def _(target: Target) -> None:
    await bounded(target, Script(usage=None), 2 * tokens_of(len(TEXT)), stream=True)


@case("usage that is no object counts as missing")
async def _(target: Target) -> None:
    await bounded(target, Script(usage="many"), 2 * tokens_of(len(TEXT)))


@case("negative usage counts as missing")
async def _(target: Target) -> None:
    usage = {"prompt_tokens": -5, "completion_tokens": -9}
    await bounded(target, Script(usage=usage), 2 * tokens_of(len(TEXT)))


@case("usage of zero is not believed")
async def _(target: Target) -> None:
    await bounded(target, Script(text=LONG, usage={"prompt_tokens": 0, "completion_tokens": 0}), 900, max_tokens=900)


@case("usage of a billion tokens is not believed")
async def _(target: Target) -> None:
    usage = {"prompt_tokens": 10**9, "completion_tokens": 10**9}
    await bounded(target, Script(usage=usage), 100, max_tokens=100)


@case("usage with fractions counts as missing")
async def _(target: Target) -> None:
    usage = {"prompt_tokens": 1.5, "completion_tokens": 2.5}
    await bounded(target, Script(usage=usage), 2 * tokens_of(len(TEXT)))


@case("an answer beyond max_tokens is cut and not charged beyond it")
async def _(target: Target) -> None:
    await bounded(target, Script(text=LONG * 4, ignores_bound=True), 20, max_tokens=20, stream=True)


# Who leaves


@case("a client that leaves in mid-stream pays for what it got, and the provider is hung up on")
async def _(target: Target) -> None:
    before = target.provider.num_hung_up
    target.provider.scripts.append(Script(text=LONG, pause_s=0.02))
    _, cost = await charged(target, ask(target, stream=True, stop_after=6))
    assert 0 < cost <= len(json.dumps(WORDS)) + 200 + OUTPUT_RATE * 60, f"charged {cost}"
    for _ in range(50):
        if target.provider.num_hung_up > before:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the provider writes on")


@case("a provider that hangs up before the first token is asked again, and charged once")
async def _(target: Target) -> None:
    target.provider.scripts.append(Script(cut_after=0))
    await exact(target)


@case("a provider that hangs up in mid-stream costs nobody anything")
async def _(target: Target) -> None:
    seen = await free(target, Script(cut_after=3, piece_bytes=4), 200, stream=True)
    assert seen.failed_in_stream
    assert "[DONE]" not in seen.body


@case("an error in the stream costs nobody anything")
async def _(target: Target) -> None:
    seen = await free(target, Script(error_event={"error": {"message": KEY, "code": 500}}), 200, stream=True)
    assert seen.failed_in_stream


# What the provider refuses


@case("one 500 is tried again and charged once")
async def _(target: Target) -> None:
    await exact(target, Script(status=500))


@case("500 without end is a 503 and free")
async def _(target: Target) -> None:
    await free(target, Script(status=500), 503, times=3)


@case("429 with a time is told to the client and free")
async def _(target: Target) -> None:
    await free(target, Script(status=429, headers={"retry-after": "20"}), 503, times=1)


@case("a refused credential is a 503, free, and not shown")
async def _(target: Target) -> None:
    await free(target, Script(status=401), 503, times=3)


@case("a refused request is a 400, free, and in words of ours")
async def _(target: Target) -> None:
    num_asked = len(target.provider.asked)
    await free(target, Script(status=400), 400)
    assert len(target.provider.asked) == num_asked + 1, "a refused request is not tried again"


@case("a redirect is not followed and free")
async def _(target: Target) -> None:
    await free(target, Script(status=307, headers={"location": target.provider.url}), 503, times=3)


# What is no answer


@case("garbage is free")
async def _(target: Target) -> None:
    await free(target, Script(raw=b"data: {broken\n\n"), 503, times=3)


@case("a line without end is free")
async def _(target: Target) -> None:
    await free(target, Script(raw=b"data: " + b"x" * 3_000_000), 503, times=3)


@case("another content type is free")
async def _(target: Target) -> None:
    await free(target, Script(content_type="text/html"), 503, times=3)


@case("a call that is no JSON is free")
async def _(target: Target) -> None:
    await free(target, Script(text="", calls=[("look", '{"at": ')]), 503, tools=TOOLS)


# Limits


@case("a model without a price is not asked", needs="unpriced_model")
async def _(target: Target) -> None:
    num_asked = len(target.provider.asked)
    await free(target, Script(), 403, model=target.unpriced_model)
    assert len(target.provider.asked) == num_asked


@case("a fallback is charged once, at its own price", needs="fallback_model")
async def _(target: Target) -> None:
    await exact(target, model=target.fallback_model)


@case("a budget cuts a stream before it is overdrawn", needs="poor_key")
async def _(target: Target) -> None:
    target.provider.scripts.append(Script(text=LONG * 20, piece_bytes=40))
    before = await target.spend(target.poor_key)
    seen = await ask(target, key=target.poor_key, stream=True, max_tokens=900)
    spent = await target.spend(target.poor_key) - before
    assert seen.status == 200, seen.body
    assert 0 < spent <= target.poor_budget, f"spent {spent} of {target.poor_budget}"
    num_asked = len(target.provider.asked)
    again = await ask(target, key=target.poor_key, max_tokens=900)
    assert again.status == 429, again.body
    assert len(target.provider.asked) == num_asked, "a request beyond the budget reached the provider"


@case("the second request of a minute is refused and not sent", needs="rate_key")
async def _(target: Target) -> None:
    first = await ask(target, key=target.rate_key)
    num_asked = len(target.provider.asked)
    second = await ask(target, key=target.rate_key)
    assert (first.status, second.status) == (200, 429), second.body
    assert len(target.provider.asked) == num_asked


async def run_all(target: Target, tell: Callable[[str, str, float], None]) -> tuple[int, int, int]:
    """Runs all cases. Returns how many passed, failed and were skipped."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for one in CASES:
        if one.needs and not getattr(target, one.needs):
            counts["skipped"] += 1
            tell(one.name, "skipped", 0.0)
            continue
        target.provider.scripts.clear()
        target.between()
        began = time.perf_counter()
        try:
            await one.run(target)
            state = "passed"
        except AssertionError as error:
            state = "failed"
            tell(one.name, f"failed: {str(error).splitlines()[0][:300]}", time.perf_counter() - began)
        counts[state] += 1
        if state == "passed":
            tell(one.name, state, time.perf_counter() - began)
    return counts["passed"], counts["failed"], counts["skipped"]


def _spend_by(url: str, path: str, wait_s: float) -> Spend:
    async def spend(key: str) -> int:
        await asyncio.sleep(wait_s)
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as answer:
            value = await answer.json()
        for name in path.split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]
        return round(float(value))

    return spend


async def _main(given: argparse.Namespace) -> int:
    async with running_provider(port=given.provider_port) as provider:
        target = Target(
            given.base_url,
            provider,
            given.key,
            _spend_by(given.spend_url, given.spend_path, given.wait),
            model=given.model,
            unpriced_model=given.unpriced_model,
            fallback_model=given.fallback_model,
            poor_key=given.poor_key,
            poor_budget=given.poor_budget,
            rate_key=given.rate_key,
            vectors_model=given.vectors_model,
        )
        passed, failed, skipped = await run_all(target, lambda name, state, s: print(f"{state:10} {s:6.2f} s  {name}"))
    print(f"{passed} of {passed + failed} passed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("base-url", "key", "spend-url", "spend-path"):
        parser.add_argument(f"--{flag}", required=True)
    for flag in ("unpriced-model", "fallback-model", "poor-key", "rate-key", "vectors-model"):
        parser.add_argument(f"--{flag}", default="")
    parser.add_argument("--model", default="bought")
    parser.add_argument("--poor-budget", type=int, default=0)
    parser.add_argument("--provider-port", type=int, default=0)
    parser.add_argument("--wait", type=float, default=2.0, help="seconds until a charge is in the spend")
    sys.exit(asyncio.run(_main(parser.parse_args())))
