"""Sets of tokens as the words of bits that the op `logits` reads."""

from __future__ import annotations

import torch

from kernels.arguments.draws import num_words


def pack_bits(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """Returns `[words]` int32 with the bits of these tokens (int64) set."""
    tokens = tokens.unique()
    words = torch.zeros(num_words(vocab), dtype=torch.int64, device=tokens.device)
    words.index_add_(0, tokens >> 5, torch.ones_like(tokens) << (tokens & 31))
    return (words - ((words >> 31) << 32)).to(torch.int32)
