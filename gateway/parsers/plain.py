"""The parser of an output that is text and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.parsers.parts import Part, Span, Text


class PlainText:
    has_calls = False
    is_over = False
    reasoning: Sequence[Span] = ()

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def end(self, *, is_cut: bool = False) -> list[Part]:
        return []
