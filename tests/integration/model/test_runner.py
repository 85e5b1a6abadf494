"""The runner as a StepRunner: what a row asks for is what its result holds, whatever else shares the step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest
import torch
from tiny_models import GREEDY, Driven, TinyModel, drive, place, step

from workers.engine.values.plan import Row, SampleSpec, StepRunner
from workers.engine.values.sampling_params import choice_seed
from workers.protocol.messages import SamplingParams

TinyModels = Callable[[str], TinyModel]


def prompt_of(length: int) -> list[int]:
    return random.Random(1000 + length).choices(range(3, 301), k=length)


def table_of(num_blocks: int) -> list[int]:
    return random.Random(num_blocks).sample(range(1, 48), num_blocks)


def test_the_runner_offers_what_the_engine_reads(tiny_model: TinyModels) -> None:
    runner: StepRunner = tiny_model("llama").runner(max_model_len=100)
    assert (runner.block_size, runner.num_blocks, runner.max_model_len) == (4, 48, 100)
    assert (runner.eos_token_ids, runner.vocab_size, len(runner.root)) == ((2,), 301, 32)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_sampled_stream_is_the_same_alone_in_a_batch_and_for_every_chunking(
    tiny_model: TinyModels, name: str
) -> None:
    runner = tiny_model(name).runner()
    params = SamplingParams(seed=77, temperature=0.9, top_p=0.95, repetition_penalty=1.1, min_tokens=99)

    def stream(chunk: int, others: int) -> list[int]:
        watched = Driven(prompt_of(21), params)
        neighbours = [
            Driven(prompt_of(5 + i), msgspec.structs.replace(params, seed=i), arrival=i) for i in range(others)
        ]
        drive(runner, [watched, *neighbours], 16, chunk, shuffle_seed=chunk + others)
        return watched.output

    alone = stream(1 << 30, 0)
    assert len(set(alone)) > 5
    assert [stream(chunk, others) for chunk, others in ((1, 0), (5, 3), (16, 4))] == [alone] * 3


def test_a_resumed_stream_goes_on_with_the_tokens_it_would_have_had(tiny_model: TinyModels) -> None:
    """Another runner gets prompt and output so far, as after preemption or on another worker."""
    params = SamplingParams(seed=3, temperature=1.2, frequency_penalty=0.3, min_tokens=99)
    whole = Driven(prompt_of(13), params)
    drive(tiny_model("qwen3").runner(), [whole], 20)
    resumed = Driven(prompt_of(13), params, output=whole.output[:8])
    drive(tiny_model("qwen3").runner(), [resumed], 20)
    assert resumed.output == whole.output


def test_choices_forked_from_one_row_are_single_requests_with_the_derived_seeds(tiny_model: TinyModels) -> None:
    runner = tiny_model("llama").runner()
    prompt = prompt_of(10)
    draws = tuple(
        SampleSpec(SamplingParams(seed=5), choice_seed(5, index), len(prompt), prompt, []) for index in range(6)
    )
    (together,) = runner.execute([Row(prompt, 0, table_of(3), draws)])
    for draw, drawn in zip(draws, together.drawn, strict=True):
        (alone,) = runner.execute([Row(prompt, 0, table_of(3), (draw,))])
        assert alone.drawn == (drawn,)
    assert len({drawn.token for drawn in together.drawn}) > 1


def test_a_fork_goes_on_from_copied_blocks(tiny_model: TinyModels) -> None:
    """Copy-on-write of a partly filled tail block: the copy reads what the original wrote."""
    runner = tiny_model("llama").runner()
    with torch.inference_mode():
        runner.store.tensor.fill_(math.nan)
    prompt = prompt_of(10)
    runner.execute([Row(prompt, 0, [7, 3, 9])])
    runner.copy_blocks([(9, 20)])
    draw = SampleSpec(GREEDY, 0, 11, prompt, [50])
    original, fork = runner.execute([Row([50], 10, [7, 3, 9], (draw,)), Row([50], 10, [7, 3, 20], (draw,))])
    assert original.drawn == fork.drawn
    (whole,) = runner.execute([Row([*prompt, 50], 0, [30, 31, 32], (draw,))])
    assert whole.drawn == original.drawn


def test_a_row_without_draws_has_an_empty_result(tiny_model: TinyModels) -> None:
    (result,) = tiny_model("llama").runner().execute([Row(prompt_of(6), 0, [1, 2])])
    assert result.drawn == ()
    assert result.prompt_logprobs == ()


def test_prompt_logprobs_of_chunks_join_to_those_of_the_whole(tiny_model: TinyModels) -> None:
    """130 tokens: more than the head takes at one time. Chunks name the token that follows them."""
    runner = tiny_model("llama").runner(block_size=16)
    prompt = prompt_of(130)
    table = table_of(9)
    (whole,) = runner.execute([Row(prompt, 0, table, prompt_logprobs=2)])
    assert len(whole.prompt_logprobs) == 129
    parts = []
    for start in range(0, 130, 50):
        end = min(130, start + 50)
        following = prompt[end] if end < 130 else -1
        row = Row(prompt[start:end], start, table, prompt_logprobs=2, next_token=following)
        neighbour = Row(prompt_of(9), 0, [47])
        parts += runner.execute([neighbour, row])[1].prompt_logprobs
    for mine, expected in zip(parts, whole.prompt_logprobs, strict=True):
        assert mine.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [top.token for top in mine.top] == [top.token for top in expected.top]


def test_output_logprobs_are_those_of_transformers(tiny_model: TinyModels) -> None:
    model = tiny_model("gemma2")
    prompt = prompt_of(17)
    params = msgspec.structs.replace(GREEDY, logprobs=4)
    sequence = Driven(prompt, params)
    drive(model.runner(), [sequence], 6)
    ids = torch.tensor([prompt + sequence.output])
    expected = model.reference(input_ids=ids).logits[0].log_softmax(-1)
    for index, drawn in enumerate(sequence.drawn):
        row = expected[len(prompt) - 1 + index]
        assert drawn.logprob is not None
        assert drawn.logprob.logprob == pytest.approx(row[drawn.token].item(), abs=1e-4)
        assert [top.token for top in drawn.logprob.top] == row.topk(4).indices.tolist()


def test_two_runners_in_one_process_share_nothing(tiny_model: TinyModels) -> None:
    first, second = tiny_model("llama").runner(), tiny_model("mistral").runner()
    a, b, alone = Driven(prompt_of(9)), Driven(prompt_of(9)), Driven(prompt_of(9))
    place(first, [a], 12)
    place(second, [b], 12)
    for _ in range(12):  # step by step in turns
        step(first, [a])
        step(second, [b])
    drive(tiny_model("llama").runner(), [alone], 12)
    assert a.output == alone.output
    assert a.output != b.output


def test_bfloat16_stays_near_float32(tiny_model: TinyModels) -> None:
    """Teacher-forced: mean divergence from float32 at most twice that of transformers' own bfloat16."""
    model = tiny_model("llama")
    prompt = prompt_of(60)
    ids = torch.tensor([prompt])
    exact = model.reference(input_ids=ids).logits[0].log_softmax(-1)
    (result,) = model.runner(dtype="bfloat16").execute([Row(prompt, 0, table_of(15), prompt_logprobs=301)])
    mine = torch.full((59, 301), math.nan)
    for position, entry in enumerate(result.prompt_logprobs):
        for top in entry.top:
            mine[position, top.token] = top.logprob
    rounded = type(model.reference).from_pretrained(model.directory, dtype=torch.bfloat16)
    theirs = rounded(input_ids=ids).logits[0].float().log_softmax(-1)

    def divergence(logprobs: torch.Tensor) -> float:
        return (exact[:59].exp() * (exact[:59] - logprobs)).sum(-1).mean().item()

    assert 0 < divergence(mine) <= 2 * divergence(theirs[:59])
