"""Proposals from a small model of the same vocabulary. It draws with the same noise of (seed, position) as the large
model, so that equal distributions give equal tokens (Gumbel coupling; acceptance arXiv 2408.07978).

Its KV is a second tensor under the same block ids: the owner of a sequence's block owns the draft's part of it. Nothing
in it is ever trusted. Positions are computed again if their block may have changed owners, and wrong KV costs accepted
proposals, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cache.tree.handle import Handle
from workers.engine.sequences.sequence import Sequence
from workers.engine.speculate.proposer import Ask, Guess, Proposer
from workers.engine.values.plan import Row, SampleSpec, StepRunner

CHUNK = 512
"""Largest number of tokens that the draft reads before it guesses, of all sequences together. A step waits for them."""


@dataclass(slots=True)
class Read:
    """State of one sequence: the tokens of which the draft model has KV, and the blocks that hold it."""

    handle: Handle | None = None
    """The sequence's own handle when this was written. A sequence that lost its blocks has another handle now."""
    tokens: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


class DraftProposer(Proposer[Read]):
    needs_blocks = True

    def __init__(self, runner: StepRunner) -> None:
        """Creates the proposer. `runner` is the draft's own, with as many blocks of the same size as the model's."""
        self._runner = runner

    def begin(self) -> Read:
        return Read()

    def propose(self, asks: Seq[Ask[Read]]) -> list[Guess]:
        size, longest = self._runner.block_size, self._runner.max_model_len
        found: list[Guess] = [[] for _ in asks]
        open_ = []
        for place, ask in enumerate(asks):
            sequence, read = ask.sequence, ask.state
            number = min(ask.num_tokens, longest - len(sequence.tokens))
            if number > 0:
                tokens = list(sequence.tokens)
                first = min(_num_valid(read, sequence, size), len(tokens) - 1)
                open_.append(_Guessing(place, sequence, tokens, first, number))
                read.handle, read.tokens, read.block_ids = sequence.handle, tokens, list(sequence.block_ids)
        running = ready = self._catch_up(open_)
        while running:
            self._draw(running)
            running = [one for one in running if one.num_left]
        for one in ready:
            found[one.place] = one.tokens[len(one.sequence.tokens) :]
            one.tokens.pop()  # the list is that of `Read`, and the last guess has no KV
        return found

    def _catch_up(self, asked: list[_Guessing]) -> list[_Guessing]:
        """Returns the sequences that guess now: those with the fewest unread tokens, up to `CHUNK`. The next one reads
        what is left of `CHUNK` and goes on in the next step, because prompts are long."""
        num_left, ready = CHUNK, list[_Guessing]()
        for one in sorted(asked, key=lambda one: one.num_unread):
            if one.num_unread <= num_left:
                num_left -= one.num_unread
                ready.append(one)
                continue
            del one.tokens[one.first + num_left :]  # the list is that of `Read`
            if num_left:
                self._runner.execute([Row(one.tokens[one.first :], one.first, one.sequence.block_ids)])
                num_left = 0
        return ready

    def _draw(self, running: list[_Guessing]) -> None:
        """Draws one more token for each sequence."""
        results = self._runner.execute([one.row() for one in running])
        for one, result in zip(running, results, strict=True):
            one.first = len(one.tokens)
            one.tokens.append(result.drawn[0].token)
            one.num_left -= 1


@dataclass(slots=True)
class _Guessing:
    place: int
    sequence: Sequence
    tokens: list[int]
    """Tokens of the sequence, followed by the guesses."""
    first: int
    """Index of the first token without KV."""
    num_left: int

    @property
    def num_unread(self) -> int:
        return len(self.tokens) - self.first

    def row(self) -> Row:
        sequence = self.sequence
        attempt = sequence.attempt
        output = self.tokens[len(attempt.prompt) :]
        params, position = attempt.message.sampling, len(self.tokens)
        draw = SampleSpec(params, sequence.seed, position, attempt.prompt, output)
        return Row(self.tokens[self.first :], self.first, sequence.block_ids, (draw,))


def _num_valid(read: Read, sequence: Sequence, block_size: int) -> int:
    """Returns the number of positions from the start whose KV the draft model can still use."""
    if read.handle is not sequence.handle:
        return 0
    blocks = _common(read.block_ids, sequence.block_ids) * block_size
    return min(blocks, _common(read.tokens, sequence.tokens))


def _common(one: Seq[int], other: Seq[int]) -> int:
    """Returns the length of the common beginning."""
    number = min(len(one), len(other))
    if list(one[:number]) == list(other[:number]):
        return number
    return next(i for i in range(number) if one[i] != other[i])
