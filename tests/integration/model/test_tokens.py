"""Greedy tokens and logits of the runner against transformers' own, float32 on a CPU."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
from tiny_models import CONFIGS, Driven, TinyModel, best_tokens, drive

from workers.engine.device.runner import ModelRunner
from workers.engine.values.plan import Row

NUM_TOKENS = 24
LENGTHS = (41, 18)
"""With the output the first is past 5 windows of 12."""

TinyModels = Callable[[str], TinyModel]


def _prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 301), k=length)


@functools.cache
def _runner(model: TinyModel) -> ModelRunner:
    """Keeps nothing between two sequences but KV, which `drive` poisons."""
    return model.runner()


@functools.cache
def _best(model: TinyModel, length: int, output: tuple[int, ...]) -> list[int]:
    return best_tokens(model.reference, _prompt(length), output)


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(1 << 30, id="whole"),
        pytest.param(1, id="1", marks=pytest.mark.rest),
        pytest.param(7, id="7"),
        pytest.param(16, id="16", marks=pytest.mark.rest),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_the_best_ones_of_transformers_for_every_chunking(
    tiny_model: TinyModels, name: str, chunk: int
) -> None:
    """Two sequences, the second arrives while the first decodes: prefill and decode share steps."""
    model = tiny_model(name)
    sequences = [Driven(_prompt(length), arrival=4 * i) for i, length in enumerate(LENGTHS)]
    drive(_runner(model), sequences, NUM_TOKENS, chunk, shuffle_seed=chunk)
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        assert len(sequence.output) == NUM_TOKENS
        assert sequence.output == _best(model, length, tuple(sequence.output))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_prompt_logprob_is_within_1e4_of_transformers(tiny_model: TinyModels, name: str) -> None:
    model = tiny_model(name)
    prompt = _prompt(41)
    (result,) = _runner(model).execute([Row(prompt, 0, list(range(1, 12)), prompt_logprobs=0)])
    logits = model.reference(input_ids=torch.tensor([prompt])).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
