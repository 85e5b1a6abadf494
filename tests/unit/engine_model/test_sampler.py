"""From logits to tokens: processors in their order, greedy and random rows beside each other, logprobs."""

from __future__ import annotations

import dataclasses
import random
from array import array
from typing import ClassVar

import msgspec
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from kernels import dispatch
from workers.engine.sampling import processors
from workers.engine.sampling.biases import Biases
from workers.engine.sampling.device_edits import DeviceEdits
from workers.engine.sampling.prompt_words import PromptWords
from workers.engine.sampling.sampler import Sampler, token_logprobs
from workers.engine.sequences.bans import Bans
from workers.engine.values.plan import Row, SampleSpec
from workers.engine.values.sampling_params import choice_seed
from workers.protocol.messages import SamplingParams

VOCAB, EOS = 50, (2, 9)
GREEDY = SamplingParams(seed=5, temperature=0.0)
PROMPT, OUTPUT = [4, 4, 7, 11, 30], [7, 12, 12, 12]

SAMPLER = Sampler(dispatch.choose(torch.device("cpu")), EOS)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 2


def draw(params: SamplingParams, output: list[int] | None = None, prompt: list[int] = PROMPT) -> SampleSpec:
    output = OUTPUT if output is None else output
    return SampleSpec(params, params.seed, len(prompt) + len(output), prompt, output)


def processed(
    logits: torch.Tensor, params: SamplingParams, output: list[int] | None = None, prompt: list[int] = PROMPT
) -> torch.Tensor:
    edits = processors.edit_tensors([draw(params, output, prompt)], VOCAB, logits.device, PromptWords(), Biases(EOS))
    out = torch.empty_like(logits)
    dispatch.choose(logits.device).logits(out, logits, edits, torch.ones(1))
    return out[0]


def test_repetition_penalty_counts_prompt_and_output_as_transformers_does() -> None:
    logits = logits_of(1)
    params = msgspec.structs.replace(GREEDY, repetition_penalty=1.7)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([PROMPT + OUTPUT]), logits)
    torch.testing.assert_close(processed(logits, params), expected[0])


class _Read(array):
    """A prompt that counts how often it is read."""

    num_reads = 0

    def __iter__(self):
        self.num_reads += 1
        return super().__iter__()


def test_a_prompt_is_read_once_whatever_the_number_of_steps() -> None:
    params = msgspec.structs.replace(GREEDY, repetition_penalty=1.7, presence_penalty=0.25)
    cpu = torch.device("cpu")
    ops, prompt, other = dispatch.choose(cpu), _Read("i", PROMPT), _Read("i", [1, 49])
    sampler, edits = Sampler(ops, EOS), DeviceEdits(ops, 4, VOCAB, EOS, cpu)
    for step, (row_id, mine) in enumerate([(0, prompt), (1, other), (0, prompt), (0, prompt), (0, other), (0, prompt)]):
        output = [12] * step
        drawn = SampleSpec(params, 5, len(mine) + step, mine, output)
        rows = [Row([3], len(mine) + step - 1, [1], (drawn,), row_id=row_id)]
        logits = logits_of(step)
        expected = processed(logits, params, output, [1, 49] if mine is other else PROMPT)
        assert sampler.draw(logits, [drawn])[0].token == int(expected.argmax())
        edits.begin(rows)
        edits.apply(logits, rows)
        torch.testing.assert_close(logits[0], expected)
    assert prompt.num_reads == other.num_reads == 2, "once by the sampler, and once by the edits of the device"


def test_words_of_a_prompt_leave_with_it() -> None:
    prompts = PromptWords()
    kept = [array("i", [number]) for number in range(9)]
    assert all(prompts.of(prompt) is prompts.of(prompt) for prompt in kept)
    assert len(prompts._known) == 9
    del kept[1:]
    assert len(prompts._known) == 1
    assert list(prompts.of(array("i")).places) == []


class _Biases(tuple):
    """Biases of a request that count how often they are read."""

    num_reads: ClassVar[list[int]] = []

    def __iter__(self):
        self.num_reads.append(1)
        return super().__iter__()


def test_biases_are_sorted_once_for_a_request_and_bans_come_and_go() -> None:
    biases = _Biases(((30, 2.5), (8, -1.0), (3, 4.0), (8, 0.5)))
    params = msgspec.structs.replace(GREEDY, logit_bias=biases, min_tokens=2)
    cpu = torch.device("cpu")
    ops = dispatch.choose(cpu)
    sampler, edits = Sampler(ops, EOS), DeviceEdits(ops, 4, VOCAB, EOS, cpu)
    _Biases.num_reads.clear()
    for step, banned in enumerate([(), (), (3, 7), (3, 7), (), (8,), (), ()]):
        drawn = SampleSpec(params, 5, len(PROMPT) + step, PROMPT, [12] * step, banned=banned)
        rows = [Row([3], len(PROMPT) + step - 1, [1], (drawn,), row_id=0)]
        logits, expected = logits_of(step), logits_of(step)[0]
        expected[[30, 8, 3]] += torch.tensor([2.5, -0.5, 4.0])
        expected[[*banned, *(EOS if step < 2 else ())]] = float("-inf")
        assert sampler.draw(logits, [drawn])[0].token == int(expected.argmax())
        edits.begin(rows)
        edits.apply(logits, rows)
        torch.testing.assert_close(logits[0], expected)
    assert len(_Biases.num_reads) == 2, "once by the sampler, and once by the edits of the device"


def test_frequency_and_presence_penalty_count_the_output_only() -> None:
    logits = logits_of(2)
    params = msgspec.structs.replace(GREEDY, frequency_penalty=0.5, presence_penalty=0.25)
    change = processed(logits, params) - logits[0]
    expected = torch.zeros(VOCAB)
    expected[7], expected[12] = -(0.5 + 0.25), -(3 * 0.5 + 0.25)
    torch.testing.assert_close(change, expected)
    assert torch.equal(processed(logits, params, output=[]), logits[0])


def test_logit_bias_is_added_as_transformers_adds_it() -> None:
    logits = logits_of(3)
    params = msgspec.structs.replace(GREEDY, logit_bias=((3, 4.0), (8, -100.0)))
    expected = SequenceBiasLogitsProcessor([[[3], 4.0], [[8], -100.0]])(torch.tensor([PROMPT]), logits)
    torch.testing.assert_close(processed(logits, params), expected[0])


@pytest.mark.parametrize("seed", range(40))
def test_bad_words_are_banned_as_transformers_bans_them(seed: int) -> None:
    """Over few tokens, so that most histories end in the beginning of a word."""
    source = random.Random(seed)
    words = {tuple(source.choices(range(10, 16), k=source.choice((1, 2, 2, 3, 4)))) for _ in range(20)}
    output = source.choices(range(10, 16), k=30)
    logits = logits_of(seed)
    params = msgspec.structs.replace(GREEDY, bad_words=tuple(words), logit_bias=((11, 3.0),))
    banned = Bans(params, EOS, VOCAB).behind(output)
    drawn = dataclasses.replace(draw(params, output), banned=banned)
    edits = processors.edit_tensors([drawn], VOCAB, logits.device, PromptWords(), Biases(EOS))
    out = torch.empty_like(logits)
    dispatch.choose(logits.device).logits(out, logits, edits, torch.ones(1))
    chain = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[11], 3.0]]),
            NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=list(EOS)),
        ]
    )
    expected = chain(torch.tensor([output]), logits)
    torch.testing.assert_close(out, expected)
    assert out.isinf().sum() == len(banned)
    assert processors.needs_processing(drawn) and SAMPLER.draw(logits, [drawn])[0].token not in banned


def test_no_end_token_can_be_drawn_below_min_tokens() -> None:
    logits = logits_of(4)
    params = msgspec.structs.replace(GREEDY, min_tokens=5, stop_token_ids=(20,))
    expected = logits.clone()
    expected[0, [2, 9, 20]] = float("-inf")
    assert torch.equal(processed(logits, params), expected[0])
    own = MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [2, 9, 20], device="cpu")
    assert torch.equal(processed(logits, params), own(torch.tensor([PROMPT + OUTPUT]), logits)[0])
    assert not processors.needs_processing(draw(params, [*OUTPUT, 1]))


def test_processors_and_warpers_together_are_those_of_transformers_in_their_order() -> None:
    """The kept set decides which tokens can be drawn at all, so drawing often shows it."""
    logits = logits_of(6)
    params = SamplingParams(
        seed=1, temperature=1.6, top_k=4, repetition_penalty=1.5, logit_bias=((7, 3.0),), min_tokens=9
    )
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.5),
            SequenceBiasLogitsProcessor([[[7], 3.0]]),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, list(EOS), device="cpu"),
            TemperatureLogitsWarper(1.6),
            TopKLogitsWarper(4),
        ]
    )
    expected = chain(torch.tensor([PROMPT + OUTPUT]), logits)[0]
    draws = [dataclasses.replace(draw(params), position=position) for position in range(400)]
    tokens = [drawn.token for drawn in SAMPLER.draw(logits.expand(400, -1), draws)]
    assert set(tokens) == set(expected.isfinite().nonzero().squeeze(1).tolist())


def test_a_batch_of_all_kinds_draws_what_each_row_draws_alone() -> None:
    kinds = [
        GREEDY,
        SamplingParams(seed=11),
        SamplingParams(seed=12, temperature=0.7, top_p=0.9, logprobs=2),
        msgspec.structs.replace(GREEDY, presence_penalty=1.5, logprobs=0),
        SamplingParams(seed=2**64 - 1, temperature=1.4, top_k=7, min_p=0.05),
        msgspec.structs.replace(GREEDY, logit_bias=((40, 50.0),)),
    ]
    logits = logits_of(7, len(kinds))
    before = logits.clone()
    together = SAMPLER.draw(logits, [draw(params) for params in kinds])
    assert torch.equal(logits, before)
    for row, params in enumerate(kinds):
        assert SAMPLER.draw(logits[row : row + 1], [draw(params)]) == [together[row]]
    assert together[0].token == int(logits[0].argmax())
    assert together[5].token == 40


def test_the_same_seed_and_position_draw_the_same_token_again() -> None:
    logits = logits_of(8)
    params = SamplingParams(seed=99, temperature=2.0)
    tokens = [
        SAMPLER.draw(logits, [dataclasses.replace(draw(params), position=position)])[0].token
        for position in [*range(20), *range(20)]
    ]
    assert tokens[:20] == tokens[20:]
    assert len(set(tokens[:20])) > 3


def test_a_temperature_near_zero_is_greedy_and_finite() -> None:
    logits = logits_of(9) * 1000
    for temperature in (1e-300, 1e-9, 1e-6):
        params = SamplingParams(seed=1, temperature=temperature)
        assert SAMPLER.draw(logits, [draw(params)])[0].token == int(logits[0].argmax())


def test_logprobs_are_of_the_raw_logits_whatever_changed_them() -> None:
    logits = logits_of(10)
    params = msgspec.structs.replace(GREEDY, logit_bias=((33, 90.0),), logprobs=3)
    (drawn,) = SAMPLER.draw(logits, [draw(params)])
    raw = logits[0].log_softmax(-1)
    assert drawn.token == 33
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(raw[33].item())
    best = raw.topk(3)
    assert [top.token for top in drawn.logprob.top] == best.indices.tolist()
    assert [top.logprob for top in drawn.logprob.top] == pytest.approx(best.values.tolist())


def test_logprobs_come_only_where_asked_and_only_as_many() -> None:
    asked = [msgspec.structs.replace(GREEDY, logprobs=number) for number in (-1, 0, 5, 80)]
    drawn = SAMPLER.draw(logits_of(11, 4), [draw(params) for params in asked])
    assert drawn[0].logprob is None
    assert [len(entry.logprob.top) for entry in drawn[1:] if entry.logprob] == [0, 5, VOCAB]


def test_logprobs_of_given_tokens_need_no_best_ones() -> None:
    logits = logits_of(12, 3)
    found = token_logprobs(logits, [1, 2, 3], 0)
    expected = logits.log_softmax(-1)[[0, 1, 2], [1, 2, 3]].tolist()
    assert [entry.logprob for entry in found] == pytest.approx(expected)
    assert all(entry.top == () for entry in found)


def test_given_tokens_are_scored_beside_rows_that_want_the_best_or_nothing() -> None:
    asked = [
        msgspec.structs.replace(GREEDY, logprobs=2),
        msgspec.structs.replace(GREEDY, logprobs=0, logprob_token_ids=(7, 3, 40)),
        msgspec.structs.replace(GREEDY, logprobs=5, logprob_token_ids=(1,)),
        msgspec.structs.replace(GREEDY, logprobs=-1, logprob_token_ids=(1,)),
    ]
    logits = logits_of(6, len(asked))
    found = SAMPLER.draw(logits, [draw(params) for params in asked])
    expected = logits.log_softmax(dim=-1)
    for row, (one, params) in enumerate(zip(found, asked, strict=True)):
        if params.logprobs < 0:
            assert one.logprob is None
            continue
        assert one.logprob is not None
        ids = params.logprob_token_ids or tuple(logits[row].topk(params.logprobs).indices.tolist())
        assert tuple(top.token for top in one.logprob.top) == ids
        for top in one.logprob.top:
            assert top.logprob == pytest.approx(float(expected[row, top.token]), abs=1e-5)
        assert one.logprob.logprob == pytest.approx(float(expected[row, one.token]), abs=1e-5)


def test_choice_0_has_the_seed_of_the_request_and_the_others_have_their_own() -> None:
    assert choice_seed(123, 0) == 123
    seeds = {choice_seed(seed, index) for seed in (0, 123, 2**64 - 1) for index in range(50)}
    assert len(seeds) == 150
    assert all(0 <= seed < 2**64 for seed in seeds)
    # Fixed for ever: a stream resumed by a newer worker has to go on with the same choice.
    assert choice_seed(123, 1) == 451625611639108020


@pytest.mark.parametrize("rows", [1, 5])
def test_a_large_vocabulary_is_drawn_from_alike_with_one_thread_and_with_two(rows: int) -> None:
    """Sums over 151,936 tokens are long enough that torch shares them among its threads if it may."""
    logits = torch.randn((rows, 151_936), generator=torch.Generator().manual_seed(1)) * 3
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            drawn = []
            for params in (
                SamplingParams(seed=3, logprobs=5),
                SamplingParams(seed=3, top_p=0.9, logprobs=5, repetition_penalty=1.2),
                SamplingParams(seed=3, top_k=40, min_p=0.01, logprobs=5, frequency_penalty=0.3),
            ):
                drawn += SAMPLER.draw(logits.clone(), [draw(params)] * rows)
            found.append(drawn)
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
