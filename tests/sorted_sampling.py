"""Finds what top-k, top-p and min-p keep by sorting in float64: the definition that kernels and twins are held to."""

from __future__ import annotations

import torch


def kept_by_sorting(scaled: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """`[vocab]` bool of one row. A token stays if fewer than k are larger; if larger ones of those hold less than p;
    if its probability is at least min_p of the largest. Without a finite logit nothing stays."""
    finite = scaled > float("-inf")
    if not bool(finite.any()):
        return finite
    values = scaled.double()
    weights = (values - values.max()).exp()
    kept = finite
    if 0 < top_k < len(scaled):
        falling = values.sort(descending=True).values
        kept = kept & (values >= falling[top_k - 1])
    if top_p < 1.0:
        order = values.argsort(descending=True, stable=True)
        mass = torch.where(kept, weights, 0.0)[order]
        larger = mass.cumsum(0) - mass
        # Equal values share what is larger than all of them.
        _, group = values[order].unique_consecutive(return_inverse=True)
        first = torch.full((int(group.max()) + 1,), float("inf"), dtype=torch.float64, device=scaled.device)
        first = first.scatter_reduce(0, group, larger, "amin")
        inside = torch.empty_like(kept)
        inside[order] = first[group] < top_p * float(mass.sum())
        inside[values == values.max()] = True
        kept = kept & inside
    if min_p > 0:
        kept = kept & (weights >= min_p)
    return kept
