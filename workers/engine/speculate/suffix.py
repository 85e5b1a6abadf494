"""Proposals from what a namespace region has computed before: the tokens with which its texts continued after the same
tokens.

Each region has its own index. A sequence uses and extends only that of its last region, the same boundary that
the prefix tree has (cache/tree/namespaces.py). So nothing is ever proposed from another tenant's text, whose presence would
show in the speed. An index learns the tokens of a sequence that the tree took over in the sequence's own region.
Requests that may not write the cache add nothing.

The source of the idea is SuffixDecoding (arXiv 2411.04975). Here continuations are counted over the latest occurrences
of the longest match instead of in a suffix tree.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.engine.sequences.sequence import Sequence
from workers.engine.speculate.ngram import NgramIndex, Room, continuation, match_length
from workers.engine.speculate.proposer import Ask, Guess, Proposer

LONGEST_MATCH = 8
MAX_REGIONS = 256
MAX_TOKENS = 1 << 16
"""Largest number of tokens of one region. Beyond it the index begins anew."""
ALL_TOKENS = 1 << 20
"""Largest number of tokens of all regions, about 100 MB. Beyond it the region that was taught longest ago is forgotten."""
END = -1
"""Separator of two texts. Nothing continues across it."""


class RegionIndex:
    """Texts of one region, one after the other."""

    __slots__ = ("_index", "_taught", "tokens")

    def __init__(self, room: Room | None = None) -> None:
        self.tokens = array("i")
        self._index = NgramIndex(room)
        self._taught: tuple[int, int] | None = None
        """Serial and choice whose text is at the end."""

    def teach(self, owner: tuple[int, int], tokens: array[int]) -> None:
        """Appends more of a text. Pieces of one text are joined if no other text came between them."""
        if owner != self._taught:
            self.tokens.append(END)
            self._taught = owner
        self.tokens.extend(tokens)
        self._index.extend(self.tokens)

    def places(self, pair: tuple[int, int]) -> Iterator[int]:
        self._index.extend(self.tokens)  # there may not have been room for all
        return self._index.places(pair)

    def find(self, tail: array[int]) -> tuple[int, list[int]]:
        """Returns the length of the longest match, and the indices after the latest matches of that length."""
        if len(tail) < 2:
            return 0, []
        longest = 0
        places: list[int] = []
        for place in self.places((tail[-2], tail[-1])):
            length = match_length(self.tokens, place, tail, LONGEST_MATCH)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append(place + 1)
        return longest, places

    def continuation(self, places: list[int], num_tokens: int) -> list[int]:
        """Returns the tokens with which most of the given positions continue, token by token."""
        found: list[int] = []
        while len(found) < num_tokens:
            following = [(p, self.tokens[p]) for p in places if p < len(self.tokens)]
            counts = Counter(token for _, token in following if token != END)
            if not counts:
                break
            token = counts.most_common(1)[0][0]
            found.append(token)
            places = [p + 1 for p, other in following if other == token]
        return found


@dataclass(slots=True)
class Text:
    """State of one sequence."""

    index: NgramIndex = field(default_factory=NgramIndex)
    num_taught: int = 0
    """Number of its tokens that its region's index has seen."""


class SuffixProposer(Proposer[Text]):
    """A proposer that uses the longer match: in the sequence's own text, or in its region's."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._room = Room()
        self._regions: OrderedDict[bytes, RegionIndex] = OrderedDict()

    def begin(self) -> Text:
        return Text(NgramIndex(self._room))

    def begin_plan(self) -> None:
        self._room.refill()

    def propose(self, asks: Seq[Ask[Text]]) -> list[Guess]:
        for ask in asks:
            self._teach(ask.sequence, ask.state)
        return [self._one(ask) for ask in asks]

    def expects(self, sequence: Sequence, state: Text) -> bool:
        state.index.extend(sequence.tokens)
        region = self.region_of(sequence)
        return state.index.find(sequence.tokens) is not None or (
            region is not None and bool(region.find(sequence.tokens[-LONGEST_MATCH:])[0])
        )

    def forget(self) -> None:
        self._regions.clear()

    def region_of(self, sequence: Sequence) -> RegionIndex | None:
        return self._regions.get(_region(sequence))

    def _one(self, ask: Ask[Text]) -> Guess:
        tokens, index = ask.sequence.tokens, ask.state.index
        index.extend(tokens)
        own = index.find(tokens)
        region = self.region_of(ask.sequence)
        if region is not None:
            length, places = region.find(tokens[-LONGEST_MATCH:])
            if places and (own is None or length > own.length):
                return region.continuation(places, ask.num_tokens)
        return () if own is None else continuation(tokens, own.place, ask.num_tokens)

    def _teach(self, sequence: Sequence, state: Text) -> None:
        """Adds to the region's index what the tree holds of the sequence by now, as far as it is in its last region."""
        attempt, handle = sequence.attempt, sequence.handle
        assert handle is not None
        if not attempt.message.cache_write:
            return
        begin = attempt.path[-2].end if len(attempt.path) > 1 else 0
        first = max(begin, handle.num_tokens, state.num_taught)
        last = handle.num_tree_blocks * self._block_size
        if first >= last:
            return
        state.num_taught = last
        first = max(first, last - MAX_TOKENS + 1)  # a separator comes before it
        key = _region(sequence)
        region = self._regions.get(key)
        if region is None or len(region.tokens) + last - first >= MAX_TOKENS:
            region = self._regions[key] = RegionIndex(self._room)
        self._regions.move_to_end(key)
        region.teach(sequence.order, sequence.tokens[first:last])
        known = self._regions
        while len(known) > MAX_REGIONS or sum(len(one.tokens) for one in known.values()) > ALL_TOKENS:
            known.popitem(last=False)


def _region(sequence: Sequence) -> bytes:
    return sequence.attempt.path[-1].region
