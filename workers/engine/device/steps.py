"""Steps whose rows carry all their state, as a CPU worker runs them: packed, run, drawn, and answered at once.

It knows plan.py's rows and a loaded model. It keeps nothing between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from kernels.dispatch import Ops
from workers.engine.kv.kv_store import KVStore
from workers.engine.lora.adapters import Adapters
from workers.engine.model import hf
from workers.engine.model.packing import PackedStep, pack
from workers.engine.pooling.pooler import NOTHING, Pending, Pooler
from workers.engine.sampling.sampler import Sampler, token_logprobs
from workers.engine.values.plan import Collected, Row, RowResult, SampledToken, SampleSpec, Ticket
from workers.engine.values.probe import AttentionMass, HiddenStates, Pooled
from workers.protocol.messages import TokenLogprob

_LOGPROB_ROWS = 64
"""Number of prompt tokens whose logits exist at one time: a long prompt times the vocabulary would take gigabytes."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its KV, ready to run passes."""

    model: PreTrainedModel
    hidden_states: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Maps `[num_tokens]` ids and positions to `[num_tokens, hidden]`, in the context of `step`."""
    head: hf.Head
    store: KVStore
    ops: Ops
    sampler: Sampler
    pooler: Pooler
    step: hf.StepSlot
    """The holder of a pass's context, which is set before the pass runs."""
    device: torch.device
    num_heads: int
    """Query heads of a layer."""
    min_tokens: int
    """A pass is padded to at least this many tokens."""
    leads: bool = True
    """Only rank 0 of a parallel model draws and pools."""
    adapters: Adapters | None = None

    def prompt_logprobs(self, row: Row, start: int, hidden: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Returns the prompt logprobs of a row whose tokens begin at `start` of a pass; the host waits for them."""
        if row.prompt_logprobs < 0:
            return ()
        targets = [*row.tokens[1:], *([row.next_token] if row.next_token >= 0 else [])]
        found: list[TokenLogprob] = []
        for first in range(0, len(targets), _LOGPROB_ROWS):
            part = targets[first : first + _LOGPROB_ROWS]
            logits = self.head(hidden[start + first : start + first + len(part)])
            if self.leads:
                found += token_logprobs(logits, part, row.prompt_logprobs)
        return tuple(found)

    def pooled(self, rows: Sequence[Row], starts: Sequence[int], hidden: torch.Tensor) -> Pending:
        """Returns the answers to the rows that ask for a vector or a score. They may still be on the device."""
        if not any(isinstance(row.probe, Pooled) for row in rows):
            return NOTHING
        return self.pooler.of_rows(rows, starts, hidden)


def drawn_from(row: Row, start: int, hidden: torch.Tensor) -> torch.Tensor | None:
    """Returns the hidden states of a row that asks for them, or None; the row's tokens begin at `start`."""
    if not (isinstance(row.probe, HiddenStates) and row.draws):
        return None
    end = start + len(row.tokens)
    return hidden[end - 1 - row.num_proposed : end].clone()


class Steps(Protocol):
    """One way to run steps."""

    lag: int

    def launch(self, rows: Sequence[Row]) -> Ticket: ...

    def try_decode(self) -> None:
        """Runs the largest decode step there is on made-up rows, if it takes memory of its own."""
        ...

    def forget(self) -> None:
        """Resets the state to what it was before any launch."""
        ...


class PlainSteps:
    lag = 0

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def launch(self, rows: Sequence[Row]) -> Ticket:
        loaded = self._loaded
        block_size = loaded.store.shape.block_size
        packed = pack(rows, block_size, loaded.device, loaded.min_tokens)
        loaded.step.context = packed.context
        if loaded.adapters is not None:
            loaded.adapters.begin(rows, packed)
        hidden = loaded.hidden_states(packed.token_ids, packed.positions)
        drawn = self._draw(rows, packed, hidden)
        pooled = loaded.pooled(rows, packed.starts, hidden).take(len(rows))
        results = []
        for index, row in enumerate(rows):
            prompt = loaded.prompt_logprobs(row, packed.starts[index], hidden)
            if isinstance(row.probe, AttentionMass):
                assert packed.context.mass is not None
                probed: Any = packed.context.mass.of(index)
            elif isinstance(row.probe, Pooled):
                probed = pooled[index]
            else:
                probed = drawn_from(row, packed.starts[index], hidden)
            results.append(RowResult(tuple(drawn[index]), prompt, probed))
        return Collected(results)

    def try_decode(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def _draw(self, rows: Sequence[Row], packed: PackedStep, hidden: torch.Tensor) -> list[list[SampledToken]]:
        """Draws the tokens of all rows. The head computes only the tokens that something is drawn after: the last one
        of a row, whose draws share the logits, or the last known one and every proposed one."""
        drawn: list[list[SampledToken]] = [[] for _ in rows]
        last: list[int] = []
        drawing: list[int] = []
        owners: list[int] = []
        draws: list[SampleSpec] = []
        for index, row in enumerate(rows):
            if not row.draws:
                continue
            first, end = len(last), packed.starts[index] + len(row.tokens)
            last += range(end - 1 - row.num_proposed, end)
            owners += range(first, len(last)) if row.num_proposed else [first] * len(row.draws)
            drawing += [index] * len(row.draws)
            draws += row.draws
        if not drawing:
            return drawn
        device = self._loaded.device
        logits = self._loaded.head(hidden[torch.tensor(last, device=device)])
        if not self._loaded.leads:
            return drawn
        if len(owners) != len(last):
            logits = logits[torch.tensor(owners, device=device)]
        for index, token in zip(drawing, self._loaded.sampler.draw(logits, draws), strict=True):
            drawn[index].append(token)
        return drawn
