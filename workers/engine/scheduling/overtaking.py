"""Sequences that enter before one that does not fit yet. The module is pure.

A sequence that was preempted keeps its place at the head of its tier, and one that never ran is at the head when fairness
selects it. A long one, or one with many choices, may wait there until many others ended. The law, which holds for each
sequence that others pass, and in each tier by itself:

1. Only other tenants' sequences pass it, and only those that fit beside it: it and all that passed it, with their leases,
   fit the pool together and have places together. So it never waits for more than what ran before it and what passed it
   while that ran: when these have ended, it enters. Fairness may select another tenant's before one that never ran.
2. When they, with their leases, have brought `MAX_PASSED` or `MAX_PASSED_NEW` times its tokens, nobody passes it any more
   until all of them have ended. If it has no room even then, they are not what it waits for, and the count begins anew.
   It may wait for interactive work, or for blocks that floors keep.

The first rule alone would let a stream of short requests hold what the pool cannot give twice, and the second one alone
would let them hold all of it. It is backfilling with a reservation, as the EASY scheduler does it (Mu'alem and Feitelson
2001). Nobody knows here how long a request will run, so what passes is counted instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.sequences.sequence import Attempt, Sequence, Status

MAX_PASSED = 64
"""Sequences with at most this many times a preempted sequence's tokens may enter before it. It had its turn when it
entered."""
MAX_PASSED_NEW = 1
"""The factor for a sequence that never ran, multiplied by its choices. What passes it takes its tenant's turn."""
MAX_LOOKED = 16
"""Preempted sequences, and as many that never ran, that are asked whether they fit before it, until one does. Each look
reads the prefix cache, and a thousand tenants may wait."""
MAX_PASSED_BY_ONE = 4
"""Sequences that one may pass: the head, and those next to it that may pass it and find no room. Each try asks the
prefix cache for blocks, in each step of a worker whose memory is full."""


class Need(NamedTuple):
    """A sequence that finds no room, and what it needs beside its own tokens and choices."""

    sequence: Sequence
    num_spare: int
    """Number of blocks that have to stay available when it enters."""
    num_kept: int
    """Number of places that it may not take."""


@dataclass(slots=True)
class _Passed:
    """The attempts that passed one sequence while it waited."""

    num_tokens: int = 0
    """The number of tokens that they brought, until the last of them ended."""
    attempts: dict[Attempt, tuple[int, int]] = field(default_factory=dict)
    """The numbers of blocks, with its lease, and of places that each was expected to hold."""

    def forget_ended(self) -> None:
        if self.attempts:
            self.attempts = {
                attempt: expected
                for attempt, expected in self.attempts.items()
                if not attempt.end_reason or attempt.held.number  # a step in flight may use its blocks
            }
            self.num_tokens = self.num_tokens if self.attempts else 0


class Overtaking:
    """The attempts that passed the waiting sequences of one tier."""

    def __init__(self, block_tables: BlockTables, max_running: int) -> None:
        self._block_tables = block_tables
        self._max_running = max_running
        self._passed: dict[Sequence, _Passed] = {}

    def begin_plan(self) -> None:
        """Begins a plan. Whoever passed a sequence that waits no more is forgotten."""
        waits = Status.PREEMPTED, Status.WAITING
        self._passed = {head: passed for head, passed in self._passed.items() if head.status in waits}
        for passed in self._passed.values():
            passed.forget_ended()

    def is_closed(self, head: Sequence) -> bool:
        """Returns whether nobody may pass the head for now, because enough others did."""
        multiple = MAX_PASSED if head.status is Status.PREEMPTED else MAX_PASSED_NEW * head.num_choices
        passed = self._passed.get(head)
        return passed is not None and passed.num_tokens >= multiple * len(head.tokens)

    def allows(self, sequence: Sequence, need: Need) -> bool:
        """Returns whether a sequence may enter before another one."""
        head = need.sequence
        if sequence.attempt.message.tenant == head.attempt.message.tenant or self.is_closed(head):
            return False
        passed = self._passed.setdefault(head, _Passed())
        num_places = sum(number for _, number in passed.attempts.values()) + sequence.num_choices + head.num_choices
        if num_places + need.num_kept > self._max_running:
            return False
        cache = self._block_tables.cache
        num_held = sum(max(number, attempt.held.number) for attempt, (number, _) in passed.attempts.items())
        if head.in_gang:
            num_held += head.attempt.held.number  # they are not given back before the head runs
        num_needed = -(-len(head.tokens) // cache.block_size) + need.num_spare + self._num_blocks(sequence)
        return num_held + num_needed <= cache.num_blocks - 1 - cache.num_pinned

    def passed(self, sequence: Sequence, heads: Iterable[Sequence]) -> None:
        """Records that the sequence entered before others, which allowed it."""
        attempt = sequence.attempt
        for passed in map(self._passed.__getitem__, heads):
            num_blocks, num_places = passed.attempts.get(attempt, (0, 0))
            passed.num_tokens += _num_tokens(sequence)
            passed.attempts[attempt] = num_blocks + self._num_blocks(sequence), num_places + sequence.num_choices

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-_num_tokens(sequence) // self._block_tables.cache.block_size) + sequence.num_choices


def _num_tokens(sequence: Sequence) -> int:
    return len(sequence.tokens) + sequence.num_leased
