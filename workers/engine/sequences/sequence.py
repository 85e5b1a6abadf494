"""One attempt of a request and its sequences: state, derived values and the rules of ending. The module is pure and
moves no block.

A sequence is one choice. Before the first token an attempt has a single sequence, which computes the prompt for all
choices; at the first draw the others fork from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cache.blocks.worth import Range
from cache.tree.handle import Handle
from cache.tree.namespaces import NamespacePath, PathEntry
from workers.engine.grammars.grammar import Automaton, begin
from workers.engine.grammars.library import Compiled
from workers.engine.grammars.mask_time import MaskTime
from workers.engine.sequences.attempt_report import AttemptReport
from workers.engine.sequences.bans import Bans
from workers.engine.sequences.held_blocks import HeldBlocks
from workers.engine.sequences.inputs import MAX_OPEN, Inputs
from workers.engine.sequences.lease import Lease
from workers.engine.values.abilities import GENERATES, Abilities
from workers.engine.values.plan import LoadedAdapter
from workers.engine.values.record import InputsAccount, PromptAccount
from workers.engine.values.sampling_params import choice_seed
from workers.protocol.counts import TokenUsage
from workers.protocol.messages import FinishReason, GenerateRequest, TokenLogprob


class Status(Enum):
    WAITING = "waiting"
    """The sequence never ran."""
    RUNNING = "running"
    """The sequence holds blocks. It is scheduled in each step unless it is at its lease bound."""
    PREEMPTED = "preempted"
    """The sequence lost its blocks. It runs again before anything new of its tier."""
    COMPILING = "compiling"
    """The sequence never ran. It waits for its grammar, not for blocks."""
    FETCHING = "fetching"
    """The sequence never ran. It waits for the KV that other workers left of its prompt, not for blocks."""
    SUSPENDED = "suspended"
    """The sequence was preempted at its lease bound. It waits for a message from the gateway, not for blocks."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Swapped:
    """Slots of host memory with the blocks of a preempted sequence. They hold KV of its first `num_tokens` tokens."""

    slots: list[int]
    num_tokens: int


class Sequence:
    """One choice. Its positions below `num_computed` have KV in `block_ids`, and those below `num_scheduled` get it
    from steps in flight. `num_pending` tokens, which steps in flight draw, will follow `tokens`."""

    __slots__ = (
        "account",
        "attempt",
        "automaton",
        "block_ids",
        "handle",
        "index",
        "last_step",
        "last_token_at",
        "num_computed",
        "num_leading",
        "num_offered_blocks",
        "num_pending",
        "num_preempted",
        "num_scheduled",
        "order",
        "output",
        "pooled",
        "prompt",
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
        self.prompt, self.account = attempt.begin(index)
        """Its prompt, and the account of it. Choices of an attempt have both in common; inputs have their own."""
        self.tokens = self.prompt + array("i", self.output)
        self.pooled: Any = None
        """The answer to its last row, for an input: a sum over the tokens computed so far, or None."""
        self.block_ids: list[int] = []
        self.num_leading = 0
        """Number of leading blocks of its table, for `HeldBlocks`."""
        self.handle: Handle | None = None
        self.row_id = -1
        """Its row on the device, from when it starts running until the last step launched with it is collected."""
        self.last_step = -1
        """Number of the last step launched with it."""
        self.num_preempted = 0
        """Number of times it was preempted for another sequence's sake."""
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_offered_blocks = 0
        """Number of whole blocks already offered to the prefix tree, accepted or not."""
        self.status = Status.WAITING
        self.last_token_at: float | None = None
        """Time of the token drawn last. The value is None before the first one that it draws here."""
        self.automaton: Automaton | None = None
        self.restoring = False
        """Whether it has its blocks and waits for the contents that another tier copies into them."""
        self.swapped: Swapped | None = None
        """The blocks in host memory that it had when it was preempted."""

    @property
    def num_leased(self) -> int:
        """The number of tokens that this sequence and the choices it forks into may still draw of the lease."""
        attempt = self.attempt
        return max(0, min(attempt.lease.left, attempt.message.max_tokens * self.num_choices))

    @property
    def num_unscheduled(self) -> int:
        return len(self.tokens) + self.num_pending - self.num_scheduled

    @property
    def decoding(self) -> bool:
        """Whether only the token drawn last, known or pending, is without KV."""
        return self.num_unscheduled == 1 and bool(self.num_pending or self.output)

    @property
    def in_gang(self) -> bool:
        """Whether it draws together with the other sequences of its attempt, or not at all."""
        return self.attempt.gang and self.attempt.drawn

    @property
    def num_choices(self) -> int:
        """Number of choices that this sequence carries: all that are open until the fork, then itself."""
        return len(self.attempt.unforked) or 1

    @property
    def num_draws(self) -> int:
        """Number of tokens to be drawn once everything is computed."""
        return self.num_choices if self.attempt.message.max_tokens else 0

    def fork(self, index: int) -> Sequence:
        """Returns a choice that continues from here. The caller shares the blocks and the handle."""
        child = Sequence(self.attempt, index, self.output)
        child.num_computed = self.num_computed
        child.num_scheduled = self.num_scheduled
        child.num_offered_blocks = self.num_offered_blocks
        child.block_ids = list(self.block_ids)
        child.status = self.status
        self.attempt.constrain(child)
        return child

    def take_index(self, index: int) -> None:
        """Makes this sequence another choice, because the choice that carried the prompt was cancelled."""
        self.index = index
        self.order = (self.attempt.serial, index)
        self.seed = choice_seed(self.attempt.message.sampling.seed, index)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.output.append(token)

    def finish_after(self, token: int) -> FinishReason | None:
        """Returns the finish reason if the token just appended ends the choice, else None."""
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
        gang: bool = False,
        abilities: Abilities = GENERATES,
    ) -> None:
        self.message = message
        self.adapter = -1 if adapter is None else adapter.slot
        """Slot of the runner's adapter. The value is -1 if there is none."""
        self.link = link
        self.serial = serial
        """Number of the attempt in the order of arrival."""
        self.arrived_at = now
        self.end_len = min(max_len, len(message.prompt) + message.max_tokens)
        """Number of prompt and output tokens at which a choice ends, if nothing ended it before."""
        sampling = message.sampling
        own = () if sampling.ignore_eos else eos_token_ids
        self.end_ids = frozenset(own) | frozenset(sampling.stop_token_ids)
        self.prompt = array("i", message.prompt)
        # An adapter's KV lies in its own regions: the region id from the caller is followed by the adapter's
        # identity.
        identity = b"" if adapter is None else adapter.identity
        self.path: NamespacePath = tuple(PathEntry(r.id + identity, r.end) for r in message.namespace)
        self.ranges = tuple(
            Range(r.start, len(self.prompt) if r.end < 0 else r.end, r.priority, r.ttl_s * 1000)
            for r in (message.retention if message.pooling is None else ())
        )
        self.held = HeldBlocks()
        self.gang = gang
        """Whether its sequences run, and lose their blocks, all together or not at all. Which choices they become is
        known at the end only."""
        self.lease = Lease(
            message.lease_bound,
            message.lease_seq,
            message.num_output_spent,
            now,
            stride=message.num_choices if gang else 1,
        )
        pooling = message.pooling
        self.inputs = None if pooling is None else Inputs(pooling, self.prompt, abilities)
        """The inputs that vectors or scores are wanted of; None for a request for tokens."""
        self._account = PromptAccount(len(self.prompt))
        self.charged = False
        """Whether its prompt is counted in its tenant's counter."""
        self.num_output = 0
        self.num_recomputed = 0
        self.num_rejected = 0
        """Number of proposals that were wrong, or stood after an end."""
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.prompt_sent = False
        self.gathered: list[int] = []
        """The tokens that wait for others before they are sent (`GenerateRequest.gather`)."""
        self.report = AttemptReport(now, len(self.prompt))
        self.bans = bans
        self.grammar: Compiled | None = None
        self._mask_time: MaskTime | None = None
        self.drawn = bool(message.resume)
        """Whether each sequence stands for its own choice. Until then the first sequence carries all choices."""
        self.end_reason = ""
        self.unforked: list[int]
        self.sequences: list[Sequence]
        if self.inputs is not None:
            self.drawn, self.unforked, self.sequences = True, [], []
            while len(self.sequences) < MAX_OPEN and self.next_input() is not None:
                pass
        elif message.resume:
            # A choice that is not handed over had ended before. Each choice goes its own way from the start.
            self.unforked = []
            self.sequences = [Sequence(self, index, output) for index, output in message.resume]
        else:
            self.unforked = list(range(message.num_choices))
            self.sequences = [Sequence(self, 0)]

    @property
    def account(self) -> PromptAccount | InputsAccount:
        return self._account if self.inputs is None else self.inputs.account

    def begin(self, index: int) -> tuple[array[int], PromptAccount]:
        """Returns the prompt and the account of a new sequence."""
        if self.inputs is None:
            return self.prompt, self._account
        tokens = self.inputs.tokens(index)
        return tokens, self.inputs.account.begin(len(tokens))

    def next_input(self) -> Sequence | None:
        """Begins the next input and returns its sequence, or None if all have begun."""
        assert self.inputs is not None
        # An ended sequence stays as long as it holds blocks, because others may share them.
        self.sequences = [s for s in self.sequences if s.block_ids or s.status is not Status.ENDED]
        if self.inputs.num_begun == self.inputs.number:
            return None
        sequence = Sequence(self, self.inputs.num_begun)
        self.inputs.num_begun += 1
        self.sequences.append(sequence)
        return sequence

    @property
    def reads_cache(self) -> bool:
        """Whether KV of other prompts may stand in for its own. Not if something of each of its tokens is wanted."""
        reuses = self.inputs is None or self.inputs.reuses_kv
        return self.message.cache_read and reuses and not self.wants_prompt_logprobs

    @property
    def writes_cache(self) -> bool:
        """Whether others may use its KV."""
        return self.message.cache_write and not self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether each of its prompts is computed in one step, without KV."""
        return self.inputs is not None and self.inputs.is_whole

    def use_grammar(self, grammar: Compiled, mask_time: MaskTime | None = None) -> None:
        """Sets the grammar, whose masks take of the tenant's time. Raises `GrammarError` if it allows no text, or not
        what was drawn before."""
        self.grammar = grammar
        self._mask_time = mask_time
        for sequence in self.sequences:
            self.constrain(sequence)

    def constrain(self, sequence: Sequence) -> None:
        """Gives the sequence its automaton, advanced by its output, if there is a grammar. Raises `GrammarError`."""
        if self.grammar is not None:
            sequence.automaton = begin(self.grammar, self.end_ids, sequence.output, self._mask_time)

    @property
    def needs_last_token(self) -> bool:
        """Whether the tokens that may be drawn next depend on the token drawn last. Then no step is launched before
        that token is known."""
        return self.grammar is not None or (self.bans is not None and self.bans.needs_last)

    @property
    def key(self) -> tuple[int, str]:
        return self.link, self.message.request_id

    @property
    def at_bound(self) -> bool:
        """Whether it has tokens to draw and its lease allows none. The choices that fork at the first draw have their
        first tokens together, unless the gateway will send no more."""
        lease, least = self.lease, self.lease.stride
        if not (self.drawn or lease.last):
            least = max(least, len(self.unforked))
        return self.message.max_tokens > 0 and lease.bound - lease.spent < least

    def together(self, sequence: Sequence) -> list[Sequence]:
        """Returns the sequences that run, and lose their blocks, together with this one."""
        return list(self.sequences) if self.gang else [sequence]

    @property
    def open_indices(self) -> list[int]:
        """Indices of the choices without an ending."""
        if not self.drawn:
            return list(self.unforked)
        started = [s.index for s in self.sequences if s.status is not Status.ENDED]
        if self.inputs is not None:
            return started + list(range(self.inputs.num_begun, self.inputs.number))
        return started + self.unforked

    def take_unforked(self, num_choices: int) -> list[int]:
        """Returns the choices that got a first token. More choices than these are left only where the budget ends with
        them."""
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
        """Whether prompt logprobs are still wanted, which ends with the prefill. Such a prompt is computed, not read
        from the cache."""
        return self.message.prompt_logprobs >= 0 and not self.account.closed

    def seeds(self, indices: list[int]) -> list[int]:
        return [choice_seed(self.message.sampling.seed, index) for index in indices]
