"""Values that describe what one step computes. They separate scheduling, which knows no torch, from the runner.

The scheduler and the engine build a list of `Row`. The runner packs the rows into one `[1, num_tokens]` forward pass
over paged KV and answers with one `RowResult` per row, in order. `launch` starts a step, and `collect` of its ticket
waits for the results. A runner with lag 1 is given step n+1 before step n is collected. Apart from what such a runner
mirrors on the device, all state of a sequence stays in the engine. The runner owns the weights and the KV tensors.

Rows are views of that state. A runner reads everything it needs of them inside `launch`, and keeps none of their lists
for later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from workers.engine.values.abilities import Abilities
from workers.engine.values.layout import Layout, Thinned
from workers.engine.values.probe import Probe
from workers.protocol.messages import SamplingParams, TokenLogprob

PENDING = -1
"""Stand-in for a token id that the host does not know yet. It means the token that the step launched just before draws
for the same device row."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One token to be sampled. It is drawn from the logits at a row's last token if nothing is proposed in the row."""

    params: SamplingParams
    """Parameters of the request. Like the prompt they are the same object from step to step."""
    seed: int
    """The choice's own seed (64 bit). Choice 0 has the request's seed, the others have a derived one (engine.md
    4.4)."""
    position: int
    """Index of the token to be drawn in prompt + output, where a pending token counts. It is the counter of the noise.
    `position - len(prompt)` output tokens come before it, and min_tokens is compared with that number."""
    prompt: Sequence[int]
    """Ids of the prompt. From step to step it is the same object, which is never changed: a runner may keep what it
    derives from it as long as the object lives."""
    output: Sequence[int]
    """Output ids of this choice as far as they are collected, without the pending one. Penalties count them. A runner
    with lag 1 keeps its own counts on the device and starts them from here when the row does not end with PENDING."""
    mask: bytes | None = None
    """Bit mask of the tokens that may be drawn (grammars/grammar.py, sequences/bans.py). The value is None if any token
    may."""
    banned: Sequence[int] = ()
    """Tokens that may not be drawn although the mask allows them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step. Its `tokens` are written to KV at positions start .. start + len - 1.

    A row that ends with PENDING continues the row that had the same `row_id` in the step before. It has the same
    sequence and the same draw parameters, and `start` is the position of the token drawn there. Any other row says
    everything about its sequence, whichever sequence had its `row_id` before.
    """

    tokens: Sequence[int]
    """Token ids to compute. The last one may be PENDING."""
    start: int
    block_table: Sequence[int]
    """Block ids that cover positions 0 .. start + len(tokens) - 1, as far as they are held. From step to step it is
    the same list, grown at its end. If an entry changed, it is another list. This holds while the rows of the sequence
    end with PENDING."""
    draws: tuple[SampleSpec, ...] = ()
    """Tokens to draw. It is empty while a prefill is unfinished, and has more than one entry when parallel choices fork
    from a prompt."""
    prompt_logprobs: int = -1
    """Number of best tokens whose logprobs are returned in addition to that of the token itself, for each next token
    inside `tokens`. A value below 0 asks for no prompt logprobs."""
    next_token: int = -1
    """The token after this chunk, needed for the last prompt logprob of a chunk. It is -1 at the end of the prompt."""
    row_id: int = -1
    """The sequence's device row, 0 <= row_id < max_running. The sequence owns it from when it starts running until the
    last step launched with it is collected. The value is -1 if there is none, because the runner keeps nothing on the
    device between steps."""
    adapter: int = -1
    """Slot of the sequence's LoRA adapter. The value is -1 if it has none."""
    num_proposed: int = 0
    """Number of guesses: the last `num_proposed` of `tokens` are guessed. Then there is one draw more than guesses: one
    from the logits at the last known token and one from those at each guess, in order, each as if the guesses before it
    were true."""
    layout: Layout | None = None
    """Layout of its tokens, where it is not the plain one."""
    probe: Probe | None = None
    """Question that the result answers besides its draws."""

    @property
    def kv_start(self) -> int:
        """Number of tokens before the row that it sees. It is also the index of the row's first token among those of
        the block table."""
        return self.start - self.layout.num_dropped if isinstance(self.layout, Thinned) else self.start


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RowResult:
    drawn: tuple[SampledToken, ...] = ()
    """Drawn tokens, one per draw, in order."""
    prompt_logprobs: tuple[TokenLogprob, ...] = field(default=())
    """Logprobs of tokens[1:] and then of next_token (if >= 0)."""
    probed: Any = None
    """The answer to the row's probe."""


class Ticket(Protocol):
    """A launched step."""

    def collect(self) -> list[RowResult]:
        """Waits for the step and returns one result per row, in order. It is called once per ticket, in the order of
        the launches. Raises `DeviceOutOfMemory`: then the step has no results, and a step launched after it has none of
        its rows either."""
        ...


@dataclass(frozen=True, slots=True)
class Collected:
    """The ticket of a step whose results are there already."""

    results: list[RowResult]

    def collect(self) -> list[RowResult]:
        return self.results


@dataclass(frozen=True, slots=True)
class KernelState:
    """The implementation that a runner uses for one op, and the reason."""

    op: str
    implementation: Literal["triton", "torch"]
    state: Literal["twin", "equal", "differs", "unchecked"]
    """Result of the comparison with the op's twin. twin: the twin itself runs, because nothing else was chosen. equal:
    the results are those of the twin. differs: they were not, so the twin is used. unchecked: there was no case to
    compare."""


@dataclass(frozen=True, slots=True)
class GraphState:
    """Whether decode steps of up to `num_rows` rows are replayed from a recording, and how it compares with a call."""

    num_rows: int
    state: Literal["equal", "differs", "failed"]
    """equal: the recording gave the bits of the call, and is replayed. differs: it did not, so the step is called.
    failed: nothing could be recorded, so the step is called."""


class LoadedAdapter(NamedTuple):
    slot: int
    """Slot number, as in `Row.adapter`."""
    identity: bytes
    """Identity of the adapter's weights. It is part of the KV identity."""


class AdapterWeights(Protocol):
    """The weights that were read of an adapter. Only the runner that read them looks inside."""

    @property
    def identity(self) -> bytes: ...


class StepRunner(Protocol):
    """The interface of a model that the engine needs. The real one is `device.runner.ModelRunner`; tests use a scripted
    one."""

    root: str
    """KV identity (messages.Hello.root)."""
    block_size: int
    num_blocks: int
    """Number of KV blocks, including the null block 0."""
    bytes_per_block: int
    """Bytes of KV per block, over all ranks."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    vocabulary: str
    """The digest of its tokens and their ids (messages.Hello.vocabulary)."""
    takes_trees: bool
    """Whether rows may be a `Tree`."""

    @property
    def lag(self) -> int:
        """Number of launched, uncollected steps that there may be when the next one is launched: 0 or 1."""
        ...

    @property
    def kernels(self) -> Sequence[KernelState]: ...

    @property
    def graphs(self) -> Sequence[GraphState]:
        """The decode steps that were to be recorded, by rising size; none where nothing is recorded, as on a CPU."""
        ...

    @property
    def abilities(self) -> Abilities:
        """Returns the tasks that the model can do. A row with the probe `Pooled` belongs to another task than `generate`."""
        ...

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        """Loaded LoRA adapters by name."""
        ...

    def read_adapter(self, directory: Path) -> AdapterWeights:
        """Reads an adapter's weights. This is slow, has no side effects and may be called from any thread. Raises
        `ModelError`."""
        ...

    def add_adapter(self, name: str, weights: AdapterWeights) -> None:
        """Loads an adapter. It is called between two steps. Raises `ModelError`; then nothing changed."""
        ...

    def remove_adapter(self, name: str) -> None:
        """Removes an adapter. It is called between two steps, when no sequence uses the adapter any more."""
        ...

    def launch(self, rows: Sequence[Row]) -> Ticket:
        """Starts one packed forward pass. It is never called with an empty list. Raises `DeviceOutOfMemory`; then
        nothing was launched. A step that has a row with several draws or with prompt logprobs is collected before the
        next one is launched."""
        ...

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        """Runs one step by itself: `launch(rows).collect()`."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV of whole blocks (source, destination) in every layer, after all launched steps and before the next
        one."""
        ...

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves KV of single tokens (source slot, destination slot; slot = block * block size + offset) in every layer.
        All are read before any is written, after all launched steps and before the next one."""
        ...
