"""Beam search of the whole engine against transformers' `generate(num_beams=...)`: the same texts with the same scores,
float32, with and without loss of blocks on the way."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from tiny_models import TinyModel

from cache.blocks.usage import SHARED
from workers.protocol.messages import BeamParams, SamplingParams

pytestmark = pytest.mark.rest

NUM_TOKENS = 14

TinyModels = Callable[[str], TinyModel]


def _tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).sample(range(3, 301), k=count)


def _whole(row: list[int], end_ids: list[int]) -> list[int]:
    """Up to the first end; behind it is padding."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in end_ids), len(row))]


def _expected(
    model: TinyModel, prompt: list[int], width: int, penalty: float, end_ids: list[int]
) -> list[tuple[list[int], float]]:
    """Texts and their scores, the best first."""
    ids = torch.tensor([prompt])
    out = model.reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        eos_token_id=[2, *end_ids],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = [_whole(row[len(prompt) :], [2, *end_ids]) for row in out.sequences.tolist()]
    return list(zip(texts, out.sequences_scores.tolist(), strict=True))


def _request(name, prompt, width, penalty, end_ids, root):
    sampling = SamplingParams(seed=0, logprobs=0, stop_token_ids=tuple(end_ids))
    return generate_request(
        name, prompt, NUM_TOKENS, sampling=sampling, num_choices=width, beams=BeamParams(penalty), root=root
    )


def _check(drive: Driver, name: str, width: int, penalty: float, expected) -> None:
    found = [drive.tokens[LINK, name, index] for index in range(width)]
    assert found == [text for text, _ in expected]
    for index, (text, score) in enumerate(expected):
        (delta,) = [d for d in drive.records if d.request_id == name and d.index == index and d.tokens]
        total = sum(entry.logprob for entry in delta.logprobs)
        assert total / len(text) ** penalty == pytest.approx(score, rel=1e-5, abs=1e-4)
        assert delta.finish == ("stop" if len(text) < NUM_TOKENS else drive.finishes[LINK, name, index])


def _cases() -> dict[str, tuple[list[int], list[int]]]:
    """Prompts, and tokens that end a text there: none, some, many."""
    return {
        f"r{i}": (_tokens(i, length), _tokens(100 + i, num_ends))
        for i, (length, num_ends) in enumerate([(9, 0), (16, 12), (21, 30)])
    }


@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (3, -1.0), (4, 0.0), (4, 2.0)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_texts_and_scores_are_those_of_transformers(
    tiny_model: TinyModels, name: str, width: int, penalty: float
) -> None:
    model = tiny_model(name)
    runner = model.runner(num_blocks=96)
    drive = Driver(runner, max_batch_tokens=16, max_running=16)
    cases = _cases()
    for key, (prompt, ends) in cases.items():
        drive.send(_request(key, prompt, width, penalty, ends, runner.root))
    drive.run().check_idle()
    for key, (prompt, ends) in cases.items():
        _check(drive, key, width, penalty, _expected(model, prompt, width, penalty, ends))


@pytest.mark.parametrize("seed", range(6))
def test_a_search_that_loses_its_blocks_at_any_step_finds_the_same(tiny_model: TinyModels, seed: int) -> None:
    """At random steps the pool is emptied of what is not in use, or a search is thrown out by hand."""
    model, width, penalty = tiny_model("llama"), 4, 1.0
    runner = model.runner(num_blocks=80)
    drive, source = Driver(runner, max_batch_tokens=16, max_running=12), random.Random(seed)
    for key, (prompt, ends) in _cases().items():
        drive.send(_request(key, prompt, width, penalty, ends, runner.root))
    while not drive.idle:
        drive.step()
        running = drive.scheduler.running["interactive"]
        if running and source.random() < 0.3:
            drive.scheduler.ranks.preempt(source.choice(running), drive.now, "blocks")
        if source.random() < 0.3:
            drive.cache.free(drive.cache.allocate(drive.cache.available(SHARED)))
    drive.check_idle()
    assert drive.engine.totals.num_recomputed > 0
    for key, (prompt, ends) in _cases().items():
        _check(drive, key, width, penalty, _expected(model, prompt, width, penalty, ends))


def test_blocks_held_are_those_of_the_tree_of_beams(tiny_model: TinyModels) -> None:
    """A block for each different text up to its end, as long as nobody else reads or writes the cache: the trunk once,
    a branch where beams part, and nothing of beams that were given up."""
    width, size = 4, 4
    runner = tiny_model("llama").runner(num_blocks=96, block_size=size)
    drive = Driver(runner, max_running=8)
    prompt = _tokens(5, 18)
    drive.send(_request("r", prompt, width, 1.0, [], runner.root))
    most = 0
    while not drive.idle:
        drive.step()
        if not drive.idle and drive.attempt("r").drawn:
            beams = drive.attempt("r").sequences
            written = [tuple(b.tokens[: b.num_computed]) for b in beams]
            tree = {text[: i + size] for text in written for i in range(0, len(text), size)}
            held = drive.attempt("r").held.number
            assert held == len({block for beam in beams for block in beam.block_ids})
            # A tail that was shared is copied when it is written next, so a fork has no block of its own before.
            assert held == len(tree)
            most = max(most, held)
    assert most > -(-(len(prompt) + NUM_TOKENS) // size), "the beams never parted"
    drive.check_idle()
