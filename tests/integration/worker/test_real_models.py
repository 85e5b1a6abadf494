"""The whole engine with real models of random weights against transformers' own: chunked prefill, preemption
and prefix hits forced on, float32, greedy, token for token."""

from __future__ import annotations

import random

import pytest
from engine_driver import LINK, Driver
from fakes import generate_request
from tiny_models import GREEDY, TinyModel, best_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 24


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"])
def test_tokens_equal_those_of_transformers(name, tmp_path):
    model = TinyModel.make(name, tmp_path)
    runner = model.runner(num_blocks=32)
    drive = Driver(runner, max_batch_tokens=11, max_running=5)
    source = random.Random(3)
    shared = [source.randrange(3, 300) for _ in range(30)]
    prompts = [shared[: 10 + 5 * i] + [source.randrange(3, 300) for _ in range(7)] for i in range(4)]
    requests = [
        generate_request(f"r{i}", prompt, NUM_TOKENS, sampling=GREEDY, root=runner.root)
        for i, prompt in enumerate([*prompts, prompts[-1]])
    ]
    drive.send(*requests[:-1])
    drive.run()
    drive.send(requests[-1])
    drive.run().check_idle()
    for request in requests:
        tokens = drive.tokens[LINK, request.request_id, 0]
        assert len(tokens) == NUM_TOKENS
        assert tokens == best_tokens(model.reference, request.prompt, tokens)
    assert drive.engine.totals.num_preempted > 0
    assert drive.engine.totals.num_recomputed > 0
    assert drive.endings[LINK, "r4"].usage.cache_read >= 28
    assert max(e.num_tokens for e in drive.endings[LINK, "r0"].timeline if e.name == "chunk") <= 11


def test_sampled_choices_share_a_prompt_and_equal_single_requests(tmp_path):
    from workers.engine.values.sampling_params import choice_seed
    from workers.protocol.messages import SamplingParams

    model = TinyModel.make("llama", tmp_path)
    runner = model.runner(num_blocks=60)
    prompt = list(range(3, 25))

    def params(seed):
        return SamplingParams(seed, 1.0, top_p=0.95, min_tokens=1000)

    many = Driver(runner, max_batch_tokens=16, max_running=8)
    many.send(generate_request("n", prompt, 12, sampling=params(9), num_choices=3, root=runner.root))
    many.run().check_idle()
    for index in range(3):
        single = Driver(runner)
        seed = choice_seed(9, index)
        single.send(generate_request("1", prompt, 12, sampling=params(seed), root=runner.root))
        single.run()
        assert many.tokens[LINK, "n", index] == single.tokens[LINK, "1", 0]
    assert len({tuple(many.tokens[LINK, "n", i]) for i in range(3)}) == 3
