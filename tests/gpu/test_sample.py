"""Compiled sampling draws what its twin draws, keeps what a sort keeps, and does so in a captured graph."""

from __future__ import annotations

import pytest
import torch
from sorted_sampling import kept_by_sorting
from token_bits import pack_bits

from kernels import dispatch
from kernels.arguments.draws import NO_TOKEN, DrawTensors, EditTensors, num_words
from kernels.reference.sample import PURPOSE_SAMPLE, dense_noise

CUDA = torch.device("cuda")
VOCAB = 151_936
KINDS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.8, 50, 0.9, 0.0),
    (0.7, 0, 0.95, 0.0),
    (1.3, 0, 1.0, 0.05),
    (1.0, 1000, 1.0, 0.0),
    (1.0, 5000, 0.99, 0.0),
    (1.0, 20, 0.8, 0.1),
]


def draws(rows: int, kinds: list[tuple[float, int, float, float]]) -> DrawTensors:
    chosen = [kinds[row % len(kinds)] for row in range(rows)]

    def column(index: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([kind[index] for kind in chosen], dtype=dtype, device=CUDA)

    return DrawTensors(
        temperature=column(0, torch.float32),
        top_k=column(1, torch.int64),
        top_p=column(2, torch.float32),
        min_p=column(3, torch.float32),
        seeds=torch.tensor([[row, 2**31 + row] for row in range(rows)], device=CUDA),
        positions=torch.arange(rows, device=CUDA) * 7,
    )


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(rows + vocab)
    scale = torch.tensor([1.0, 2.0, 4.0], device=CUDA)[torch.arange(rows, device=CUDA) % 3]
    return torch.randn((rows, vocab), device=CUDA, generator=generator) * scale[:, None]


def assert_drawn(tokens: torch.Tensor, raw: torch.Tensor, tensors: DrawTensors) -> None:
    """The token is the best noisy one of what a sort keeps, but for scores nearer than 1e-4, or tokens at the edge."""
    noise = dense_noise(tensors, raw.shape[1], PURPOSE_SAMPLE)
    for row, token in enumerate(tokens.tolist()):
        temperature = float(tensors.temperature[row])
        if temperature == 0.0:
            assert raw[row, token] == raw[row].max()
            continue
        scaled = raw[row] / temperature
        filters = (int(tensors.top_k[row]), float(tensors.top_p[row]), float(tensors.min_p[row]))
        scores = (scaled - noise[row]).masked_fill(~kept_by_sorting(scaled, *filters), -torch.inf)
        best = int(scores.argmax())
        near = float(scores[best] - (scaled - noise[row])[token]) < 1e-4
        assert token == best or (near and abs(float(scaled[token] - scaled[best])) < 20), row


@pytest.mark.parametrize("vocab", [1, 17, 1000, 32_000, 50_257, VOCAB])
def test_tokens_are_the_best_noisy_ones_of_what_a_sort_keeps(vocab):
    ops = dispatch.choose(CUDA)
    raw, tensors = logits_of(24, vocab), draws(24, KINDS)
    logprobs = torch.full((24,), float("nan"), device=CUDA)
    tokens = ops.sample(raw, tensors, logprobs=logprobs)
    assert_drawn(tokens, raw, tensors)
    own = raw.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), own, rtol=0, atol=1e-4)


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    ops = dispatch.choose(CUDA)
    raw, tensors = logits_of(24, VOCAB), draws(24, KINDS)
    together = ops.sample(raw, tensors)
    for row in range(24):
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        alone = DrawTensors(*(getattr(tensors, name)[row : row + 1] for name in names))
        assert ops.sample(raw[row : row + 1], alone)[0] == together[row]


def test_draws_follow_the_probabilities():
    """Chi-square at the 1 in 10,000 level over 200,000 rows."""
    ops, number = dispatch.choose(CUDA), 200_000
    row = torch.tensor([1.7, 0.3, -0.4, 1.1, 0.9, -1.5, 0.0, 0.5], device=CUDA)
    for kind in ((1.2, 0, 1.0, 0.0), (1.2, 4, 1.0, 0.0), (1.2, 0, 0.8, 0.0), (1.2, 0, 1.0, 0.15)):
        tensors = draws(number, [kind])
        tokens = ops.sample(row.expand(number, -1).contiguous(), tensors)
        kept = kept_by_sorting(row / 1.2, *kind[1:])
        expected = (row.double() / 1.2).masked_fill(~kept, -torch.inf).softmax(-1) * number
        found = torch.bincount(tokens, minlength=8)
        assert bool((found[~kept] == 0).all())
        statistic = float(((found - expected) ** 2 / expected)[kept].sum())
        critical = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}
        assert statistic < critical[int(kept.sum()) - 1], kind


def edits_of(rows: int, vocab: int) -> EditTensors:
    generator = torch.Generator().manual_seed(rows)
    words = num_words(vocab)
    tokens = torch.randint(0, vocab, (rows, 40), generator=generator).sort(dim=1).values.int()
    tokens[:, 30:] = NO_TOKEN
    prompt = torch.stack([pack_bits(torch.randint(0, vocab, (500,), generator=generator), vocab) for _ in range(rows)])
    edits = EditTensors(
        penalty_lines=torch.arange(rows, dtype=torch.int32) - 1,
        repetition=torch.full((rows,), 1.2),
        frequency=torch.full((rows,), 0.3),
        presence=torch.full((rows,), 0.1),
        prompt_bits=prompt,
        counts=(torch.rand((rows, vocab), generator=generator) < 0.01).int(),
        bias_tokens=tokens,
        biases=torch.randn((rows, 40), generator=generator),
        mask_lines=torch.arange(rows, dtype=torch.int32) // 2 - 1,
        mask_bits=torch.randint(-(2**31), 2**31, (rows, words), generator=generator).int(),
    )
    names = EditTensors.__slots__
    return EditTensors(*(getattr(edits, name).to(CUDA) for name in names))


@pytest.mark.parametrize("vocab", [17, 1000, 50_257, VOCAB])
def test_edits_equal_their_twin(vocab):
    ops, twin = dispatch.choose(CUDA), dispatch.choose(CUDA, ())
    raw, edits, tensors = logits_of(8, vocab), edits_of(8, vocab), draws(8, KINDS)
    found, expected = torch.full_like(raw, float("nan")), torch.empty_like(raw)
    workspace = ops.sample_workspace(8, vocab)
    ops.logits(found, raw, edits, tensors.temperature, workspace)
    twin.logits(expected, raw, edits, tensors.temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    tokens = ops.sample(found, tensors, raw=raw, workspace=workspace)
    assert torch.equal(tokens, twin.sample(found, tensors, raw=raw))


def test_a_captured_sampler_follows_its_inputs():
    """Edits, draw, count and verification in one graph: new logits and positions, the same buffers."""
    ops, rows = dispatch.choose(CUDA), 8
    raw, edits, tensors = logits_of(rows, VOCAB), edits_of(rows, VOCAB), draws(rows, KINDS)
    workspace = ops.sample_workspace(rows, VOCAB)
    edited, counts = torch.empty_like(raw), edits.counts.clone()
    tokens = torch.empty(rows, dtype=torch.int64, device=CUDA)
    logprobs = torch.empty(rows, device=CUDA)
    accepted = torch.empty(2, dtype=torch.int32, device=CUDA)
    following = torch.empty(2, dtype=torch.int64, device=CUDA)
    proposals = torch.zeros((2, 3), dtype=torch.int64, device=CUDA)
    numbers = torch.tensor([3, 0], dtype=torch.int32, device=CUDA)

    def step() -> None:
        ops.logits(edited, raw, edits, tensors.temperature, workspace)
        ops.sample(edited, tensors, tokens, logprobs, raw, workspace)
        ops.count_tokens(edits.counts, edits.penalty_lines, tokens)
        ops.verify(accepted, following, tokens.view(2, 4), proposals, numbers)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for turn in range(3):
        raw.copy_(logits_of(rows, VOCAB).roll(turn + 1, 0))
        tensors.positions.add_(1)
        edits.counts.copy_(counts)
        step()
        expected = [tensor.clone() for tensor in (tokens, logprobs, accepted, following)]
        edits.counts.copy_(counts)
        for tensor in (tokens, logprobs, accepted, following):
            tensor.fill_(-7)
        graph.replay()
        torch.cuda.synchronize()
        for found, wanted in zip((tokens, logprobs, accepted, following), expected, strict=True):
            assert torch.equal(found, wanted)
        assert int(edits.counts.sum() - counts.sum()) == rows - 1
