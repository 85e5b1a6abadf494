"""The twin of the sampling kernel: Philox against published vectors, thresholds against a sort, draws against
probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernels.arguments.draws import DrawTensors
from kernels.reference.sample import PURPOSE_SAMPLE, dense_noise, keep_candidates, philox4x32, sample, sparse_noise


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draws(
    num_rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 7,
    first_position: int = 0,
) -> DrawTensors:
    return DrawTensors(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seeds=torch.tensor([[seed & 0xFFFFFFFF, seed >> 32]] * num_rows),
        positions=torch.arange(first_position, first_position + num_rows),
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Known-answer vectors of Random123 for philox4x32 with ten rounds."""
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))
    assert tuple(int(word) for word in words) == expected


def test_noise_of_a_token_is_its_word_of_its_quad() -> None:
    """Counter (position, quad, purpose, 0), key (seed low, seed high): the layout every kernel has to keep."""
    seed, position, token = 0x1234567_89ABCDEF, 41, 10
    tensors = draws(1, seed=seed, first_position=position)
    noise = dense_noise(tensors, 16, 1)
    counter = (position, token // 4, 1, 0)
    words = philox4x32(
        tuple(torch.tensor(word) for word in counter), (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
    )
    uniform = (int(words[token % 4]) + 0.5) * 2.0**-32
    assert noise[0, token].item() == pytest.approx(math.log(-math.log1p(-uniform)), rel=1e-5)


def test_noise_of_few_tokens_is_that_of_the_whole_row() -> None:
    tensors = draws(3, seed=2**50 + 1, first_position=8)
    rows, tokens = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 5, 18, 16])
    whole = dense_noise(tensors, 19, PURPOSE_SAMPLE)
    assert torch.equal(sparse_noise(tensors, rows, tokens, PURPOSE_SAMPLE), whole[rows, tokens])


def test_noise_is_finite_and_exponential_in_the_mean() -> None:
    tensors = draws(64)
    noise = dense_noise(tensors, 4096, PURPOSE_SAMPLE)
    assert bool(noise.isfinite().all())
    exponential = noise.double().exp()
    assert exponential.mean().item() == pytest.approx(1.0, abs=0.01)
    assert exponential.var().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("vocab", [1, 17, 300, 3000])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.1),
        (20, 0.9, 0.0),
        (50, 0.8, 0.02),
        (0, 0.995, 0.0),
        (2000, 0.99, 0.0),
        (10**6, 0.5, 0.0),
        (0, 0.0, 0.0),
        (1, 1.0, 0.0),
    ],
)
def test_kept_tokens_are_those_of_the_transformers_warpers_in_their_order(
    vocab: int, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((6, vocab), generator=generator) * torch.tensor([[0.1], [1], [2], [4], [8], [3]])
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        # transformers refuses 0; the smallest positive number keeps the same single token.
        expected = TopPLogitsWarper(top_p or 1e-30)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    kept = keep_candidates(logits, draws(6, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(kept, expected)


def test_tokens_equal_to_the_last_kept_one_are_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    by_k = keep_candidates(logits, draws(1, top_k=2)).isfinite()
    assert by_k.tolist() == [[True, False, True, True, True, False]]
    by_p = keep_candidates(logits, draws(1, top_p=0.5)).isfinite()
    assert by_p.tolist() == [[True, False, True, True, True, False]]


def test_a_nucleus_behind_the_first_candidates_is_found() -> None:
    """A flat row needs more than the candidates that are looked at first."""
    logits = torch.linspace(0, 0.1, 5000)[None]
    kept = keep_candidates(logits, draws(1, top_p=0.9))
    assert torch.equal(kept, TopPLogitsWarper(0.9)(None, logits))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.3, 4, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.15)],
)
def test_draws_follow_the_probabilities(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Chi-square at the 1 in 10,000 level with a fixed seed, over positions as a sequence would have them."""
    number = 10_000
    logits = torch.tensor([1.7, 0.3, -0.4, 1.1, 0.9, -1.5, 0.0, 0.5])
    rows = logits.expand(number, -1)
    tokens = sample(rows, draws(number, temperature, top_k, top_p, min_p, seed=2**63 + 11))
    kept = keep_candidates((logits / temperature)[None], draws(1, temperature, top_k, top_p, min_p))[0]
    expected = kept.double().softmax(-1) * number
    found = torch.bincount(tokens, minlength=8).double()
    possible = expected > 0
    assert bool((found[~possible] == 0).all())
    statistic = ((found - expected) ** 2 / expected)[possible].sum().item()
    critical = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}
    assert statistic < critical[int(possible.sum()) - 1]


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    logits = torch.randn((9, 257), generator=torch.Generator().manual_seed(3))
    tensors = draws(9, temperature=0.9, top_p=0.95, first_position=100)
    together = sample(logits, tensors)
    for row in (0, 4, 8):
        alone = draws(1, temperature=0.9, top_p=0.95, first_position=100 + row)
        assert sample(logits[row : row + 1], alone)[0] == together[row]


def test_seed_position_and_purpose_each_change_the_noise() -> None:
    def noise(seed: int, position: int, purpose: int) -> torch.Tensor:
        tensors = draws(1, seed=seed, first_position=position)
        return dense_noise(tensors, 64, purpose)

    base = noise(1, 1, PURPOSE_SAMPLE)
    assert torch.equal(base, noise(1, 1, PURPOSE_SAMPLE))
    for other in (noise(2, 1, 0), noise(1 + 2**40, 1, 0), noise(1, 2, 0), noise(1, 1, 1)):
        assert not bool((base == other).any())
