"""Reader of the expressions of Lark's terminals: an expression in Python's syntax becomes nodes.

The nodes match no text that Python's expression does not match as a whole; they may match fewer: classes such as `\\d`, and what is
excluded beside them or without case, are of ASCII alone. Look-around, back-references, anchors and lazy repetitions are refused. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]  # `compile` takes seconds for what is only to be read

from gateway.structured import charset
from gateway.structured.charset import Ranges
from gateway.structured.ebnf import Chars, Either, Node, Repeat, Sequence
from gateway.structured.regex import MAX_DEPTH, Pattern, RegexError

_ASCII: Ranges = ((0, 0x7F),)
_CASES = ((0x41, 0x5A), (0x61, 0x7A))
_CLASS = re.compile(r"\\[dwsDWS]")


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


class _Terminal(Pattern):
    def __init__(self, pattern: str, *, any_case: bool, dot_all: bool) -> None:
        super().__init__(pattern)
        self._any_case = any_case
        self._any = charset.ALL if dot_all else charset.without(charset.ALL, charset.chars("\n"))
        self._depth = 0

    def read(self) -> Node:
        found = self._alternatives()
        if self._peek():
            raise RegexError("A group is closed that was not opened.")
        return found

    def _alternatives(self) -> Node:
        found = [self._alternative()]
        while self._skip("|"):
            found.append(self._alternative())
        return found[0] if len(found) == 1 else Either(tuple(found))

    def _alternative(self) -> Node:
        items: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._item())
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node:
        atom = self._atom()
        times = self._repeats()
        if not times:
            return atom
        if self._peek() in ("*", "+", "?", "{"):
            raise RegexError("A repetition is repeated, or lazy.")
        if times in "*+?":
            return Repeat(atom, int(times == "+"), 1 if times == "?" else None)
        low, _, high = times[1:-1].partition(",")
        return Repeat(atom, int(low), int(high) if high else None)

    def _atom(self) -> Node:
        char = self._take()
        match char:
            case "(":
                return self._group()
            case "[":
                return Chars(self._of_class())
            case ".":
                return Chars(self._any)
            case "\\":
                return self._chars(self._escape(in_class=False))
            case "^" | "$":
                raise RegexError("Anchors are not supported.")
            case "*" | "+" | "?" | "{":
                raise RegexError("A repetition has nothing to repeat.")
        return self._chars(self._one(char))

    def _group(self) -> Node:
        if self._skip("?") and not self._skip(":"):
            self._group_name()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RegexError(f"Groups are nested deeper than {MAX_DEPTH}.")
        body = self._alternatives()
        if not self._skip(")"):
            raise RegexError("A group is not closed.")
        self._depth -= 1
        return body

    def _chars(self, ranges: Ranges) -> Node:
        return Chars(_folded(ranges) if self._any_case else ranges)

    def _of_class(self) -> Ranges:
        begun, is_negated = self._place, self._peek() == "^"
        if self._pattern.startswith("]", begun + is_negated):
            raise RegexError("A class that begins with ']' must have it as '\\]'.")
        found = self._class()
        if not is_negated:
            return _folded(found) if self._any_case else found
        excluded = charset.without(charset.ALL, found)
        if self._any_case:
            excluded = _folded(excluded)
        found = charset.without(charset.ALL, excluded)
        # Python excludes more than ASCII here, such as other digits, and letters whose other case is not in ASCII.
        if self._any_case or _CLASS.search(self._pattern, begun, self._place):
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
