"""The parts of a choice: text, reasoning and tool calls, and the interface of the parsers that find them in a model's
output.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The begin of a tool call. `index` counts the calls of the choice from 0."""

    index: int
    id: str
    name: str
    is_custom: bool = False
    """Whether the tool takes a text. What follows is then the text, and not JSON."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the JSON text of a call's arguments, or of the text that a custom tool gets. The fragments of a call
    add up to one JSON object, or to the text.
    """

    index: int
    text: str
    is_custom: bool = False


Part = Text | Reasoning | CallBegin | CallArguments

Span = tuple[int, int | None]
"""A range of characters of the output; the end is None while the range is open."""


class OutputParser(Protocol):
    """The parser of one choice, which is pure.

    Parts come in order. After the begin of a call only its arguments come, until the next begin or a text.
    """

    @property
    def has_calls(self) -> bool:
        """Whether at least one call is complete."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted: the one call that is allowed is complete."""
        ...

    @property
    def reasoning(self) -> Sequence[Span]:
        """The ranges of the output's characters that are reasoning, with their tags."""
        ...

    def push(self, text: str) -> list[Part]:
        """Adds a piece of the output. No character that belongs to the answer is lost or comes twice."""
        ...

    def end(self, *, is_cut: bool = False) -> list[Part]:
        """Ends the output and returns what was held back. A text that began as a call and is none is a text. Where the
        output `is_cut`, because the model would have gone on, nobody knows what it is, and it is left out.
        """
        ...


class Folded(msgspec.Struct, frozen=True):
    """All parts of a choice, each kind in one piece."""

    text: str
    reasoning: str
    calls: Sequence[tuple[CallBegin, str]]
    """Each call with the JSON text of its arguments, or with the text for a custom tool."""

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Folded:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[tuple[CallBegin, list[str]]] = []
        for part in parts:
            match part:
                case Text(text):
                    texts.append(text)
                case Reasoning(text):
                    thoughts.append(text)
                case CallBegin():
                    calls.append((part, []))
                case CallArguments(_, text):
                    calls[-1][1].append(text)
        return cls("".join(texts), "".join(thoughts), [(begin, "".join(pieces)) for begin, pieces in calls])


MakeParser = Callable[[], OutputParser]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
