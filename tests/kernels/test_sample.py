"""The sampling kernel in the interpreter: what it keeps against a sort in float64, its noise bit for bit, its draws
against the twin's and against probabilities."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from guarded import Guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sorted_sampling import kept_by_sorting
from transformers import TopPLogitsWarper

from kernels import dispatch
from kernels.arguments.draws import DrawTensors, Workspace, geometry
from kernels.reference import sample as reference
from kernels.triton.sampling import logits, noise

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"sample", "verify"})
SMALL = geometry(1000, lanes=32, runs=4, most_segments=4)
"""Several segments and overflowing lists already at a thousand tokens."""
FILTERS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.1),
    (20, 0.9, 0.0),
    (50, 0.8, 0.02),
    (0, 0.995, 0.0),
    (0, 0.9, 0.05),
    (700, 0.99, 0.0),
    (10**6, 0.5, 0.0),
    (0, 0.0, 0.0),
    (1, 1.0, 0.0),
]


def draws(
    num_rows: int,
    filters: tuple[int, float, float] = (0, 1.0, 0.0),
    temperature: float = 1.0,
    seed: int = 7,
    first_position: int = 0,
) -> DrawTensors:
    top_k, top_p, min_p = filters
    return DrawTensors(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seeds=torch.tensor([[seed & 0xFFFFFFFF, seed >> 32]] * num_rows),
        positions=torch.arange(first_position, first_position + num_rows),
    )


def joined(parts: list[DrawTensors]) -> DrawTensors:
    names = [field.name for field in dataclasses.fields(DrawTensors)]
    return DrawTensors(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def row_of(tensors: DrawTensors, row: int) -> DrawTensors:
    names = [field.name for field in dataclasses.fields(DrawTensors)]
    return DrawTensors(*(getattr(tensors, name)[row : row + 1] for name in names))


def rows_of(vocab: int, seed: int = 0) -> torch.Tensor:
    """Flat, usual and peaked rows, some with many equal logits."""
    generator = torch.Generator().manual_seed(1000 * seed + vocab)
    rows = torch.randn((5, vocab), generator=generator)
    rows = rows * torch.tensor([[0.1], [1.0], [3.0], [8.0], [2.0]])
    rows[4] = (rows[4] * 2).round() / 2
    return rows


def run(rows: torch.Tensor, tensors: DrawTensors, shape=SMALL) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, logprobs and thresholds of the kernel, with poisoned buffers."""
    workspace = Workspace.create(len(rows), shape, CPU)
    for field in dataclasses.fields(Workspace)[1:]:
        buffer = getattr(workspace, field.name)
        buffer.fill_(float("nan") if buffer.is_floating_point() else 10**9)
    tokens = Guarded((len(rows),), torch.int64)
    logprobs = Guarded((len(rows),), torch.float32)
    TRITON.sample(rows, tensors, tokens.tensor, logprobs.tensor, workspace=workspace)
    tokens.check()
    logprobs.check()
    return tokens.tensor, logprobs.tensor, workspace.bounds


def assert_keeps(row: torch.Tensor, lowest: float, filters: tuple[int, float, float]) -> None:
    """The kept set is that of the sort, but for tokens at which the mass is p to a millionth."""
    expected = kept_by_sorting(row, *filters)
    kept = (row >= lowest) & row.isfinite()
    if torch.equal(kept, expected):
        return
    top_k, top_p, min_p = filters
    near = [kept_by_sorting(row, top_k, top_p * (1 + sign * 1e-6), min_p * (1 - sign * 1e-6)) for sign in (-1, 1)]
    assert bool((near[0] <= kept).all() and (kept <= near[1]).all()), filters


@pytest.mark.parametrize(
    ("vocab", "chosen", "filters"), [(1, [1], FILTERS[1:4]), (17, [2], FILTERS[1:]), (1000, [1, 4], FILTERS[1:])]
)
def test_what_is_kept_is_what_a_sort_keeps(vocab, chosen, filters):
    rows = rows_of(vocab)[chosen]
    tensors = joined([draws(len(rows), one) for one in filters])
    _, _, lowest = run(rows.repeat(len(filters), 1), tensors)
    for index, one in enumerate(filters):
        if 0 < one[0] < vocab or one[1] < 1 or one[2] > 0:
            for row in range(len(rows)):
                assert_keeps(rows[row], float(lowest[index * len(rows) + row]), one)


@pytest.mark.parametrize("filters", [(0, 0.9, 0.0), (900, 0.95, 0.0)])
def test_a_row_with_more_candidates_than_places_is_searched_as_a_whole(filters):
    rows = rows_of(1000)[:2]
    shape = dataclasses.replace(SMALL, capacity=16)
    tokens, _, lowest = run(rows, draws(2, filters), shape)
    assert torch.equal(tokens, TWIN.sample(rows, draws(2, filters)))
    for row in range(2):
        assert int((rows[row] >= lowest[row]).sum()) > 16 * shape.segments
        assert_keeps(rows[row], float(lowest[row]), filters)


def test_tokens_equal_to_the_last_kept_one_are_kept():
    ties = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]] * 2)
    zeros = torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0, -1.0]])
    rows = torch.cat((ties, zeros))
    tensors = joined([draws(1, (2, 1.0, 0.0)), draws(1, (0, 0.5, 0.0)), draws(1, (2, 1.0, 0.0))])
    _, _, lowest = run(rows, tensors)
    assert lowest.tolist() == [2.0, 2.0, 0.0]


@pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
def test_rows_that_are_all_equal_or_almost_all_banned_draw_what_is_allowed(ops):
    filters = [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.5), (2, 0.9, 0.1)]
    for banned in (0, 199, 200):
        row = torch.full((200,), -1.5)
        row[:banned] = float("-inf")
        rows = row.repeat(len(filters) + 1, 1)
        tensors = joined([*(draws(1, one) for one in filters), draws(1, temperature=0.0)])
        tokens = ops.sample(rows, tensors)
        if banned == 200:
            assert tokens.tolist() == [0] * 6
        elif banned == 199:
            assert tokens.tolist() == [199] * 6
        else:
            assert bool(((tokens >= 0) & (tokens < 200)).all())
            assert len(set(tokens[:5].tolist())) == 1  # the same noise over the same kept set


NEAR_ONE = [1 - 2.0**-24, 1 - 2.0**-22, 0.99999, 0.9999]


@pytest.mark.parametrize("ops", ["twin", "triton"])
@pytest.mark.parametrize("top_p", NEAR_ONE)
def test_a_nucleus_of_almost_everything_is_exact(ops, top_p):
    """Probabilities of the tail are far below what float32 resolves beside 1: 2**-20 and less."""
    tail = -torch.linspace(11.0, 24.0, 60)
    rows = torch.cat((torch.tensor([0.0, -0.5, -3.0]), tail)).repeat(2, 1)
    rows[1, :3] = torch.tensor([9.0, 1.0, -1.0])
    filters = (0, top_p, 0.0)
    for row in range(2):
        expected = kept_by_sorting(rows[row], 0, float(torch.tensor(top_p)))
        if ops == "twin":
            kept = reference.keep_candidates(rows, draws(2, filters))[row].isfinite()
        else:
            _, _, lowest = run(rows, draws(2, filters))
            kept = rows[row] >= lowest[row]
        assert 1 < int(expected.sum()) <= 63
        assert torch.equal(kept, expected)


def test_a_nucleus_of_almost_everything_is_that_of_transformers():
    """A flat row, where a sum of float32 from the largest on would be off by more than what is cut: the twin and
    transformers differ by the tokens only at which float32's own sum of the tail is off."""
    rows = rows_of(3000)[:4]
    for top_p in NEAR_ONE:
        expected = TopPLogitsWarper(top_p)(None, rows).isfinite()
        kept = reference.keep_candidates(rows, draws(4, (0, top_p, 0.0))).isfinite()
        by_sort = torch.stack([kept_by_sorting(row, 0, float(torch.tensor(top_p))) for row in rows])
        assert int((kept != by_sort).sum()) == 0
        assert int((kept != expected).sum()) <= 4


@triton.jit
def _philox_words(out, counters, keys, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    c0 = tl.load(counters + place).to(tl.uint32)
    c1 = tl.load(counters + SIZE + place).to(tl.uint32)
    c2 = tl.load(counters + 2 * SIZE + place).to(tl.uint32)
    c3 = tl.load(counters + 3 * SIZE + place).to(tl.uint32)
    k0 = tl.load(keys + place).to(tl.uint32)
    k1 = tl.load(keys + SIZE + place).to(tl.uint32)
    w0, w1, w2, w3 = noise.philox(c0, c1, c2, c3, k0, k1)
    tl.store(out + place, w0.to(tl.int64))
    tl.store(out + SIZE + place, w1.to(tl.int64))
    tl.store(out + 2 * SIZE + place, w2.to(tl.int64))
    tl.store(out + 3 * SIZE + place, w3.to(tl.int64))


def test_philox_words_are_those_of_the_twin():
    generator = torch.Generator().manual_seed(5)
    counters = torch.randint(0, 2**32, (4, 1024), generator=generator)
    keys = torch.randint(0, 2**32, (2, 1024), generator=generator)
    counters[:, :4] = torch.tensor([0, 1, 2**31, 2**32 - 1])
    out = torch.empty_like(counters)
    _philox_words[(1,)](out, counters, keys, SIZE=1024)
    assert torch.equal(out, torch.stack(reference.philox4x32(tuple(counters), tuple(keys))))


def assert_same_tokens(found: torch.Tensor, expected: torch.Tensor, scaled: torch.Tensor, tensors: DrawTensors) -> None:
    """Equal, but where the best two noisy logits are nearer than 1e-5: `log` differs in its last bits."""
    for row in (found != expected).nonzero().squeeze(1).tolist():
        one = row_of(tensors, row)
        noise = reference.dense_noise(one, scaled.shape[1], reference.PURPOSE_SAMPLE)
        best = (reference.keep_candidates(scaled[row : row + 1], one) - noise).topk(2).values[0]
        assert float(best[0] - best[1]) < 1e-5, row


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_and_logprobs_are_those_of_the_twin(temperature):
    rows = rows_of(1000, seed=3)[1:3].repeat(4, 1)
    kinds = [(0, 1.0, 0.0), (20, 1.0, 0.0), (40, 0.9, 0.0), (0, 0.8, 0.05)]
    tensors = joined([draws(2, kind, temperature, 2**63 + 5, 50 * index) for index, kind in enumerate(kinds)])
    tokens, logprobs, _ = run(rows, tensors)
    expected = torch.empty(8)
    twin = TWIN.sample(rows, tensors, logprobs=expected)
    assert_same_tokens(tokens, twin, rows / (temperature or 1.0), tensors)
    own = rows.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert float((logprobs - own).abs().max()) < 1e-5
    assert float((expected - own)[tokens == twin].abs().max()) < 1e-5


@pytest.mark.rest
def test_a_real_vocabulary_draws_what_the_twin_draws():
    """One row of each kind, at the size and the configuration of production."""
    rows = rows_of(151_936)[2:4]
    shape = logits.select(151_936)
    tensors = joined([draws(1, (50, 0.9, 0.0), 0.8), draws(1, (0, 0.95, 0.0), 1.0)])
    tokens, _, lowest = run(rows, tensors, shape)
    scaled = rows / tensors.temperature[:, None]
    assert_same_tokens(tokens, TWIN.sample(rows, tensors), scaled, tensors)
    assert_keeps(scaled[0], float(lowest[0]), (50, 0.9, 0.0))
    assert_keeps(scaled[1], float(lowest[1]), (0, 0.95, 0.0))


@pytest.mark.rest
def test_draws_follow_the_probabilities():
    """Chi-square at the 1 in 10,000 level with a fixed seed, over positions as a sequence would have them. Few draws,
    for the interpreter; a GPU draws many (tests/gpu), and the twin, whose tokens these are, too."""
    number = 120
    row = torch.tensor([0.8, 0.3, -0.4, 0.1])
    shape = geometry(4, lanes=8, runs=2)
    tokens, _, _ = run(row.repeat(number, 1), draws(number, temperature=1.2, seed=2**62 + 3), shape)
    expected = (row.double() / 1.2).softmax(-1) * number
    statistic = float(((torch.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum())
    assert statistic < 21.1


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    rows = rows_of(300, seed=9)
    kinds = [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (30, 0.5, 0.1)]
    tensors = joined([draws(1, kind, 0.9, 11, 3 * i) for i, kind in enumerate(kinds)])
    together, logprobs, lowest = run(rows, tensors)
    for row in range(5):
        alone = run(rows[row : row + 1], row_of(tensors, row))
        assert alone[0][0] == together[row]
        assert alone[1][0] == logprobs[row]
        assert row == 0 or alone[2][0] == lowest[row]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a row without any finite value; a GPU computes it in silence
@settings(max_examples=10, deadline=None)
@given(
    vocab=st.integers(1, 700),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
    steps=st.sampled_from([1, 4, 1000]),
    seed=st.integers(0, 99),
)
@example(vocab=1, top_k=0, top_p=1.0, min_p=0.0, steps=1, seed=1)
def test_any_row_keeps_what_a_sort_keeps(vocab, top_k, top_p, min_p, steps, seed):
    """`steps`: how many values lie between two integers; few make many ties."""
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn((1, vocab), generator=generator) * 2 * steps).round() / steps
    rows[0, torch.rand(vocab, generator=generator) < 0.2] = float("-inf")
    filters = (top_k, top_p, min_p)
    tensors = draws(1, filters, seed=seed)
    tokens, _, lowest = run(rows, tensors)
    if (0 < top_k < vocab or top_p < 1 or min_p > 0) and bool(rows.isfinite().any()):
        assert_keeps(rows[0], float(lowest[0]), filters)
    assert_same_tokens(tokens, TWIN.sample(rows, tensors), rows, tensors)


@pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
@pytest.mark.parametrize("most", [1, 3, 7])
def test_proposals_are_accepted_up_to_the_first_that_differs(ops, most):
    generator = torch.Generator().manual_seed(most)
    found = torch.randint(0, 2, (40, most + 1), generator=generator)
    proposals = torch.randint(0, 2, (40, most), generator=generator)
    numbers = torch.randint(0, most + 1, (40,), generator=generator).to(torch.int32)
    proposals[0], numbers[0] = found[0, :-1], most
    accepted, following = Guarded((40,), torch.int32), Guarded((40,), torch.int64)
    ops.verify(accepted.tensor, following.tensor, found, proposals, numbers)
    accepted.check()
    following.check()
    for row in range(40):
        count = 0
        while count < numbers[row] and found[row, count] == proposals[row, count]:
            count += 1
        assert accepted.tensor[row] == count
        assert following.tensor[row] == found[row, count]
    assert int(accepted.tensor.max()) == most


@pytest.mark.parametrize("vocab", [1, 17, 2049, 32_000, 50_257, 128_256, 151_936, 262_144])
def test_every_vocabulary_is_cut_so_that_no_token_is_left_out(vocab):
    shape = logits.select(vocab)
    assert shape.segments * shape.segment_size >= vocab
    assert shape.segment_size % (shape.runs * shape.lanes) == 0
    assert shape.segments & (shape.segments - 1) == 0
    assert (shape.runs, shape.lanes, shape.chunks, shape.capacity) == (4, 512, 256, 256)
    assert shape.segments in {1, 2, 4, 8}
