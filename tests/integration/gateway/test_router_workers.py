"""Two workers behind one gateway: who had a conversation gets its next turn, and nobody else's words draw anybody."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, running_gateway, until

from gateway.generation.stream import GENERATION
from gateway.telemetry.metrics import METRICS

SYSTEM = "You answer questions about water rights in valleys that share one canal. " * 3


@pytest.fixture
async def pair(tmp_path, redis_url):
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(tmp_path / "home", redis_url))
        workers = [
            await stack.enter_async_context(
                ScriptedWorker(
                    tmp_path / f"w{slot}.sock",
                    redis_url=redis_url,
                    slot=slot,
                    journal_dir=tmp_path / f"w{slot}",
                    runner=ScriptedRunner(num_blocks=2000, block_size=16),
                )
            )
            for slot in range(2)
        ]
        await gateway.workers(2)
        await until(lambda: all(link.cached.seq >= 0 for link in links(gateway)))
        yield gateway, workers


def links(gateway):
    return gateway.app[GENERATION].fleet.links


def counts(gateway):
    return gateway.app[GENERATION].router.counts


async def turn(client, messages, question):
    """(cached tokens, prompt tokens, miss reason) of one more turn."""
    messages.append({"role": "user", "content": question})
    reply = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    details = reply.usage.prompt_tokens_details
    return (details.cached_tokens, reply.usage.prompt_tokens, reply.model_extra["headgate"]["cache"]["miss_reason"])


async def talk(client, number, num_turns=4):
    messages = [{"role": "system", "content": f"Valley {number}. {SYSTEM}"}]
    questions = (f"Question {n} of valley {number}?" for n in range(num_turns))
    return [await turn(client, messages, question) for question in questions]


async def test_the_next_turn_finds_the_one_before_on_its_worker(pair):
    gateway, workers = pair
    async with gateway.client() as client:
        talks = await asyncio.gather(*(talk(client, number) for number in range(8)))
    for told in talks:
        for (cached, _, reason), (_, before, _) in zip(told[1:], told, strict=False):
            assert cached >= before // 64 * 64 > 0 or reason == "other_worker"
    assert all(worker.num_tokens_sent > 0 for worker in workers), "both worked"
    assert counts(gateway).choices[MODEL, "affinity"] >= 16
    assert counts(gateway).num_cached_tokens >= 0.9 * counts(gateway).num_predicted_tokens > 0
    await gateway.balanced()


async def test_another_tenants_equal_words_are_cold(pair):
    gateway, _ = pair
    _, other = await gateway.new_tenant("other")
    async with gateway.client() as mine, gateway.client(other) as theirs:
        await talk(mine, 1, 1)
        ((cached, *_),) = await talk(theirs, 1, 1)
        assert cached == 0
        assert counts(gateway).num_predicted_tokens == 0
        ((cached, *_),) = await talk(mine, 1, 1)
        assert cached > 0


async def test_a_worker_that_died_is_forgotten_at_once_and_its_successor_is_asked(pair):
    gateway, workers = pair
    async with gateway.client() as client:
        messages = [{"role": "system", "content": SYSTEM}]
        await turn(client, messages, "One?")
        holder = max(workers, key=lambda worker: worker.num_tokens_sent)
        await until(lambda: any(len(link.cached) for link in links(gateway)))
        holder.crash()
        await until(lambda: not any(len(link.cached) for link in links(gateway)))
        cached, _, _ = await turn(client, messages, "Two?")
        assert cached == 0
        cached, _, _ = await turn(client, messages, "Three?")
        assert cached > 0


async def test_a_gap_is_healed_by_a_snapshot(pair):
    gateway, _ = pair
    async with gateway.client() as client:
        await talk(client, 3, 2)
        holder = max(links(gateway), key=lambda link: len(link.cached))
        known = set(holder.cached._reported)
        holder.cached.seq -= 1  # as if one event had not come
        await talk(client, 3, 3)
        await until(lambda: holder.cached._reported > known)


async def test_metrics_tell_reasons_and_guesses(pair):
    gateway, _ = pair
    async with gateway.client() as client:
        await talk(client, 5)
    await gateway.settled()
    page = gateway.app[METRICS].page("").body.decode()
    of_model = f'model="{MODEL}"'
    assert f'headgate_router_choices_total{{gateway="0",{of_model},reason="affinity"}} 3.0' in page
    assert f'headgate_router_ttft_seconds_total{{gateway="0",kind="predicted",{of_model}}}' in page
    assert 'headgate_router_cached_tokens_total{gateway="0",kind="real"}' in page
    assert 'headgate_router_index_groups{gateway="0",worker="worker-1"}' in page
