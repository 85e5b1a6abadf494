"""What one step computes, in values: the border between scheduling (no torch) and the runner (torch).

The scheduler and the engine build a list of `Row`; the runner packs the rows into one `[1, num_tokens]` forward
pass over paged KV and answers with one `RowResult` per row, in order. `launch` starts a step, `collect` of its ticket
waits for the results; a runner with lag 1 is given step n+1 before step n is collected. Apart from what such a runner
mirrors on the device, all state of a sequence stays in the engine; the runner owns the weights and the KV tensors.

Rows are views of that state: a runner reads everything it needs of them inside `launch`, and keeps none of their
lists for later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from workers.protocol.messages import SamplingParams, TokenLogprob

PENDING = -1
"""In the place of a token id: the one that the step launched just before draws for the same device row."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be sampled, from the logits at a row's last token if nothing is proposed in the row."""

    params: SamplingParams
    seed: int
    """The choice's own seed (64 bit): the request's for choice 0, else derived (engine.md 4.4)."""
    position: int
    """Index of the token to be drawn in prompt + output, a pending one counted: the counter of the noise.
    `position - len(prompt)` output tokens come before it: that decides min_tokens."""
    prompt: Sequence[int]
    output: Sequence[int]
    """Output ids of this choice as far as they are collected: without the pending one. Penalties count them; a runner
    with lag 1 keeps its own counts on the device and starts them from here when the row does not end with PENDING."""
    mask: bytes | None = None
    """Tokens that may be drawn (sampling/grammar.py); None: any."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: `tokens` are written to KV at positions start .. start + len - 1.

    A row that ends with PENDING goes on where the same `row_id` stood in the step before: same sequence, same draw
    parameters, `start` is the position of the token drawn there. Any other row says everything about its sequence,
    whoever had its `row_id` before.
    """

    tokens: Sequence[int]
    """The last one may be PENDING."""
    start: int
    block_table: Sequence[int]
    """Covers positions 0 .. start + len(tokens) - 1. From step to step it is the same list, grown at its end, or, if
    an entry changed, another list; this holds while the rows of the sequence end with PENDING."""
    draws: tuple[Draw, ...] = ()
    """Empty while a prefill is unfinished; more than one when parallel choices fork from a prompt."""
    prompt_logprobs: int = -1
    """>= 0: also the logprob of each next token inside `tokens` (and of the k best)."""
    next_token: int = -1
    """The token after this chunk, for the last prompt logprob of a chunk; -1 at the end of the prompt."""
    row_id: int = -1
    """The sequence's device row, 0 <= row_id < max_running: its own from when it starts running until the last step
    launched with it is collected. -1: none, for a runner that keeps nothing on the device between steps."""
    adapter: int = -1
    """Slot of the sequence's LoRA adapter; -1: none."""
    num_proposed: int = 0
    """So many of `tokens`, the last ones, are guesses. Then there is one draw more: from the logits at the last known
    token and at each guess, in order, each as if the guesses before it were true."""


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


class Ticket(Protocol):
    """A launched step."""

    def collect(self) -> list[RowResult]:
        """Waits for the step; one result per row, in order. Called once, in the order of the launches. Raises
        `DeviceOutOfMemory`, then the step has no results and what was launched behind it has none of its rows."""
        ...


@dataclass(frozen=True, slots=True)
class Collected:
    """The ticket of a step whose results are there already."""

    results: list[RowResult]

    def collect(self) -> list[RowResult]:
        return self.results


@dataclass(frozen=True, slots=True)
class KernelState:
    """What a runner runs for one op, and why."""

    op: str
    implementation: Literal["triton", "torch"]
    state: Literal["twin", "equal", "differs", "unchecked"]
    """twin: nothing else was chosen; equal: as its twin; differs: its twin took its place; unchecked: no case."""


class StepRunner(Protocol):
    """What the engine needs of a model. Real: `runner.ModelRunner`; in tests: a scripted one."""

    lag: int
    """How many launched, uncollected steps there may be when the next one is launched: 0 or 1."""

    root: str
    """KV identity (messages.Hello.root)."""
    block_size: int
    num_blocks: int
    """Including the null block 0."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    kernels: Sequence[KernelState]
    adapters: Mapping[str, int]
    """Name and slot (`Row.adapter`) of each LoRA adapter that is loaded."""

    def launch(self, rows: Sequence[Row]) -> Ticket:
        """Starts one packed forward pass. Never called with an empty list. Raises `DeviceOutOfMemory`: then nothing
        was launched. A step with several draws in a row, or with prompt logprobs, is collected before the next one is
        launched."""
        ...

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        """`launch(rows).collect()`: one step by itself."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV of whole blocks (source, destination) in every layer, behind all launched steps and before the
        next one."""
        ...
