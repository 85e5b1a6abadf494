"""The partition of one query's keys into parts that are summed apart, and the memory of the parts' sums.

It knows lengths. A cut is a function of a row's own length alone, so a row's result is the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STEPS = ((4096, 256), (8192, 512), (32_768, 1024))
"""Pairs of a number of keys and the length of parts up to that number. A few dozen parts keep a GPU busy with one row
and are cheap to reduce."""
LONGEST = 2048
SHARED_FACTOR = 2
"""Factor by which the parts of a shared prefix are longer: many rows work on each, and each row writes a sum per
part."""


def split_size(num_keys: int) -> int:
    """Returns the number of keys per part."""
    return next((size for limit, size in STEPS if num_keys <= limit), LONGEST)


def num_splits(num_keys: int) -> int:
    return -(-num_keys // split_size(num_keys))


def num_shared_splits(num_keys: int) -> int:
    return -(-num_keys // (SHARED_FACTOR * split_size(num_keys)))


def most_splits(max_keys: int) -> int:
    """Returns the number of parts that no row of at most `max_keys` keys exceeds: a longer row may have fewer parts."""
    limits = [limit for limit, _ in STEPS if limit < max_keys]
    return max(1, *(num_splits(keys) for keys in (*limits, max_keys)))


def most_shared_splits(max_keys: int) -> int:
    limits = [limit for limit, _ in STEPS if limit < max_keys]
    return max(num_shared_splits(keys) for keys in (*limits, max_keys))


def most_splits_beside_shared(max_keys: int) -> int:
    """Returns the largest number of parts of a row's own keys and of shared keys together, if neither are more than
    `max_keys`: a row in no group may be as long as the longest prefix of others."""
    return most_splits(max_keys) + most_shared_splits(max_keys)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Partial sums of one attention call, float32. Calls on one stream use it one after another, also layers of
    different shapes; captured graphs keep one that was made for the largest call."""

    sums: torch.Tensor
    """A flat tensor, seen as `[num_rows, KVH, num_splits, G, head_dim]`: values weighted by their probabilities."""
    stats: torch.Tensor
    """A flat tensor, seen as `[num_rows, KVH, num_splits, G, 2]`: largest score in base 2, sum of probabilities."""

    @classmethod
    def of(cls, num_rows: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device) -> DecodeWorkspace:
        places = num_rows * num_heads * num_splits
        sums = torch.empty(places * head_dim, dtype=torch.float32, device=device)
        return cls(sums, torch.empty(places * 2, dtype=torch.float32, device=device))

    def holds(self, num_rows: int, num_heads: int, head_dim: int, num_splits: int) -> bool:
        places = num_rows * num_heads * num_splits
        return places * head_dim <= len(self.sums) and places * 2 <= len(self.stats)
