"""The lexemes of a grammar's text, and a reader's place among them. The module is pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gateway.structured.rules import RulesError

Lexeme = tuple[str, str]
"""The kind of a lexeme, and its text."""


def split(text: str, pattern: re.Pattern[str]) -> Iterator[Lexeme]:
    """Yields the lexemes without those of the kind `space`. Each kind is a named group of the pattern. Raises
    `RulesError`.
    """
    place = 0
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            line = text.count("\n", 0, place) + 1
            raise RulesError(f"what stands in line {line} cannot be read")
        place = match.end()
        kind = match.lastgroup
        assert kind is not None
        if kind != "space":
            yield kind, match[kind]


class Lexemes:
    """Lexemes that are read from the first to the last."""

    def __init__(self, lexemes: Sequence[Lexeme]) -> None:
        self._lexemes = lexemes
        self._place = 0

    @property
    def has_ended(self) -> bool:
        return self._place == len(self._lexemes)

    def kind(self, ahead: int = 0) -> str:
        """Returns the kind of the lexeme that is read next, or of one behind it; empty at the end."""
        place = self._place + ahead
        return self._lexemes[place][0] if place < len(self._lexemes) else ""

    def at(self, marks: str) -> bool:
        """Returns whether one of these marks is read next."""
        return self.kind() == "mark" and self._lexemes[self._place][1] in marks

    def next(self) -> Lexeme:
        """Reads a lexeme. Raises `RulesError` at the end."""
        if self.has_ended:
            raise RulesError("the grammar ends too early")
        self._place += 1
        return self._lexemes[self._place - 1]

    def skip(self, mark: str) -> bool:
        """Reads a mark if it comes next, and returns whether it did."""
        found = self.at(mark)
        self._place += found
        return found

    def skip_kind(self, kind: str) -> bool:
        found = self.kind() == kind
        self._place += found
        return found

    def expect(self, kind: str) -> str:
        """Reads a lexeme of this kind and returns its text. Raises `RulesError`."""
        found, text = self.next()
        if found != kind:
            raise RulesError(f"a {kind} should stand where {text.strip()[:40] or 'the line ends'} stands")
        return text
