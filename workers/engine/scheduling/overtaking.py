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

from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.sequences.sequence import Attempt, Sequence, Status

MAX_PASSED = 64
"""A preempted sequence is passed by at most this multiple of its own tokens."""
MAX_LOOKED = 16
"""Sequences that are asked whether they fit before it, until one does. Each look reads the prefix cache, and a thousand
tenants may wait."""


class Overtaking:
    """The attempts that passed the preempted sequence at the head of one tier."""

    def __init__(self, block_tables: BlockTables) -> None:
        self._block_tables = block_tables
        self._head: Sequence | None = None
        self._num_tokens = 0
        self._passed: dict[Attempt, int] = {}
        """Attempts that passed, with the number of blocks that each was expected to hold with its lease."""

    def tick(self) -> None:
        """Begins a plan. Whoever passed a sequence that waits no more is forgotten."""
        if self._head is not None and self._head.status is not Status.PREEMPTED:
            self._head = None
            self._num_tokens, self._passed = 0, {}

    def allows(self, sequence: Sequence, head: Sequence, num_spare: int) -> bool:
        """Returns whether a sequence may enter before the head, which needs `num_spare` blocks beyond its own."""
        if head is not self._head:
            self._head, self._num_tokens, self._passed = head, 0, {}
        if sequence.attempt.message.tenant == head.attempt.message.tenant:
            return False
        if self._num_tokens + _num_tokens(sequence) > MAX_PASSED * len(head.tokens):
            return False
        cache = self._block_tables.cache
        self._passed = {attempt: number for attempt, number in self._passed.items() if not attempt.end_reason}
        num_held = sum(max(number, attempt.residency.num_blocks) for attempt, number in self._passed.items())
        if head.in_gang:
            num_held += head.attempt.residency.num_blocks  # they are not given back before the head runs
        num_needed = -(-len(head.tokens) // cache.block_size) + num_spare + self._num_blocks(sequence)
        return num_held + num_needed <= cache.num_blocks - 1 - cache.num_pinned

    def passed(self, sequence: Sequence) -> None:
        """Records that the sequence entered before the head."""
        self._num_tokens += _num_tokens(sequence)
        attempt = sequence.attempt
        self._passed[attempt] = self._passed.get(attempt, 0) + self._num_blocks(sequence)

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-_num_tokens(sequence) // self._block_tables.cache.block_size) + sequence.num_choices


def _num_tokens(sequence: Sequence) -> int:
    attempt = sequence.attempt
    return len(sequence.tokens) + max(0, min(attempt.lease.left, attempt.message.max_tokens * sequence.num_choices))
