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
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from workers.protocol.messages import SamplingParams, TokenLogprob

PENDING = -1
"""In the place of a token id: the one that the step launched just before draws for the same device row."""

DECAY = 0.9
"""Each token of a row that observes counts this much of the one behind it."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
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
    """Tokens that may be drawn (sampling/grammar.py, sampling/bans.py); None: any."""
    banned: Sequence[int] = ()
    """Of these, tokens that may not be drawn."""


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
    """Covers positions 0 .. start + len(tokens) - 1, without those dropped. From step to step it is the same list, grown at its end, or, if
    an entry changed, another list; this holds while the rows of the sequence end with PENDING."""
    draws: tuple[SampleSpec, ...] = ()
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
    parents: tuple[int, ...] = ()
    """Of the guesses, if they are a tree and no list (token_tree.py): then one token is known, slots go on in the order
    of the tokens, positions by depth, and a guess sees its own branch only."""
    wants_hidden: bool = False
    """The last hidden states that the draws come from go to the result too."""
    num_dropped: int = 0
    """Tokens before `start` whose KV nobody sees any more, whole blocks of them: the table names the rest, in order.
    Only for a runner with lag 0, without guesses."""
    observes: int = 0
    """So many of `tokens`, the last ones, tell how their attention spreads over the blocks."""

    @property
    def kv_start(self) -> int:
        """Tokens before the row that it sees: its own first one stands there in the table."""
        return self.start - self.num_dropped


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    drawn: tuple[SampledToken, ...] = ()
    """One per draw, in order."""
    prompt_logprobs: tuple[TokenLogprob, ...] = field(default=())
    """Of tokens[1:] and then of next_token (if >= 0)."""
    hidden: Any = None
    """`[num_draws, hidden]`, the runner's own tensor, where the row wants it; else None."""
    mass: tuple[float, ...] = ()
    """Per block the attention it received, the mean over layers and heads: in all one from the last token that
    observes, DECAY times less from each one before. Empty if none does."""


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


class LoadedAdapter(NamedTuple):
    slot: int
    """`Row.adapter`."""
    identity: bytes
    """Of its weights: part of the KV identity."""


class AdapterWeights(Protocol):
    """What was read of an adapter; only the runner that read it looks inside."""

    @property
    def identity(self) -> bytes: ...


class StepRunner(Protocol):
    """What the engine needs of a model. Real: `runner.ModelRunner`; in tests: a scripted one."""

    root: str
    """KV identity (messages.Hello.root)."""
    block_size: int
    num_blocks: int
    """Including the null block 0."""
    bytes_per_block: int
    """Of KV, over all ranks."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    takes_trees: bool
    """Rows may have `parents`."""

    @property
    def lag(self) -> int:
        """How many launched, uncollected steps there may be when the next one is launched: 0 or 1."""
        ...

    @property
    def kernels(self) -> Sequence[KernelState]: ...

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """By name, of each LoRA adapter that is loaded."""
        ...

    def read_adapter(self, directory: Path) -> AdapterWeights:
        """Slow and free of side effects, for any thread. Raises `ModelError`."""
        ...

    def add_adapter(self, name: str, weights: AdapterWeights) -> None:
        """Between two steps. Raises `ModelError`; then nothing changed."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Between two steps, when no sequence takes it any more."""
        ...

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

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves KV of single tokens (source slot, destination slot; slot = block * block size + offset) in every layer,
        all read before any is written, behind all launched steps and before the next one."""
        ...
