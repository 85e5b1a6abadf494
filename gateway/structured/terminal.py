"""Reader of the expressions of Lark's terminals: an expression in Python's syntax becomes nodes.

The nodes match no text that Python's expression does not match as a whole; they may match fewer: classes such as `\\d`,
and what is excluded beside them or without case, are of ASCII alone. Look-around, back-references, anchors and lazy
repetitions are refused. The module is pure.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # `compile` takes seconds for what is only to be read

from gateway.structured import charset
from gateway.structured.charset import Ranges
from gateway.structured.regex import Reader, RegexError
from gateway.structured.rules import REPEATS, Chars, Node, Repeat, Sequence, either, sequence

_ASCII: Ranges = ((0, 0x7F),)
_CASES = ((0x41, 0x5A), (0x61, 0x7A))
_CLASS = re.compile(r"\\[dwsDWS]")

_INT = "[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_EXPONENT = "[eE][+-]?[0-9]+"
_FLOAT = f"(?:{_INT}{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"

COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": _INT,
    "SIGNED_INT": f"[+-]?{_INT}",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|{_INT})",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|{_INT})",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""The terminals of Lark's module `common`, as expressions of our own for the same texts."""

# Python's reader warns of classes that may mean something else one day, such as `[[]`. That is no news for an operator.
warnings.filterwarnings("ignore", r"Possible (nested set|set [a-z ]+) at position", FutureWarning)


def read(pattern: str, *, any_case: bool = False, dot_all: bool = False) -> Node:
    """Reads an expression. Raises `RegexError`.

    Python's own reader looks at it too, but does not compile it: that takes milliseconds for each wide class.
    """
    try:
        _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise RegexError(f"It is no expression: {error}.") from None
    return _Terminal(pattern, any_case=any_case, dot_all=dot_all).read()


def literal(text: str, *, any_case: bool = False) -> Node:
    """Returns the nodes of a fixed text."""
    return Sequence(tuple(_char(one, any_case) for one in text))


@lru_cache(1024)
def _char(one: str, any_case: bool) -> Chars:
    """Returns one node for all places of a character, of which a grammar may have hundreds of thousands."""
    return Chars(_folded(charset.chars(one)) if any_case else charset.chars(one))


class _Terminal(Reader[Node]):
    def __init__(self, pattern: str, *, any_case: bool, dot_all: bool) -> None:
        any_char = charset.ALL if dot_all else charset.without(charset.ALL, charset.chars("\n"))
        super().__init__(pattern, any_char, "Anchors are not supported.")
        self._any_case = any_case

    def _either(self, parts: list[Node]) -> Node:
        return either(parts)

    def _alternative(self) -> Node:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._item())
        return sequence(items)

    def _item(self) -> Node:
        atom = self._atom()
        times = self._repeats()
        if not times:
            return atom
        if self._peek() in ("*", "+", "?", "{"):
            raise RegexError("A repetition is repeated, or lazy.")
        if times in REPEATS:
            return Repeat(atom, *REPEATS[times])
        low, _, high = times[1:-1].partition(",")
        return Repeat(atom, int(low), int(high) if high else None)

    def _one_of(self, ranges: Ranges) -> Node:
        return Chars(_folded(ranges) if self._any_case else ranges)

    def _class(self) -> Ranges:
        begun, is_negated = self._place, self._peek() == "^"
        if self._pattern.startswith("]", begun + is_negated):
            raise RegexError("A class that begins with ']' must have it as '\\]'.")
        found = super()._class()
        if is_negated and self._any_case:
            found = charset.without(charset.ALL, _folded(charset.without(charset.ALL, found)))
        # Python excludes more than ASCII here, such as other digits, and letters whose other case is not in ASCII.
        if is_negated and (self._any_case or _CLASS.search(self._pattern, begun, self._place)):
            found = charset.common(found, _ASCII)
        return found

    def _escape(self, *, in_class: bool) -> Ranges:
        is_class = bool(_CLASS.match("\\" + self._peek()))
        found = super()._escape(in_class=in_class)
        return charset.common(found, _ASCII) if is_class else found


def _folded(ranges: Ranges) -> Ranges:
    """Returns the characters and the other cases of those in ASCII."""
    letters = [part for case in _CASES for part in charset.common(ranges, (case,))]
    return charset.union([*ranges, *((low ^ 0x20, high ^ 0x20) for low, high in letters)])
