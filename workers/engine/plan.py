"""What one step computes, in values: the border between scheduling (no torch) and the runner (torch).

The scheduler and the engine build a list of `Row`; the runner packs the rows into one `[1, num_tokens]` forward
pass over paged KV and answers with one `RowResult` per row, in order. All state of a sequence stays in the
engine; the runner owns the weights and the KV tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from workers.protocol.messages import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be sampled from the logits at a row's last token."""

    params: SamplingParams
    seed: int
    """The choice's own seed (64 bit): the request's for choice 0, else derived (engine.md 4.4)."""
    position: int
    """Index of the token to be drawn in prompt + output: the counter of the noise."""
    prompt: Sequence[int]
    output: Sequence[int]
    """Output ids of this choice so far: penalties count them; `len(output)` decides min_tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: `tokens` are written to KV at positions start .. start + len - 1."""

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    """Covers positions 0 .. start + len(tokens) - 1."""
    draws: tuple[Draw, ...] = ()
    """Empty while a prefill is unfinished; more than one when parallel choices fork from a prompt."""
    prompt_logprobs: int = -1
    """>= 0: also the logprob of each next token inside `tokens` (and of the k best)."""
    next_token: int = -1
    """The token after this chunk, for the last prompt logprob of a chunk; -1 at the end of the prompt."""


@dataclass(frozen=True, slots=True)
class Drawn:
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    drawn: tuple[Drawn, ...] = ()
    """One per draw, in order."""
    prompt_logprobs: tuple[TokenLogprob, ...] = field(default=())
    """Of tokens[1:] and then of next_token (if >= 0)."""


class StepRunner(Protocol):
    """What the engine needs of a model. Real: `runner.ModelRunner`; in tests: a scripted one."""

    root: str
    """KV identity (messages.Hello.root)."""
    block_size: int
    num_blocks: int
    """Including the null block 0."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        """Runs one packed forward pass. Never called with an empty list."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV of whole blocks (source, destination) in every layer, before the next `execute`."""
        ...
