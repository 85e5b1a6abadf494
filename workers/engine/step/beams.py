"""The part of beam search that moves blocks: a step's best tokens become the next beams of each search, by fork and
release.

`sequences.beam` decides, and the blocks are moved here. All beams of a search are in a step or none is. No step is in
flight while beams are moved, so the blocks that only an abandoned beam held are free at once.

A search is charged for every token that is computed for a live beam, so `width` tokens for each of its steps, whatever
becomes of the beams. An end token after which no beam continues is not computed, and costs nothing more.
"""

from __future__ import annotations

import logging

from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.sequences.beam import Extension
from workers.engine.sequences.sequence import Attempt, Sequence, Status
from workers.engine.step.attempts import Attempts
from workers.engine.step.step_messages import StepMessages
from workers.engine.values.plan import SampledToken
from workers.protocol.messages import TopLogprob

logger = logging.getLogger(__name__)


class Beams:
    def __init__(self, scheduler: Scheduler, attempts: Attempts, outbox: StepMessages) -> None:
        self._scheduler = scheduler
        self._attempts = attempts
        self._outbox = outbox
        self._offers: dict[Attempt, dict[Sequence, tuple[TopLogprob, ...]]] = {}

    def offer(self, sequence: Sequence, drawn: SampledToken) -> None:
        """Records the best tokens that may follow one beam."""
        assert drawn.logprob is not None
        self._offers.setdefault(sequence.attempt, {})[sequence] = drawn.logprob.top

    def select(self) -> None:
        """Chooses the next beams of all searches in the step. It is called after the step's rows."""
        gathered, self._offers = self._offers, {}
        for attempt, offers in gathered.items():
            if attempt.sequences[0].status is Status.ENDED:
                continue
            try:
                self._advance(attempt, offers)
            except Exception:  # whatever it was, the other rows of the step had no part in it
                logger.exception("a search did not go on", extra={"event": "request_broken"})
                self._attempts.broken(attempt)

    def _advance(self, attempt: Attempt, offers: dict[Sequence, tuple[TopLogprob, ...]]) -> None:
        search, beams = attempt.search, attempt.sequences
        assert search is not None
        assert len(offers) == len(beams), "beams of a search were scheduled apart"
        attempt.take_unforked(search.width)
        ordered = [offers[beam] for beam in beams]
        is_last = len(beams[0].tokens) + 1 >= attempt.end_len
        self._outbox.progress(attempt)
        kept = search.advance(ordered, [beam.output for beam in beams], is_last=is_last)
        if not kept:
            self._attempts.finish_search(attempt)
            return
        placed = place(kept, search.width)
        search.grow(placed, ordered)
        self._move(attempt, placed)
        if attempt.lease.exhausted:
            self._attempts.out_of_budget(attempt)

    def _move(self, attempt: Attempt, placed: list[Extension]) -> None:
        """Forks and ends sequences so that they are the new beams. A beam that nothing continues gives back its blocks
        before the others fork."""
        parents = attempt.sequences
        heirs = {extension.parent for extension in placed}
        for index, parent in enumerate(parents):
            if index not in heirs:
                self._scheduler.end(parent)
        attempt.sequences = [
            parents[extension.parent]
            if extension.parent == index
            else self._scheduler.branch(parents[extension.parent], index)
            for index, extension in enumerate(placed)
        ]
        for sequence, extension in zip(attempt.sequences, placed, strict=True):
            sequence.append(extension.token)


def place(kept: list[Extension], width: int) -> list[Extension]:
    """Orders the extensions. The first extension of each beam keeps the beam's index, and the others take the indices
    of beams that end, so that few blocks change hands."""
    placed: list[Extension | None] = [None] * width
    others: list[Extension] = []
    for extension in kept:
        if placed[extension.parent] is None:
            placed[extension.parent] = extension
        else:
            others.append(extension)
    rest = iter(others)
    return [extension or next(rest) for extension in placed]
