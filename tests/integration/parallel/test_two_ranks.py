"""Two real processes over gloo compute what one does: tokens equal, logits within 1e-5, whatever the engine does with
the sequences."""

from __future__ import annotations

import random

import pytest
import tiny_models
import transformers
from engine_driver import LINK, Driver
from fakes import generate_request
from tiny_models import GREEDY, Driven

from workers.engine.layers.merged_linear import Together
from workers.engine.model import llama
from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.rest

NUM_TOKENS = 20
SAMPLED = SamplingParams(seed=11, temperature=0.9, top_p=0.95, repetition_penalty=1.1, min_tokens=1000)


def tokens_of(runner):
    """Greedy and sampled requests in chunks, preempted, the last one behind a cached prefix."""
    driver = Driver(runner, max_batch_tokens=11, max_running=5)
    source = random.Random(5)
    shared = [source.randrange(3, 300) for _ in range(30)]
    prompts = [shared[: 10 + 5 * i] + [source.randrange(3, 300) for _ in range(7)] for i in range(4)]
    requests = [
        generate_request(f"r{i}", prompt, NUM_TOKENS, sampling=(GREEDY, SAMPLED)[i % 2], root=runner.root)
        for i, prompt in enumerate([*prompts, prompts[-1]])
    ]
    driver.send(*requests[:-1])
    driver.run()
    driver.send(requests[-1])
    driver.run().check_idle()
    assert driver.engine.totals.num_preempted > 0
    assert driver.endings[LINK, "r4"].usage.cache_read >= 28
    return [driver.tokens[LINK, request.request_id, 0] for request in requests]


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied-biased", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "glm4"]
)
def test_two_ranks_draw_the_tokens_of_one(pair, tiny_model, name, monkeypatch):
    config = transformers.Glm4Config(**tiny_models._COMMON, head_dim=16, attention_bias=True)
    monkeypatch.setitem(tiny_models.CONFIGS, "glm4", lambda: config)
    model = tiny_model(name)
    one = model.runner(num_blocks=32)
    two = pair.runner(model, num_blocks=32)
    expected = tokens_of(one)
    assert all(len(tokens) == NUM_TOKENS for tokens in expected)
    assert tokens_of(two) == expected


def test_two_ranks_go_on_where_one_was_lost(pair, tiny_model):
    model, prompt = tiny_model("qwen3"), [*range(50, 71)]
    found = []
    for runner in (model.runner(num_blocks=32), pair.runner(model, num_blocks=32)):
        more = {"attempt": 1, "resume": ((0, tuple(found[:9])),), "num_output_spent": 9} if found else {}
        driver = Driver(runner, max_batch_tokens=11, max_running=5)
        driver.send(generate_request("r", prompt, NUM_TOKENS, sampling=SAMPLED, root=runner.root, **more))
        driver.run().check_idle()
        found += driver.tokens[LINK, "r", 0]
    assert found[NUM_TOKENS:] == found[9:NUM_TOKENS]


@pytest.mark.parametrize(("name", "number"), [("gemma2", 6), ("phi3", 0)])
def test_parts_by_outputs_are_one_product_and_what_ranks_have_to_join_is_left_alone(pair, tiny_model, name, number):
    model = pair.runner(tiny_model(name), num_blocks=32)._runner.loaded.model
    assert sum(isinstance(module, Together) for module in model.modules()) == number


def test_ranks_share_a_head_of_keys_where_there_are_fewer_heads_than_ranks(pair, tmp_path, monkeypatch):
    config = transformers.Qwen2Config(**tiny_models._COMMON | {"num_key_value_heads": 1})
    monkeypatch.setitem(tiny_models.CONFIGS, "one-head", lambda: config)
    model = tiny_models.TinyModel.make("one-head", tmp_path)
    two = pair.runner(model, num_blocks=32)
    assert two._runner.store.shape.num_kv_heads == 1
    assert tokens_of(two) == tokens_of(model.runner(num_blocks=32))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_are_those_of_one_rank_and_prompts_have_their_logprobs(pair, tiny_model, name):
    model = tiny_model(name)
    params = SamplingParams(seed=0, temperature=0.0, min_tokens=1000, logprobs=301)

    def logprobs(runner, inner):
        prompt = random.Random(9).choices(range(3, 301), k=23)
        sequence = Driven(prompt, params)
        tiny_models.place(inner, [sequence], 8)
        runner.block_size = inner.block_size
        while len(sequence.output) < 8:
            tiny_models.step(runner, [sequence], 7)
        rows = [sorted((top.token, top.logprob) for top in d.logprob.top) for d in sequence.drawn]
        assert all([token for token, _ in row] == list(range(301)) for row in rows)
        return [logprob for row in rows for _, logprob in row]

    one = model.runner()
    expected = logprobs(one, one)
    two = pair.runner(model)
    found = logprobs(two, two._runner)
    largest = max(map(abs, expected))
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 1e-5 * largest
    scored = [
        runner.execute([tiny_models.Row(list(range(3, 14)), 0, [1, 2, 3], prompt_logprobs=2, next_token=40)])
        for runner in (one, two)
    ]
    values = [[logprob.logprob for logprob in result.prompt_logprobs] for (result,) in scored]
    assert len(values[0]) == 11
    assert values[1] == pytest.approx(values[0], abs=1e-5 * largest)


def test_a_rank_holds_its_own_heads_and_rows_and_the_hand_written_layers(pair, tiny_model):
    model = tiny_model("llama")
    one, two = model.runner(), pair.runner(model)._runner
    written = [m for m in two.loaded.model.modules() if isinstance(m, llama.LlamaLayer)]
    assert len(written) == 3
    assert (one.store.shape.num_kv_heads, two.store.shape.num_kv_heads) == (2, 1)
    assert len(two.loaded.model.get_input_embeddings().weight) == 150


def test_all_ranks_have_the_blocks_of_the_one_with_the_least_memory(pair, tiny_model, monkeypatch):
    """Rank 0 alone is told of twice the memory: rank 1's counts."""
    from workers.engine.device import runner as runner_module

    true_plan = runner_module.plan_num_blocks
    monkeypatch.setattr(runner_module, "plan_num_blocks", lambda *a: 2 * true_plan(*a))
    two = pair.runner(tiny_model("llama"), num_blocks=None, kv_memory=1 << 20)
    assert two.num_blocks == (1 << 20) // two._runner.store.shape.bytes_per_block
