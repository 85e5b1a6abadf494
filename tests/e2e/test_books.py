"""Ledger, engine and what clients were told are three counts of the same tokens."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from load import stretched
from running import PATIENT
from tokenizers import Tokenizer

NUM_STREAMS = 64


async def one_stream(client, model: str, number: int) -> tuple[list[int], object, str]:
    rng = random.Random(number)
    prompt = [rng.randrange(300, 2000) for _ in range(rng.randrange(1, 300))]
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=rng.randrange(1, 80),
        stream=True,
        seed=number,
        temperature=0.8,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": bool(number % 2)},
    )
    text, usage, finish = "", None, ""
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
    assert finish in ("stop", "length")
    return prompt, usage, text


@pytest.mark.slow
def test_64_streams_of_mixed_lengths_are_counted_alike_by_everybody(start_server):
    server = start_server(env=PATIENT)
    tenant, key = server.tenant_key("books")

    async def everybody():
        async with server.async_client(key, max_retries=0) as client:
            return await asyncio.gather(*(one_stream(client, server.model, n) for n in range(NUM_STREAMS)))

    results = asyncio.run(everybody())
    for prompt, usage, _ in results:
        assert usage.prompt_tokens == len(prompt)
        assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    told = {
        "prompt": sum(u.prompt_tokens for _, u, _ in results),
        "cached": sum(u.prompt_tokens_details.cached_tokens for _, u, _ in results),
        "output": sum(u.completion_tokens for _, u, _ in results),
    }

    report = server.verify_books()
    assert report["ok"]
    assert ledger_totals(server, tenant, NUM_STREAMS) == told
    server.witnessed()
    assert engine_totals(server, tenant) == told
    assert_no_block_is_held(server)


def ledger_totals(server, tenant: str, num_requests: int) -> dict[str, int]:
    deadline = time.monotonic() + stretched(10)
    while True:
        page = server.admin(
            "GET",
            "/v1/organization/usage/completions",
            params={"start_time": int(time.time()) - 7200, "bucket_width": "1h", "project_ids": tenant},
        )
        results = [r for bucket in page["data"] for r in bucket["results"]]
        if sum(r["num_model_requests"] for r in results) >= num_requests or time.monotonic() > deadline:
            assert sum(r["num_model_requests"] for r in results) == num_requests
            return {
                "prompt": sum(r["input_tokens"] for r in results),
                "cached": sum(r["input_cached_tokens"] for r in results),
                "output": sum(r["output_tokens"] for r in results),
            }
        time.sleep(0.2)


def engine_totals(server, tenant: str) -> dict[str, int]:
    """The engine's own records, as they arrived in SQL."""
    (row,) = server.sql(
        "SELECT SUM(cache_read + cache_write + uncached), SUM(cache_read), SUM(output)"
        " FROM engine_record WHERE tenant_id = ?",
        tenant,
    )
    return dict(zip(("prompt", "cached", "output"), row, strict=True))


def assert_no_block_is_held(server) -> None:
    """At idle every block is free or evictable."""
    deadline = time.monotonic() + stretched(5)
    while True:
        blocks = server.engine_counters()
        held = sum(blocks[f'headgate_cache_blocks{{state="{state}"}}'] for state in ("held", "private", "moving"))
        if held == 0 or time.monotonic() > deadline:
            assert held == 0
            return
        time.sleep(0.1)


def test_whole_replies_count_the_tokens_of_their_text(server):
    """With the end token drawn, text and count agree through the model's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(Path(server.ready["model_path"]) / "tokenizer.json"))
    reply = server.client().completions.create(
        model=server.model,
        prompt="def parse(text):",
        max_tokens=30,
        temperature=0,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
        logprobs=0,
    )
    assert reply.usage.prompt_tokens == len(tokenizer.encode("def parse(text):").ids)
    assert reply.usage.completion_tokens == 30 == len(reply.choices[0].logprobs.tokens)
