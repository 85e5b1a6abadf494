"""The searches of a worker's requests: a step's best tokens become the next beams of each search, by fork and release.

`search` decides, and the blocks are moved here. To the rest of the engine the beams of a search are a gang: all of them
are in a step or none is. No step is in flight while beams are moved, so the blocks that only an abandoned beam held are
free at once.

A search is charged for every token that is computed for a live beam, so `width` tokens for each of its steps, whatever
becomes of the beams. An end token after which no beam continues is not computed, and costs nothing more.
"""

from __future__ import annotations

from workers.engine.beams.search import BeamSearch, Extension, Hypothesis
from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.sequences.sequence import Attempt, Sequence
from workers.engine.values.errors import Refusal
from workers.engine.values.plan import SampledToken, SampleSpec
from workers.protocol.messages import SamplingParams, TopLogprob


class Beams:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._searches: dict[Attempt, BeamSearch] = {}
        self._offers: dict[Attempt, dict[Sequence, tuple[TopLogprob, ...]]] = {}

    def begin(self, attempt: Attempt) -> None:
        """Begins the search of a request that asks for one."""
        if attempt.message.beams is not None:
            self._searches[attempt] = search_of(attempt)

    def leave(self, attempt: Attempt) -> None:
        """Forgets the search of an attempt that ended."""
        self._searches.pop(attempt, None)

    def draw(self, sequence: Sequence) -> SampleSpec:
        """Returns the draw of a beam's row. Of its result only the best tokens are used."""
        attempt = sequence.attempt
        params = SamplingParams(seed=0, temperature=0.0, logprobs=self._searches[attempt].num_offered)
        position = len(sequence.tokens) + sequence.num_pending
        return SampleSpec(params, 0, position, attempt.prompt, sequence.output)

    def offer(self, sequence: Sequence, drawn: SampledToken) -> None:
        """Records the best tokens that may follow one beam."""
        assert drawn.logprob is not None
        self._offers.setdefault(sequence.attempt, {})[sequence] = drawn.logprob.top

    def take_offered(self) -> dict[Attempt, dict[Sequence, tuple[TopLogprob, ...]]]:
        """Returns the attempts whose beams were in the step, with the tokens offered to each beam."""
        offers, self._offers = self._offers, {}
        return offers

    def advance(self, attempt: Attempt, offers: dict[Sequence, tuple[TopLogprob, ...]]) -> list[Hypothesis] | None:
        """Chooses the next beams of a search. It is called after the step's rows. Returns the best texts if the search
        is over, else None."""
        search, beams = self._searches[attempt], attempt.sequences
        assert len(offers) == len(beams), "beams of a search were scheduled apart"
        attempt.take_unforked(search.width)
        ordered = [offers[beam] for beam in beams]
        is_last = len(beams[0].tokens) + 1 >= attempt.end_len
        kept = search.advance(ordered, [beam.output for beam in beams], is_last=is_last)
        if not kept:
            return search.found
        placed = place(kept, search.width)
        search.grow(placed, ordered)
        self._move(attempt, placed)
        return None

    def cut(self, attempt: Attempt) -> list[Hypothesis]:
        """Ends a search because its budget is used up. Returns the texts that it has."""
        search = self._searches[attempt]
        search.cut([beam.output for beam in attempt.sequences])
        return search.found

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


def search_of(attempt: Attempt) -> BeamSearch:
    """Returns a new search for a request that asks for one."""
    message = attempt.message
    assert message.beams is not None
    return BeamSearch(message.num_choices, message.beams.length_penalty, attempt.end_ids, message.sampling.logprobs)


def check(attempt: Attempt, capacity: int, block_size: int, vocab_size: int) -> None:
    """Checks that a whole search fits a pool of `capacity` blocks. It loses and gets its blocks as a whole, and the
    beams may not share after a preemption what they share now. Raises `Refusal`."""
    search = search_of(attempt)
    if search.num_candidates > vocab_size:
        raise Refusal("internal", "the request has more beams than the vocabulary feeds")
    if search.width * -(-attempt.end_len // block_size) > capacity:
        most = capacity // search.width * block_size
        raise Refusal(
            "too_long",
            f"{search.width} beams of {attempt.end_len} tokens do not fit this worker, which holds {most} of each",
        )


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
