"""Plain-torch twin of the sampling kernel: thresholds, counter-based noise, one token per row.

Knows logits and numbers per row. Does not know requests, penalties or grammars. A row's token is a function of that
row alone: its logits, its parameters, its seed and its position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PURPOSE_SAMPLE, PURPOSE_ACCEPT, PURPOSE_RESIDUAL = 0, 1, 2
"""Last word of the counter, so that different uses of one position never share a number."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_SPARSE = 8
"""Noise is made for the kept tokens alone where they are fewer than one in so many."""
_FIRST_TRY = 1024
"""Candidates looked at before a whole row is sorted: a nucleus is almost always smaller."""


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """One entry per row of the logits, on their device. Off: temperature 1, top_k 0, top_p 1, min_p 0."""

    temperature: torch.Tensor
    """> 0; greedy rows do not come here."""
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    """`[rows, 2]` int64: the low and the high 32 bits of each seed."""
    positions: torch.Tensor
    """int64: index of the token to be drawn in prompt + output."""


def sample(logits: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """One token per row: scale by temperature, cut to top-k, top-p, min-p, add Gumbel noise, take the largest."""
    scaled = keep_candidates(logits / draws.temperature[:, None], draws)
    rows, tokens = scaled.isfinite().nonzero(as_tuple=True)
    if len(rows) * _SPARSE > scaled.numel():
        return (scaled - dense_noise(draws, scaled.shape[1], PURPOSE_SAMPLE)).argmax(dim=-1)
    noisy = torch.full_like(scaled, float("-inf"))
    noisy[rows, tokens] = scaled[rows, tokens] - sparse_noise(draws, rows, tokens, PURPOSE_SAMPLE)
    return noisy.argmax(dim=-1)


def keep_candidates(scaled: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """-inf for tokens that top-k, top-p or min-p cut away, each on what the one before left, renormalised. Tokens
    equal to the last kept one are kept too."""
    filtered = (draws.top_k > 0) | (draws.top_p < 1.0) | (draws.min_p > 0.0)
    if not bool(filtered.any()):
        return scaled
    rows = filtered.nonzero().squeeze(1)
    part = scaled[rows]
    threshold = _threshold(part, draws.top_k[rows], draws.top_p[rows], draws.min_p[rows])
    scaled = scaled.clone()
    scaled[rows] = part.masked_fill(part < threshold[:, None], float("-inf"))
    return scaled


def _threshold(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The smallest logit that stays in each row."""
    vocab = scaled.shape[1]
    top_k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    values, enough = _largest(scaled, top_k, top_p)
    if not enough:
        values = scaled.sort(dim=-1, descending=True).values
    last = values.gather(1, (top_k.clamp(max=values.shape[1]) - 1)[:, None])
    # Ties with the k-th are inside; what the k best (with ties) do not hold carries no mass from here on.
    inside = scaled >= last
    cut = (top_k < vocab)[:, None]
    mass = torch.where(cut & ~inside, float("-inf"), scaled).logsumexp(dim=-1, keepdim=True)
    probs = torch.where(cut & (values < last), 0.0, (values - mass).exp())
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs  # near 1 float32 is too coarse
    in_nucleus = (before < top_p[:, None]) | (top_p >= 1.0)[:, None]
    in_nucleus[:, 0] = True
    in_nucleus &= values >= last
    number = in_nucleus.sum(dim=-1, keepdim=True)
    threshold = values.gather(1, number - 1)
    threshold = torch.where((top_p >= 1.0)[:, None] & ~cut, scaled.amin(-1, True), threshold)
    # min-p compares with the largest probability: the normalisation cancels.
    floor = torch.where(min_p > 0, values[:, 0] + min_p.log(), float("-inf"))
    return torch.maximum(threshold.squeeze(1), floor)


def _largest(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """The first candidates of each row in falling order, and whether every threshold lies among them."""
    vocab = scaled.shape[1]
    values = scaled.topk(min(vocab, _FIRST_TRY), dim=-1).values
    if values.shape[1] == vocab:
        return values, True
    mass = (values - scaled.logsumexp(dim=-1, keepdim=True)).exp().sum(dim=-1)
    by_k = top_k <= values.shape[1]
    by_p = (mass >= top_p) | (top_p >= 1.0)
    return values, bool((by_k | ((top_k >= vocab) & by_p)).all())


def dense_noise(draws: DrawTensors, vocab: int, purpose: int) -> torch.Tensor:
    """log of standard exponential noise, `[rows, vocab]`, keyed by (seed, position, token, purpose)."""
    quads = torch.arange((vocab + 3) // 4, device=draws.seeds.device)[None, :]
    words = _quad_words(draws.seeds[:, None], draws.positions[:, None], quads, purpose)
    return _log_exponential(words.view(len(draws.seeds), -1)[:, :vocab])


def sparse_noise(
    draws: DrawTensors, rows: torch.Tensor, tokens: torch.Tensor, purpose: int
) -> torch.Tensor:
    """The same noise of some (row, token) pairs only."""
    words = _quad_words(draws.seeds[rows], draws.positions[rows], tokens // 4, purpose)
    return _log_exponential(words.gather(-1, (tokens % 4)[:, None]).squeeze(-1))


def _quad_words(
    seeds: torch.Tensor, positions: torch.Tensor, quads: torch.Tensor, purpose: int
) -> torch.Tensor:
    """`[..., 4]`: the words of four neighbouring tokens. Counter (position, quad, purpose, 0), key the seed."""
    counter = (positions, quads, torch.full_like(quads, purpose), torch.zeros_like(quads))
    return torch.stack(philox4x32(counter, (seeds[..., 0], seeds[..., 1])), dim=-1)


def _log_exponential(integers: torch.Tensor) -> torch.Tensor:
    uniform = (integers.float() + 0.5) * 2.0**-32
    # float32 rounds the last 128 integers up to 1, whose logarithm would put an infinity into the noise.
    uniform = uniform.clamp(max=_LARGEST_BELOW_ONE)
    small = uniform + 0.5 * uniform * uniform
    return torch.where(uniform < 2.0**-10, small, -torch.log(1.0 - uniform)).log()


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox4x32-10. Words are int64 tensors below 2**32 that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product wraps in int64; its bits are those of the unsigned one, so shift and mask give its halves.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _LOW32) ^ c1 ^ k0,
            product1 & _LOW32,
            ((product0 >> 32) & _LOW32) ^ c3 ^ k1,
            product0 & _LOW32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return c0, c1, c2, c3
