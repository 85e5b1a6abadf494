"""Edits of logits before a draw: the twin against transformers' processors, the kernel in the interpreter against the
twin, and what its scan leaves for sampling."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from token_bits import pack_bits
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from kernels import dispatch
from kernels.ahead import specimens
from kernels.arguments.draws import NO_TOKEN, DrawTensors, EditTensors, Workspace, geometry, num_words
from kernels.reference.logits import unpack_bits

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"logits", "sample", "count_tokens"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])


def edits_of(rows: int, vocab: int, lines: int = 1, biases: int = 1) -> EditTensors:
    """Edits that change nothing."""
    words = num_words(vocab)
    return EditTensors(
        penalty_lines=torch.full((rows,), -1, dtype=torch.int32),
        repetition=torch.ones(rows),
        frequency=torch.zeros(rows),
        presence=torch.zeros(rows),
        prompt_bits=torch.zeros((lines, words), dtype=torch.int32),
        counts=torch.zeros((lines, vocab), dtype=torch.int32),
        bias_tokens=torch.full((rows, biases), NO_TOKEN, dtype=torch.int32),
        biases=torch.zeros((rows, biases)),
        mask_lines=torch.full((rows,), -1, dtype=torch.int32),
        mask_bits=torch.full((lines, words), -1, dtype=torch.int32),
    )


def random_edits(rows: int, vocab: int) -> EditTensors:
    """Row 0 changes nothing, row 1 has one kind of each, the others everything; two share a grammar."""
    generator = torch.Generator().manual_seed(vocab)
    edits = edits_of(rows, vocab, rows, 6)
    for row in range(1, rows):
        line = rows - 1 - row
        edits.penalty_lines[row], edits.mask_lines[row] = line, row // 2
        edits.repetition[row], edits.frequency[row], edits.presence[row] = 1.3, 0.4, -0.2
        prompt = torch.randint(0, vocab, (5,), generator=generator)
        edits.prompt_bits[line] = pack_bits(prompt, vocab)
        output = torch.randint(0, vocab, (9,), generator=generator)
        edits.counts[line] = torch.bincount(output, minlength=vocab)
        number = min(row, 5)
        edits.bias_tokens[row, :number] = torch.randint(0, vocab, (number,), generator=generator).sort().values.int()
        edits.biases[row, :number] = torch.randn(number, generator=generator)
        edits.biases[row, 0] = float("-inf")
    allowed = torch.randint(-(2**31), 2**31, edits.mask_bits.shape, generator=generator)
    edits.mask_bits.copy_(allowed)
    return edits


def run(ops, raw, edits, temperature=None, shape=None) -> tuple[torch.Tensor, Workspace]:
    rows, vocab = raw.shape
    workspace = Workspace.create(rows, shape or geometry(vocab), CPU)
    out = Guarded((rows, vocab), torch.float32)
    temperature = torch.ones(rows) if temperature is None else temperature
    ops.logits(out.tensor, raw, edits, temperature, workspace)
    out.check()
    return out.tensor, workspace


def raw_of(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(vocab)) * 3


@BOTH
def test_repetition_counts_prompt_and_output_as_transformers_does(ops):
    raw, edits = raw_of(2, 70), edits_of(2, 70)
    prompt, output = [4, 4, 7, 31, 32, 69], [7, 12, 12, 64]
    edits.penalty_lines[1] = 0
    edits.repetition[:] = 1.7
    edits.prompt_bits[0] = pack_bits(torch.tensor(prompt), 70)
    edits.counts[0] = torch.bincount(torch.tensor(output), minlength=70)
    out, _ = run(ops, raw, edits)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), raw[1:])
    assert torch.equal(out[0], raw[0])
    torch.testing.assert_close(out[1:], expected)


@BOTH
def test_frequency_and_presence_count_the_output_only(ops):
    raw, edits = raw_of(1, 70), edits_of(1, 70)
    edits.penalty_lines[0] = 0
    edits.frequency[0], edits.presence[0] = 0.5, 0.25
    edits.prompt_bits[0] = pack_bits(torch.tensor([1, 2, 3]), 70)
    edits.counts[0, 7], edits.counts[0, 12] = 1, 3
    change = torch.zeros(70)
    change[7], change[12] = -0.75, -1.75
    torch.testing.assert_close(run(ops, raw, edits)[0] - raw, change[None])


@BOTH
def test_biases_and_bans_are_those_of_transformers(ops):
    raw, edits = raw_of(1, 70), edits_of(1, 70, biases=6)
    edits.bias_tokens[0, :5] = torch.tensor([0, 3, 20, 20, 69], dtype=torch.int32)
    edits.biases[0, :5] = torch.tensor([-float("inf"), 4.0, 1.0, -float("inf"), -100.0])
    expected = SequenceBiasLogitsProcessor([[[3], 4.0], [[69], -100.0]])(torch.tensor([[1]]), raw)
    expected = SuppressTokensLogitsProcessor([0, 20])(torch.tensor([[1]]), expected)
    torch.testing.assert_close(run(ops, raw, edits)[0], expected)


@BOTH
def test_a_mask_bans_what_its_bits_do_not_allow(ops):
    raw, edits = raw_of(3, 100), edits_of(3, 100, lines=2)
    edits.mask_bits[0] = pack_bits(torch.tensor([31]), 100)
    edits.mask_bits[1] = pack_bits(torch.tensor([0, 32, 64, 99]), 100)
    edits.mask_lines[0], edits.mask_lines[2] = 1, 0
    out, _ = run(ops, raw, edits)
    assert out[0].isfinite().nonzero().squeeze(1).tolist() == [0, 32, 64, 99]
    assert torch.equal(out[1], raw[1])
    assert out[2].isfinite().nonzero().squeeze(1).tolist() == [31]


@BOTH
def test_the_mask_has_the_last_word_and_temperature_comes_behind(ops):
    """A bias must not bring back what a grammar forbids; greedy rows are not divided."""
    raw, edits = raw_of(2, 70), edits_of(2, 70)
    edits.bias_tokens[:, 0] = 5
    edits.biases[:, 0] = 1000.0
    edits.mask_bits[0] = pack_bits(torch.tensor([6, 7]), 70)
    edits.mask_lines[1] = 0
    out, _ = run(ops, raw, edits, torch.tensor([0.0, 0.5]))
    assert out[0, 5] == raw[0, 5] + 1000
    assert out[1].isfinite().nonzero().squeeze(1).tolist() == [6, 7]
    assert torch.equal(out[1, 6:8], TemperatureLogitsWarper(0.5)(None, raw[1, 6:8]))


tokens_below_80 = st.lists(st.integers(0, 79), max_size=12)


@BOTH
@settings(max_examples=25, deadline=None)
@given(
    prompt=tokens_below_80.filter(bool),
    output=tokens_below_80,
    biases=st.dictionaries(st.integers(0, 79), st.floats(-5, 5, width=32), max_size=5),
    banned=st.lists(st.integers(0, 79), max_size=4),
    penalty=st.sampled_from([0.7, 1.0, 1.4]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    seed=st.integers(0, 50),
)
def test_any_edits_are_those_of_transformers_in_their_order(
    ops, prompt, output, biases, banned, penalty, temperature, seed
):
    raw = torch.randn((1, 80), generator=torch.Generator().manual_seed(seed)) * 3
    edits = edits_of(1, 80, biases=10)
    edits.penalty_lines[0] = 0
    edits.repetition[0] = penalty
    edits.prompt_bits[0] = pack_bits(torch.tensor(prompt), 80)
    edits.counts[0] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=80)
    entries = sorted([*biases.items(), *((token, -float("inf")) for token in banned)])
    for index, (token, bias) in enumerate(entries):
        edits.bias_tokens[0, index], edits.biases[0, index] = token, bias
    chain = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    if any(biases.values()):
        listed = [[[token], bias] for token, bias in biases.items()]
        chain.append(SequenceBiasLogitsProcessor(listed))
    chain.append(SuppressTokensLogitsProcessor(banned))
    chain.append(TemperatureLogitsWarper(temperature))
    expected = chain(torch.tensor([prompt + output]), raw)
    found, _ = run(ops, raw, edits, torch.tensor([temperature]), geometry(80, lanes=16))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [1, 17, 255, 256, 257, 1000])
def test_the_kernel_edits_as_its_twin_and_scans_what_it_wrote(vocab):
    raw, edits = raw_of(4, vocab), random_edits(4, vocab)
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.9])
    shape = geometry(vocab, lanes=32, runs=4, most_segments=4)
    expected, _ = run(TWIN, raw, edits, temperature)
    out, workspace = run(TRITON, raw, edits, temperature, shape)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    peak, mass = workspace.peaks[:, 0], workspace.peaks[:, 1]
    torch.testing.assert_close(peak.amax(1), out.amax(1), rtol=0, atol=0)
    found = peak.amax(1) + (mass * (peak - peak.amax(1, True)).exp().nan_to_num()).sum(1).log()
    torch.testing.assert_close(found, out.logsumexp(1), rtol=1e-5, atol=1e-5)
    raw_peak, raw_mass = workspace.peaks[:, 2], workspace.peaks[:, 3]
    torch.testing.assert_close((raw_mass * raw_peak.exp()).sum(1).log(), raw.logsumexp(1), rtol=1e-5, atol=1e-5)
    assert torch.equal(workspace.chunk_peaks.amax(1), out.amax(1))


@pytest.mark.parametrize("number", [127, 128, 129, 300])
def test_many_biases_reach_their_tokens_in_every_segment(number):
    raw, edits = raw_of(2, 1000), edits_of(2, 1000, biases=number)
    generator = torch.Generator().manual_seed(number)
    edits.bias_tokens[0] = torch.randperm(1000, generator=generator)[:number].sort().values.int()
    edits.bias_tokens[1, : number - 5] = 999
    edits.biases[:] = torch.randn((2, number), generator=generator)
    expected, _ = run(TWIN, raw, edits)
    found, _ = run(TRITON, raw, edits, shape=geometry(1000, lanes=32, runs=4, most_segments=4))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_sampling_behind_the_edits_reads_their_scan_and_gives_raw_logprobs():
    raw, edits = raw_of(4, 1000), random_edits(4, 1000)
    draws = DrawTensors(
        temperature=torch.tensor([1.0, 0.7, 0.0, 1.9]),
        top_k=torch.tensor([0, 30, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.8]),
        min_p=torch.zeros(4),
        seeds=torch.tensor([[5, 6]] * 4),
        positions=torch.arange(4),
    )
    expected, _ = run(TWIN, raw, edits, draws.temperature)
    tokens = TWIN.sample(expected, draws, raw=raw)
    shape = geometry(1000, lanes=32, runs=4, most_segments=4)
    out, workspace = run(TRITON, raw, edits, draws.temperature, shape)
    logprobs = torch.empty(4)
    found = TRITON.sample(out, draws, logprobs=logprobs, raw=raw, workspace=workspace)
    assert torch.equal(found, tokens)
    own = raw.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs, own, rtol=0, atol=1e-5)


@BOTH
def test_drawn_tokens_are_counted_in_the_lines_of_their_rows(ops):
    counts = torch.zeros((3, 50), dtype=torch.int32)
    lines = torch.tensor([2, -1, 0], dtype=torch.int32)
    for tokens in ([4, 5, 49], [4, 4, 0]):
        ops.count_tokens(counts, lines, torch.tensor(tokens))
    expected = torch.zeros((3, 50), dtype=torch.int32)
    expected[2, 4], expected[0, 49], expected[0, 0] = 2, 1, 1
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_bits_survive_packing(vocab):
    tokens = torch.tensor([0, vocab - 1, vocab // 2, vocab - 1])
    expected = torch.zeros(vocab, dtype=torch.bool)
    expected[tokens] = True
    assert torch.equal(unpack_bits(pack_bits(tokens, vocab), vocab), expected)


@pytest.mark.parametrize("module", ["logits", "sample"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_gate_compiles_what_production_launches(module, capability):
    """Tiles, segments and warps of a vocabulary of today, with edits and without, scaled and not."""
    shape = geometry(151_936)
    found = [one for one in specimens(capability, module) if "151936" in one.name]
    assert len(found) >= 3
    for one in found:
        constants = one.constants
        assert constants["SEGMENTS"] == shape.segments, one.name
        assert constants.get("SEGMENT", shape.segment_size) == shape.segment_size
        assert constants.get("LANES", shape.lanes) == shape.lanes
        assert constants.get("CAPACITY", shape.capacity) == shape.capacity
    flags = {one.constants.get("EDITS", one.constants.get("SCALED")) for one in found}
    assert flags == {True, False}
    assert len({dataclasses.replace(one, name="").__repr__() for one in found}) == len(found)
