"""One tenant's system prompt is computed once for that tenant, and never seen by another."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def system_prompt(server) -> str:
    """About 1,000 tokens in the model's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(Path(server.ready["model_path"]) / "tokenizer.json"))
    text = "You answer questions about the modules of the standard library. "
    while len(tokenizer.encode(text, add_special_tokens=False).ids) < 1000:
        text += f"Rule {len(text)}: name the module, then quote its documentation. "
    return text


def ask(server, key: str, system: str, question: str):
    return server.client(key).chat.completions.create(
        model=server.model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        max_tokens=4,
        temperature=0,
    )


def test_the_second_request_of_a_tenant_reads_the_system_prompt_from_the_cache(server, system_prompt):
    _, key = server.tenant_key("cache-owner")
    _, other = server.tenant_key("cache-neighbour")
    first = ask(server, key, system_prompt, "What is os.path?")
    assert first.usage.prompt_tokens_details.cached_tokens == 0

    second = ask(server, key, system_prompt, "And what is shutil?")
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= 1000 // BLOCK_SIZE * BLOCK_SIZE
    assert cached % BLOCK_SIZE == 0
    assert cached < second.usage.prompt_tokens

    foreign = ask(server, other, system_prompt, "And what is shutil?")
    assert foreign.usage.prompt_tokens_details.cached_tokens == 0
    assert foreign.usage.prompt_tokens == second.usage.prompt_tokens
    assert foreign.choices[0].message.content == second.choices[0].message.content


def test_prefill_work_falls_by_what_was_cached(server, system_prompt):
    _, key = server.tenant_key("cache-counter")
    ask(server, key, system_prompt, "What is re?")
    before = server.engine_counters()
    reply = ask(server, key, system_prompt, "What is json?")
    after = server.engine_counters()
    computed = after["vllm:prompt_tokens_total"] - before["vllm:prompt_tokens_total"]
    hits = after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    assert hits == reply.usage.prompt_tokens_details.cached_tokens
    assert computed in (reply.usage.prompt_tokens, reply.usage.prompt_tokens - hits)
    prefilled = 'headgate_step_tokens_total{phase="prefill",tier="interactive"}'
    assert after[prefilled] - before[prefilled] == reply.usage.prompt_tokens - hits


def test_a_salt_divides_a_tenants_own_region_and_nothing_else(server, system_prompt):
    _, key = server.tenant_key("cache-salted")

    def salted(salt: str) -> int:
        reply = server.client(key).chat.completions.create(
            model=server.model,
            messages=[{"role": "system", "content": system_prompt}, {"role": "user", "content": "What is csv?"}],
            max_tokens=2,
            extra_body={"cache_salt": salt},
        )
        return reply.usage.prompt_tokens_details.cached_tokens

    assert salted("a") == 0
    assert salted("b") == 0
    assert salted("a") > 0
