"""Sequences that enter before a preempted one that does not fit yet. The module is pure.

A preempted sequence keeps its place at the head of its tier, and a long one may wait there until many others ended. The
law, which holds for each tier by itself:

1. Only other tenants' sequences pass it, and only those that fit beside it: it and all that passed it, with their leases,
   fit the pool together and have places together. So it never waits for more than what ran before it and what passed it
   while that ran: when these have ended, it enters before anybody else.
2. They bring at most `MAX_PASSED` times its own tokens, leases included. Where the first rule is too generous, as with
   blocks that floors keep, nobody enters any more until it has its blocks.

The first rule alone would let a stream of short requests hold what the pool cannot give twice, and the second one alone
would let them hold all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.sequences.sequence import Attempt, Sequence, Status

MAX_PASSED = 64
"""A preempted sequence is passed by at most this multiple of its own tokens."""
MAX_LOOKED = 16
"""Preempted sequences, and as many that never ran, that are asked whether they fit before it, until one does. Each look
reads the prefix cache, and a thousand tenants may wait."""


@dataclass(slots=True)
class _Passed:
    """The attempts that passed one preempted sequence since it was preempted."""

    num_tokens: int = 0
    attempts: dict[Attempt, int] = field(default_factory=dict)
    """The number of blocks that each was expected to hold with its lease."""


class Overtaking:
    """The attempts that passed the preempted sequences of one tier, of which the oldest is the head."""

    def __init__(self, block_tables: BlockTables) -> None:
        self._block_tables = block_tables
        self._passed: dict[Sequence, _Passed] = {}

    def tick(self) -> None:
        """Begins a plan. Whoever passed a sequence that waits no more is forgotten."""
        self._passed = {head: passed for head, passed in self._passed.items() if head.status is Status.PREEMPTED}

    def allows(self, sequence: Sequence, head: Sequence, num_spare: int) -> bool:
        """Returns whether a sequence may enter before the head, which needs `num_spare` blocks beyond its own."""
        if sequence.attempt.message.tenant == head.attempt.message.tenant:
            return False
        passed = self._passed.setdefault(head, _Passed())
        if passed.num_tokens + _num_tokens(sequence) > MAX_PASSED * len(head.tokens):
            return False
        cache = self._block_tables.cache
        passed.attempts = {attempt: number for attempt, number in passed.attempts.items() if not attempt.end_reason}
        num_held = sum(max(number, attempt.residency.num_blocks) for attempt, number in passed.attempts.items())
        if head.in_gang:
            num_held += head.attempt.residency.num_blocks  # they are not given back before the head runs
        num_needed = -(-len(head.tokens) // cache.block_size) + num_spare + self._num_blocks(sequence)
        return num_held + num_needed <= cache.num_blocks - 1 - cache.num_pinned

    def passed(self, sequence: Sequence, head: Sequence) -> None:
        """Records that the sequence entered before the head, which allowed it."""
        passed, attempt = self._passed[head], sequence.attempt
        passed.num_tokens += _num_tokens(sequence)
        passed.attempts[attempt] = passed.attempts.get(attempt, 0) + self._num_blocks(sequence)

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-_num_tokens(sequence) // self._block_tables.cache.block_size) + sequence.num_choices


def _num_tokens(sequence: Sequence) -> int:
    return len(sequence.tokens) + sequence.num_leased
