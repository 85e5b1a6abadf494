"""Plain-torch twins of `kernels.triton.sampling.sample`: thresholds, counter-based noise, one token per row; and the
verification of proposed tokens.

It knows logits and numbers per row. It does not know requests, penalties or grammars. A row's token is a function of
that row alone: its logits, its parameters, its seed and its position.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch

from kernels.arguments.draws import COLDEST, DrawTensors, Workspace

PURPOSE_SAMPLE = 0
"""The last word of the counter, so that different uses of one position never share a number."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_SPARSE = 8
"""Noise is computed for the kept tokens alone if they are fewer than one in this number."""
_ROWS_OF = 2**18
"""Number of logits that are processed at once: their integers of noise fit into a core's cache."""
_CHUNKS = 2048
"""Number of chunks of a row's tokens; their largest logits bound the thresholds."""
_MARGIN = 1e-6
"""Relative error of sums that only bound a threshold."""


def sample(
    logits: torch.Tensor,
    draws: DrawTensors,
    tokens: torch.Tensor | None = None,
    logprobs: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Draws one token per row, int64: scales by temperature, cuts to top-k, top-p, min-p, adds Gumbel noise, and takes
    the largest. A greedy row takes its largest logit, a row without a finite logit token 0.

    `logits`: `[rows, vocab]` float32, not changed. `tokens` `[rows]` receives the tokens; None means that it is
    allocated here. `logprobs` `[rows]` float32 receives the log-softmax of the raw logits at the token; None means that
    it is not computed. `raw`: the logits before the op `logits`, if `logits` is its output (divided by temperature
    already) and `workspace` holds its sums; None means that `logits` are raw. `workspace` is for the compiled kernel,
    which allocates one if it is None.
    """
    greedy = draws.temperature < COLDEST
    tokens = torch.empty_like(draws.positions) if tokens is None else tokens
    if bool(greedy.any()):
        tokens.copy_(logits.argmax(dim=-1))
    for rows in (~greedy).nonzero().squeeze(1).split(max(1, _ROWS_OF // logits.shape[1])):
        part, drawn = logits[rows], _rows_of(draws, rows)
        tokens[rows] = _draw(part if raw is not None else part / drawn.temperature[:, None], drawn)
    if logprobs is not None:
        source = logits if raw is None else raw
        own = source.gather(1, tokens[:, None]).squeeze(1)
        logprobs.copy_(own - source.logsumexp(dim=-1))
    return tokens


def _rows_of(draws: DrawTensors, rows: torch.Tensor) -> DrawTensors:
    return DrawTensors(*(getattr(draws, field.name)[rows] for field in fields(draws)))


def _draw(scaled: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    scaled = keep_candidates(scaled, draws)
    rows, tokens = scaled.isfinite().nonzero(as_tuple=True)
    if len(rows) * _SPARSE > scaled.numel():
        return (scaled - dense_noise(draws, scaled.shape[1], PURPOSE_SAMPLE)).argmax(dim=-1)
    noisy = torch.full_like(scaled, float("-inf"))
    noisy[rows, tokens] = scaled[rows, tokens] - sparse_noise(draws, rows, tokens, PURPOSE_SAMPLE)
    return noisy.argmax(dim=-1)


def keep_candidates(scaled: torch.Tensor, draws: DrawTensors) -> torch.Tensor:
    """Returns the logits with -inf for tokens that top-k, top-p or min-p cut; each acts on the tokens that the one
    before kept, renormalised. Tokens equal to the last kept one are kept too."""
    filtered = (draws.top_k > 0) | (draws.top_p < 1.0) | (draws.min_p > 0.0)
    if not bool(filtered.any()):
        return scaled
    scaled = scaled.clone()
    for row in filtered.nonzero().squeeze(1).tolist():
        threshold = _threshold(scaled[row], int(draws.top_k[row]), float(draws.top_p[row]), float(draws.min_p[row]))
        scaled[row].masked_fill_(scaled[row] < threshold, float("-inf"))
    return scaled


def _threshold(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> float:
    """Returns the smallest logit that is kept. Only the few that are not below a bound are sorted."""
    peak = float(row.max())
    if peak == -math.inf:
        return -math.inf
    by_k = 0 < top_k < len(row)
    floor = peak + math.log(min_p) if min_p > 0 else -math.inf
    threshold = -math.inf
    if by_k or top_p < 1.0:
        # Sums are in float64: near p = 1, float32 cannot represent the share of one token.
        weights = (row - peak).exp()
        total = float(weights.sum(dtype=torch.float64))
        bound = _bound_by_k(row, top_k) if by_k else _bound_by_p(row, peak, top_p, total)
        inside = (row >= bound).nonzero().squeeze(1)
        best, order = row[inside].sort(descending=True)
        mass = weights[inside[order]].double()
        if by_k:
            best = best[best >= best[min(top_k, len(best)) - 1]]
            mass = mass[: len(best)]
            total = float(mass.sum())
        threshold = float(best[-1])
        if top_p < 1.0:
            before = mass.cumsum(0) - mass
            threshold = float(best[max(1, int((before < top_p * total).sum())) - 1])
    # min-p compares with the largest probability: the normalisation cancels.
    return max(threshold, floor)


def _chunk_peaks(row: torch.Tensor) -> torch.Tensor:
    """Returns the largest logit of each chunk, in falling order; empty if the row is short."""
    deep = len(row) // _CHUNKS
    chunks = row[: deep * _CHUNKS].view(deep, _CHUNKS)
    return chunks.amax(dim=0).sort(descending=True).values if deep > 1 else row[:0]


def _bound_by_k(row: torch.Tensor, top_k: int) -> float:
    """Returns a lower bound of the k-th largest logit: the k-th largest of some logits is not above that of all."""
    peaks = _chunk_peaks(row)
    return float(peaks[top_k - 1]) if top_k <= len(peaks) else -math.inf


def _bound_by_p(row: torch.Tensor, peak: float, top_p: float, total: float) -> float:
    """Returns a lower bound of the smallest logit that top-p keeps: a value from which on some logits already hold
    enough mass, or a value at which all logits together would weigh no more than the mass outside."""
    outside = (1.0 - top_p) * total / len(row)
    bound = peak + math.log(outside) - 1e-3
    peaks = _chunk_peaks(row)
    enough = (peaks - peak).exp().cumsum(0, dtype=torch.float64) >= (top_p + _MARGIN) * total
    if bool(enough.any()):
        bound = max(bound, float(peaks[int(enough.int().argmax())]))
    return bound


def dense_noise(draws: DrawTensors, vocab: int, purpose: int) -> torch.Tensor:
    """Returns the log of standard exponential noise, `[rows, vocab]`, keyed by (seed, position, token, purpose)."""
    quads = torch.arange((vocab + 3) // 4, device=draws.seeds.device)[None, :]
    words = _quad_words(draws.seeds[:, None], draws.positions[:, None], quads, purpose)
    return _log_exponential(words.view(len(draws.seeds), -1)[:, :vocab])


def sparse_noise(draws: DrawTensors, rows: torch.Tensor, tokens: torch.Tensor, purpose: int) -> torch.Tensor:
    """Returns the same noise for some (row, token) pairs only."""
    words = _quad_words(draws.seeds[rows], draws.positions[rows], tokens // 4, purpose)
    return _log_exponential(words.gather(-1, (tokens % 4)[:, None]).squeeze(-1))


def _quad_words(seeds: torch.Tensor, positions: torch.Tensor, quads: torch.Tensor, purpose: int) -> torch.Tensor:
    """Returns `[..., 4]`: the words of four neighbouring tokens. The counter is (position, quad, purpose, 0), the key
    is the seed."""
    counter = (positions, quads, torch.full_like(quads, purpose), torch.zeros_like(quads))
    return torch.stack(philox4x32(counter, (seeds[..., 0], seeds[..., 1])), dim=-1)


def _log_exponential(integers: torch.Tensor) -> torch.Tensor:
    uniform = (integers.float() + 0.5) * 2.0**-32
    # float32 rounds the last 128 integers up to 1, whose logarithm would put an infinity into the noise.
    uniform = uniform.clamp(max=_LARGEST_BELOW_ONE)
    small = uniform + 0.5 * uniform * uniform
    return torch.where(uniform < 2.0**-10, small, -torch.log(1.0 - uniform)).log()


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the four words of Philox4x32-10. Words are int64 tensors below 2**32 that broadcast together."""
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


def verify(
    accepted: torch.Tensor, following: torch.Tensor, draws: torch.Tensor, proposals: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Verifies a row's proposals: they are accepted up to the first that differs from the draw at its position, and
    that draw follows them. For proposals that were certain (one-hot) this is exactly rejection sampling (Leviathan
    2023).

    `draws` is `[rows, k + 1]`, `proposals` `[rows, k]` int64, of which row i has `numbers[i]` (int32; draws after index
    `numbers[i]` are not read). `accepted` is `[rows]` int32; `following` `[rows]` int64 is `draws` at `accepted`. A
    row's output is the first accepted + 1 draws.
    """
    places = torch.arange(proposals.shape[1], device=proposals.device)
    equal = (draws[:, :-1] == proposals) & (places < numbers[:, None])
    accepted.copy_(equal.int().cumprod(dim=1).sum(dim=1))
    following.copy_(draws.gather(1, accepted.long()[:, None]).squeeze(1))
