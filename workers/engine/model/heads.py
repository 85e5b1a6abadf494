"""Heads that propose tokens ahead of a model: from the last hidden state that a token was drawn from, each head
proposes one later token. The weights have the form of Medusa (arXiv 2401.10774): per head residual blocks and a
projection to the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from workers.engine.values.errors import ModelError

BEST = 4
"""Number of tokens of a head that are used."""
_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


class Head(nn.Module):
    def __init__(self, hidden: int, vocab: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_blocks))
        self.project = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        logits: torch.Tensor = self.project(x)
        return logits


class Heads(nn.Module):
    """The heads of a model. Head k proposes the token k + 1 positions after the one drawn from the hidden state."""

    def __init__(self, num_heads: int, hidden: int, vocab: int, num_blocks: int = 1) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(hidden, vocab, num_blocks) for _ in range(num_heads))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps `[n, hidden]` to logits `[num_heads, n, vocab]`."""
        return torch.stack([head(hidden) for head in self.heads])

    def best(self, states: Sequence[torch.Tensor]) -> list[list[list[tuple[int, float]]]]:
        """Returns for each state and head the best tokens and their log-probabilities, best first."""
        weight = next(self.parameters())
        with torch.inference_mode():
            hidden = torch.stack(list(states)).to(weight.device, weight.dtype)
            logprobs = self(hidden).float().log_softmax(dim=-1).transpose(0, 1)
            values, tokens = logprobs.topk(min(BEST, logprobs.shape[-1]), dim=-1)
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return [[list(zip(*head, strict=True)) for head in zip(ids, found, strict=True)] for ids, found in pairs]


def load(path: Path, hidden: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Heads:
    """Reads heads from a safetensors file, or from a directory with one. Raises ModelError with one sentence."""
    path = path.expanduser()
    file = path / "medusa_lm_head.safetensors" if path.is_dir() else path
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The heads {file} cannot be read: {error}.") from error
    named = [match for name in weights if (match := _NAME.fullmatch(name))]
    if not named or len(named) != len(weights):
        raise ModelError(f"The file {file} does not hold Medusa heads alone.")
    num_heads = 1 + max(int(match[1]) for match in named)
    num_blocks = max(int(match[2]) for match in named)
    heads = Heads(num_heads, hidden, vocab, num_blocks)
    try:
        heads.load_state_dict({_own_name(m, num_blocks): weights[m[0]] for m in named})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"The heads {file} do not fit the model: {reason}") from error
    return heads.to(device, dtype).requires_grad_(requires_grad=False).eval()


def _own_name(match: re.Match[str], num_blocks: int) -> str:
    if int(match[2]) == num_blocks:
        return f"heads.{match[1]}.project.weight"
    return f"heads.{match[1]}.blocks.{match[2]}.{match[3].removeprefix('linear.')}"
