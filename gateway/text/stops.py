"""Finds stop strings in a stream of pieces. It holds back text that may still begin a stop string, and reports
when one is complete.

A character costs at most two steps on average, whatever is held and however many stop strings there are. The first
characters of a request that resemble a stop string also cost a step or two for each stop string.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request as the automaton of Aho and Corasick ("Efficient string matching", 1975), which the
    choices of the request share. Each string has at least one character.

    A node stands for the beginning of a stop string: the longest that the text so far ends with. Node 0 is the empty
    one. The automaton grows by a level of nodes when a text may come that far, so a long stop string costs nothing
    before text resembles it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.firsts = frozenset(stop[0] for stop in stops)
        """The characters with which stop strings begin: a text without them leads from node 0 to node 0."""
        self.ends: dict[int, str] = {}
        """The longest stop string that is complete at a node. No node follows on such a one."""
        self._stops = tuple(stops)
        self._width = max(map(len, stops), default=0) + 1
        # Node i * width + d is at depth d of the stop string i, and its own next character leads to the node behind it.
        # Beginnings that strings share have the nodes of one of them, and a branch leads to where another one goes on.
        self._chars = "".join(stop.ljust(self._width) for stop in stops)
        self._branches: dict[tuple[int, str], int] = {}
        self._fails = array("I", [0]) * len(self._chars)
        """The node of the longest shorter beginning that the text ends with, too."""
        self._num_levels = 0
        self._nodes = [0] * len(stops)
        """Each stop string's node at the last level."""

    def num_open(self, node: int) -> int:
        """Returns the number of characters at the end of the text that a stop string begins with."""
        return node % self._width

    def walk(self, node: int, text: str) -> tuple[int, int]:
        """Goes on from a node. Returns the node at which it ends, and how many characters it read: all, or those up to
        the first node of `ends`.
        """
        for _ in range(self._num_levels, min(node % self._width + len(text), self._width - 1)):
            self._add_level()
        chars, branches, fails, ends = self._chars, self._branches, self._fails, self.ends
        for num_read, char in enumerate(text, 1):
            while chars[node] != char:
                child = branches.get((node, char), 0)
                if child or not node:
                    node = child
                    break
                node = fails[node]
            else:
                node += 1
            if node in ends:
                return node, num_read
        return node, len(text)

    def _add_level(self) -> None:
        depth = self._num_levels
        self._num_levels += 1
        for i, stop in enumerate(self._stops):
            node = self._nodes[i]
            # A string that goes on where another is complete is never complete first.
            if depth >= len(stop) or node in self.ends:
                continue
            char = stop[depth]
            if self._chars[node] == char:
                child = node + 1
            else:
                child = self._branches.setdefault((node, char), i * self._width + depth + 1)
            self._nodes[i] = child
            fail = self._fails[child] = self.walk(self._fails[node], char)[0] if node else 0
            if depth + 1 == len(stop):
                self.ends[child] = stop
            elif fail in self.ends:
                self.ends.setdefault(child, self.ends[fail])


class StopMatcher:
    """A matcher of stop strings in one text. The string that is complete first wins; of several that end at the same
    place, the longest.
    """

    def __init__(self, stops: StopStrings, include_stop: bool = False) -> None:
        self._stops = stops
        self._include = include_stop
        self._held = ""
        self._node = 0

    def push(self, piece: str) -> tuple[str, str | None]:
        """Adds a piece. Returns (text that may go out, the stop string that ended it or None). After an end, push no
        more.
        """
        if not self._node and self._stops.firsts.isdisjoint(piece):
            return piece, None
        text = self._held + piece
        self._node, num_read = self._stops.walk(self._node, piece)
        stop = self._stops.ends.get(self._node)
        if stop is not None:
            end = len(self._held) + num_read
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        num_out = len(text) - self._stops.num_open(self._node)
        self._held = text[num_out:]
        return text[:num_out], None

    def flush(self) -> str:
        """Returns the held text at the end of the text: it is no stop string after all."""
        text, self._held, self._node = self._held, "", 0
        return text
