"""One attempt of a request and its sequences: state, derived values, the rules of ending. Pure; moves no block.

A sequence is one choice. Before the first token an attempt has a single sequence, which computes the prompt for all
choices; at the first draw the others fork from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import msgspec

from cache.blocks.retention import Range
from cache.tree.handle import Handle
from cache.tree.misses import Miss
from cache.tree.namespaces import NamespacePath, PathEntry
from workers.engine.grammars.grammar import Automaton, Compiled, begin
from workers.engine.sequences.bans import Bans
from workers.engine.sequences.beam import BeamSearch
from workers.engine.sequences.drafting import Drafting
from workers.engine.values.plan import LoadedAdapter
from workers.engine.values.record import PromptAccount, Residency
from workers.engine.values.sampling_params import choice_seed
from workers.protocol.messages import (
    CacheReport,
    ExtendLease,
    FinishReason,
    GenerateRequest,
    TimelineEvent,
    TokenLogprob,
    TokenUsage,
)

MAX_TIMELINE_EVENTS = 256
"""A request that is preempted for ever still ends with a frame of bounded size."""


class Status(Enum):
    WAITING = "waiting"
    """Never ran."""
    RUNNING = "running"
    """Holds blocks; scheduled in each step unless it is at its lease bound."""
    PREEMPTED = "preempted"
    """Lost its blocks; runs again before anything new of its tier."""
    COMPILING = "compiling"
    """Never ran: waits for its grammar, not for blocks."""
    FETCHING = "fetching"
    """Never ran: waits for what other workers left of its prompt, not for blocks."""
    SUSPENDED = "suspended"
    """Preempted at its lease bound: waits for a word from the gateway, not for blocks."""
    ENDED = "ended"


class Lease:
    """How much output one attempt may still commit, over all its choices. `spent` + `in_flight` never pass `bound`."""

    __slots__ = ("bound", "heard_at", "in_flight", "last", "parked_at", "seq", "spent", "stride")

    def __init__(self, bound: int, seq: int, spent: int, now: float, stride: int = 1) -> None:
        """`stride`: tokens that cannot be drawn one by one: with fewer left nothing can be drawn."""
        self.stride = stride
        self.bound = bound
        self.seq = seq
        self.spent = spent
        self.in_flight = 0
        self.last = False
        self.heard_at = now
        """When parking began or the gateway last spoke: the clock of giving up."""
        self.parked_at: float | None = None

    @property
    def left(self) -> int:
        return self.bound - self.spent - self.in_flight

    @property
    def at_bound(self) -> bool:
        """Nothing can be drawn, whatever is in flight."""
        return self.bound - self.spent < self.stride

    @property
    def exhausted(self) -> bool:
        """Nothing left and nothing to come."""
        return self.last and self.at_bound

    def park(self, now: float) -> bool:
        """True if this begins the parking."""
        if self.parked_at is not None:
            return False
        self.parked_at = self.heard_at = now
        return True

    def extend(self, message: ExtendLease, now: float) -> None:
        """Applied only if newer; the bound never falls."""
        if message.lease_seq <= self.seq:
            return
        self.seq = message.lease_seq
        self.bound = max(self.bound, message.bound)
        self.last = message.last
        self.heard_at = now
        if self.left >= self.stride:
            self.parked_at = None


@dataclass(frozen=True, slots=True)
class Swapped:
    """Slots with the blocks of a preempted sequence: KV of its first `num_tokens`."""

    slots: list[int]
    num_tokens: int


class Sequence:
    """One choice. Of its positions those below `num_computed` have KV in `block_ids`, those below `num_scheduled` get it
    from steps in flight. `num_pending` tokens, which steps in flight draw, come behind `tokens`."""

    __slots__ = (
        "attempt",
        "automaton",
        "block_ids",
        "drafting",
        "handle",
        "index",
        "last_step",
        "last_token_at",
        "mass",
        "num_computed",
        "num_dropped",
        "num_offered_blocks",
        "num_pending",
        "num_preempted",
        "num_scheduled",
        "order",
        "output",
        "restoring",
        "row_id",
        "seed",
        "status",
        "swapped",
        "tokens",
    )

    def __init__(self, attempt: Attempt, index: int, output: Iterable[int] = ()) -> None:
        self.attempt = attempt
        self.index = index
        self.order = (attempt.serial, index)
        self.seed = choice_seed(attempt.message.sampling.seed, index)
        self.output = list(output)
        self.tokens = attempt.prompt + array("i", self.output)
        self.block_ids: list[int] = []
        self.handle: Handle | None = None
        self.row_id = -1
        """Its row on the device, from when it starts running until the last step launched with it is collected."""
        self.last_step = -1
        """Number of that step."""
        self.num_preempted = 0
        """For somebody else's sake."""
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_offered_blocks = 0
        """Whole blocks already shown to the prefix tree, accepted or not."""
        self.num_dropped = 0
        """Computed tokens whose KV it holds no more (sparsity.py), whole blocks of them."""
        self.mass: list[float] = []
        """Attention that its first blocks received, as far as it was measured."""
        self.status = Status.WAITING
        self.last_token_at = 0.0
        self.automaton: Automaton | None = None
        self.restoring = False
        """It has its blocks, and waits for what another tier puts into them."""
        self.swapped: Swapped | None = None
        """What it had when it was preempted, in host memory."""
        self.drafting: Drafting | None = None
        """Of speculation, once it was tried."""

    @property
    def place(self) -> int:
        """Of its next token among those that it holds."""
        return self.num_scheduled - self.num_dropped

    @property
    def num_unscheduled(self) -> int:
        return len(self.tokens) + self.num_pending - self.num_scheduled

    @property
    def decoding(self) -> bool:
        """Only the token drawn last, known or pending, is without KV."""
        return self.num_unscheduled == 1 and bool(self.num_pending or self.output)

    @property
    def in_search(self) -> bool:
        """A beam: it draws together with the others."""
        return self.attempt.search is not None and self.attempt.drawn

    @property
    def num_choices(self) -> int:
        """Choices that this sequence carries: all that are open until the fork, then itself."""
        return len(self.attempt.unforked) or 1

    @property
    def num_draws(self) -> int:
        """Tokens to be drawn once everything is computed."""
        return self.num_choices if self.attempt.message.max_tokens else 0

    def fork(self, index: int) -> Sequence:
        """A choice that continues from here. The caller shares the blocks and the handle."""
        child = Sequence(self.attempt, index, self.output)
        child.num_computed = self.num_computed
        child.num_scheduled = self.num_scheduled
        child.num_offered_blocks = self.num_offered_blocks
        child.block_ids = list(self.block_ids)
        child.mass = list(self.mass)
        child.status = self.status
        self.attempt.constrain(child)
        return child

    def take_index(self, index: int) -> None:
        """The choice that carried the prompt was cancelled: another one carries on."""
        self.index = index
        self.order = (self.attempt.serial, index)
        self.seed = choice_seed(self.attempt.message.sampling.seed, index)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.output.append(token)

    def finish_after(self, token: int) -> FinishReason | None:
        """Whether the token just appended ends the choice."""
        attempt = self.attempt
        if token in attempt.end_ids:
            return "stop"
        if self.automaton is not None:
            self.automaton.advance(token)
            if self.automaton.ended:
                return "stop"
        if len(self.tokens) >= attempt.end_len:
            return "length"
        return None


class Attempt:
    """One dispatch of a request to this worker."""

    def __init__(
        self,
        message: GenerateRequest,
        link: int,
        serial: int,
        now: float,
        *,
        eos_token_ids: tuple[int, ...],
        max_len: int,
        adapter: LoadedAdapter | None = None,
        bans: Bans | None = None,
    ) -> None:
        self.message = message
        self.adapter = -1 if adapter is None else adapter.slot
        """Slot of the runner's; -1: none."""
        self.link = link
        self.serial = serial
        """Order of arrival."""
        self.arrived_at = now
        self.deadline = now + message.deadline_ms / 1000 if message.deadline_ms else float("inf")
        self.end_len = min(max_len, len(message.prompt) + message.max_tokens)
        """Tokens of prompt and output at which a choice ends, if nothing ended it before."""
        sampling = message.sampling
        own = () if sampling.ignore_eos else eos_token_ids
        self.end_ids = frozenset(own) | frozenset(sampling.stop_token_ids)
        self.prompt = array("i", message.prompt)
        # An adapter's KV lies in regions of its own: the caller's id, then what the adapter is.
        identity = b"" if adapter is None else adapter.identity
        self.path: NamespacePath = tuple(PathEntry(r.id + identity, r.end) for r in message.namespace)
        self.ranges = tuple(
            Range(r.start, len(self.prompt) if r.end < 0 else r.end, r.priority, r.ttl_s * 1000)
            for r in message.retention
        )
        self.residency = Residency()
        self.search: BeamSearch | None = None
        """Then its sequences are the beams, by index, and run all together or not at all."""
        if message.beams is not None:
            penalty, num_logprobs = message.beams.length_penalty, sampling.logprobs
            self.search = BeamSearch(message.num_choices, penalty, self.end_ids, num_logprobs)
        self.lease = Lease(
            message.lease_bound,
            message.lease_seq,
            message.num_output_spent,
            now,
            stride=1 if self.search is None else self.search.width,
        )
        self.account = PromptAccount(len(self.prompt))
        self.charged = False
        """Its prompt is in its tenant's counter."""
        self.num_output = 0
        self.num_recomputed = 0
        self.num_rejected = 0
        """Proposals that were wrong, or stood behind an end."""
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_sent = False
        self.cache_report = CacheReport()
        self._reported = False
        self._events: list[TimelineEvent] = []
        self.bans = bans
        self.grammar: Compiled | None = None
        self.drawn = bool(message.resume)
        """Each sequence stands for its own choice; before, the first one carries them all."""
        self.end_reason = ""
        if message.resume:
            # What is not handed over had ended before; each choice goes its own way from the start.
            self.unforked: list[int] = []
            self.sequences = [Sequence(self, index, output) for index, output in message.resume]
        else:
            self.unforked = list(range(message.num_choices))
            self.sequences = [Sequence(self, 0)]

    def use_grammar(self, grammar: Compiled) -> None:
        """Raises `GrammarError` if it allows no text, or not what was drawn before."""
        self.grammar = grammar
        for sequence in self.sequences:
            self.constrain(sequence)

    def constrain(self, sequence: Sequence) -> None:
        """Its automaton, if there is a grammar, behind its output. Raises `GrammarError`."""
        if self.grammar is not None:
            sequence.automaton = begin(self.grammar, self.end_ids, sequence.output)

    @property
    def needs_last_token(self) -> bool:
        """What may be drawn next depends on the token drawn last: no step is launched before that is known."""
        return self.grammar is not None or (self.bans is not None and self.bans.needs_last)

    @property
    def key(self) -> tuple[int, str]:
        return self.link, self.message.request_id

    @property
    def at_bound(self) -> bool:
        """Wants to draw and may not."""
        return self.lease.at_bound and self.message.max_tokens > 0

    def together(self, sequence: Sequence) -> list[Sequence]:
        """Those that run, and lose their blocks, with this one."""
        return list(self.sequences) if self.search is not None else [sequence]

    @property
    def open_indices(self) -> list[int]:
        """Choices without an ending."""
        if not self.drawn:
            return list(self.unforked)
        started = [s.index for s in self.sequences if s.status is not Status.ENDED]
        return started + self.unforked

    def take_unforked(self, num_choices: int) -> list[int]:
        """The choices that got a first token; more than these are left only where the budget ends with them."""
        taken, self.unforked = self.unforked[:num_choices], self.unforked[num_choices:]
        self.drawn = True
        return taken

    @property
    def usage(self) -> TokenUsage:
        counts = self.account.counts
        return TokenUsage(
            cache_read=counts.cache_read,
            cache_write=counts.cache_write,
            uncached=counts.uncached,
            output=self.num_output,
            speculated=self.num_rejected,
            recomputed=self.num_recomputed,
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Until the prompt is through; such a prompt is computed, not read."""
        return self.message.prompt_logprobs >= 0 and not self.account.closed

    @property
    def timeline(self) -> tuple[TimelineEvent, ...]:
        return tuple(self._events)

    def event(self, name: str, now: float, step: int = -1, num_tokens: int = 0) -> None:
        if len(self._events) < MAX_TIMELINE_EVENTS or name == "finished":
            offset_us = int((now - self.arrived_at) * 1e6)
            self._events.append(TimelineEvent(name, offset_us, step, num_tokens))

    def seeds(self, indices: list[int]) -> list[int]:
        return [choice_seed(self.message.sampling.seed, index) for index in indices]

    def pinned(self, num_blocks: int) -> None:
        self.cache_report = msgspec.structs.replace(self.cache_report, num_pinned_blocks=num_blocks)

    def restored(self, num_tokens: int, miss: Miss) -> None:
        """More of its prompt was cached than the device had."""
        self.cache_report = msgspec.structs.replace(
            self.cache_report,
            cached_tokens=self.cache_report.cached_tokens + num_tokens,
            miss_reason=miss.reason,
            diverged_at_token=miss.diverged_at_token,
        )

    def admitted(self, handle: Handle, evicted_age_ms: int) -> None:
        """The first admission's match is the request's cache report; its own blocks met again later are not."""
        if self._reported:
            return
        self._reported = True
        self.cache_report = CacheReport(
            cached_tokens=min(handle.num_tokens, len(self.prompt)),
            public_tokens=min(handle.public_tokens, len(self.prompt)),
            miss_reason=handle.miss_reason,
            diverged_at_token=handle.diverged_at_token,
            evicted_age_ms=evicted_age_ms,
        )
