"""Regular expressions in the syntax that JSON Schema, Python and JavaScript share, written anew for the grammar library.

The module is pure. It supports whole characters, groups, alternatives, repetition and classes. Look-around,
back-references, word boundaries and flags are refused. Anchors are supported only at the ends of an alternative of the
outermost level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from gateway.structured import charset
from gateway.structured.charset import Ranges

Part = TypeVar("Part")

MAX_DEPTH = 64
MAX_REPEAT = 10_000

_DIGIT = charset.union([(0x30, 0x39)])
_WORD = charset.union([*_DIGIT, (0x41, 0x5A), (0x61, 0x7A), (0x5F, 0x5F)])
_SPACE = charset.chars(" \t\n\r\f\v\u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff")
_SPACE = charset.union([*_SPACE, (0x2000, 0x200A)])
_CLASSES: dict[str, Ranges] = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): charset.without(charset.ALL, found) for name, found in _CLASSES.items()}
_ANY = charset.without(charset.ALL, charset.chars("\n\r\u2028\u2029"))
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_AROUND = "(?s:.*)"
IN_JSON = charset.without(charset.ALL, ((0, 7), (11, 11), (14, 31)))
"""All characters but the control characters that only `\\u` writes in JSON, which the grammar never does. The library takes
a class with all control characters for every escape, `\\"` and `\\\\` too, whatever the class excludes."""


class RegexError(ValueError):
    """One sentence that says what is not supported."""


def whole(pattern: str) -> str:
    """Returns an expression of the texts that match from their first to their last character. Raises `RegexError`."""
    return _Writer(pattern, search=False).read()


def anywhere(pattern: str) -> str:
    """Returns an expression of the whole strings of JSON in which the pattern matches somewhere, as JSON Schema defines
    it. Raises `RegexError`.
    """
    return _Writer(pattern, search=True, within=IN_JSON).read()


class Reader(ABC, Generic[Part]):
    """Reads an expression from its first to its last character. What it is read into are parts: texts, or nodes."""

    def __init__(self, pattern: str, any_char: Ranges, anchors: str) -> None:
        """Creates a reader. `any_char` is what a dot stands for, and `anchors` the sentence about anchors inside."""
        self._pattern = pattern
        self._any_char = any_char
        self._anchors = anchors
        self._place = 0
        self._depth = 0

    def read(self) -> Part:
        """Returns the whole expression. Raises `RegexError`."""
        body = self._alternatives()
        if self._peek():
            raise RegexError("A group is closed that was not opened.")
        return body

    # --- structure ---

    @abstractmethod
    def _either(self, parts: list[Part]) -> Part:
        """Returns one of the parts, of which there are two or more."""

    @abstractmethod
    def _alternative(self) -> Part:
        """Reads up to the next `|` or the end of the group."""

    @abstractmethod
    def _one_of(self, ranges: Ranges) -> Part:
        """Returns one character of the set."""

    def _alternatives(self) -> Part:
        found = [self._alternative()]
        while self._skip("|"):
            found.append(self._alternative())
        return found[0] if len(found) == 1 else self._either(found)

    def _atom(self) -> Part:
        char = self._take()
        match char:
            case "(":
                return self._group()
            case "[":
                return self._one_of(self._class())
            case ".":
                return self._one_of(self._any_char)
            case "\\":
                return self._one_of(self._escape(in_class=False))
            case "^" | "$":
                raise RegexError(self._anchors)
            case "*" | "+" | "?" | "{":
                raise RegexError("A repetition has nothing to repeat.")
        return self._one_of(self._one(char))

    def _group(self) -> Part:
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

    # --- characters of the pattern ---

    def _peek(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise RegexError("The expression ends too early.")
        self._place += 1
        return char

    def _skip(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._place)
        if found:
            self._place += len(text)
        return found

    def _repeats(self) -> str:
        char = self._peek()
        if char and char in "*+?":
            return self._take()
        if char != "{":
            return ""
        self._take()
        low = self._number()
        high: int | None = low
        if self._skip(","):
            high = None if self._peek() == "}" else self._number()
        if not self._skip("}") or low is None or (high is not None and high < low):
            raise RegexError("A repetition in braces must be {m}, {m,} or {m,n}.")
        if max(low, high or 0) > MAX_REPEAT:
            raise RegexError(f"At most {MAX_REPEAT} repetitions are supported.")
        return f"{{{low},{'' if high is None else high}}}"

    def _number(self) -> int | None:
        start = self._place
        while self._peek().isascii() and self._peek().isdigit():
            self._place += 1
        digits = self._pattern[start : self._place]
        return min(int(digits[:9]), MAX_REPEAT + 1) if digits else None

    def _group_name(self) -> None:
        self._skip("P")
        if not self._skip("<") or self._peek() in ("=", "!"):
            raise RegexError("Look-around, flags and conditions are not supported.")
        while self._take() != ">":
            pass

    # --- sets of characters ---

    def _class(self) -> Ranges:
        negated = self._skip("^")
        found: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._class_item()
            if self._peek() == "-" and self._pattern[self._place + 1 : self._place + 2] != "]":
                self._take()
                high = self._class_item()
                if len(low) != 1 or len(high) != 1 or low[0][0] > high[0][1]:
                    raise RegexError("A range in a character class ends before it begins, or has a class as an end.")
                low = charset.common(((low[0][0], high[0][1]),), charset.ALL)
            found += low
        ranges = charset.union(found)
        if negated:
            ranges = charset.without(charset.ALL, ranges)
        if not ranges:
            raise RegexError("A class matches nothing.")
        return ranges

    def _class_item(self) -> Ranges:
        char = self._take()
        return self._escape(in_class=True) if char == "\\" else self._one(char)

    def _escape(self, *, in_class: bool) -> Ranges:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS:
            if char == "0" and self._peek().isdigit():
                raise RegexError("Octal escapes are not supported.")
            return self._code(_CONTROLS[char])
        if char == "b" and in_class:
            return self._code(8)
        if char in ("x", "u"):
            return self._code(self._hex(2 if char == "x" else 4))
        if char.isalnum():
            raise RegexError("An escape is not supported.")
        return self._one(char)

    def _hex(self, num_digits: int) -> int:
        digits = "".join(self._take() for _ in range(num_digits))
        try:
            return int(digits, 16)
        except ValueError:
            raise RegexError("An escape is not a number.") from None

    def _one(self, char: str) -> Ranges:
        return self._code(ord(char))

    def _code(self, code: int) -> Ranges:
        if 0xD800 <= code <= 0xDFFF:
            raise RegexError("A surrogate is not a character.")
        return ((code, code),)


class _Writer(Reader[str]):
    """Writes the expression anew, with its sets of characters spelled out."""

    def __init__(self, pattern: str, *, search: bool, within: Ranges = charset.ALL) -> None:
        super().__init__(pattern, _ANY, "Anchors are supported at the ends only.")
        self._within = within
        self._around = _AROUND if search else ""

    def _either(self, parts: list[str]) -> str:
        return f"(?:{'|'.join(parts)})"

    def _alternative(self) -> str:
        outer = self._depth == 0
        begins = outer and self._skip("^")
        items: list[str] = []
        ends = False
        while self._peek() not in ("", "|", ")"):
            if outer and self._skip("$"):
                ends = True
                break
            items.append(self._item())
        if ends and self._peek() not in ("", "|"):
            raise RegexError("'$' is supported at the end only.")
        if outer and self._around:
            items = [*([] if begins else [self._around]), *items, *([] if ends else [self._around])]
        return "".join(items)

    def _item(self) -> str:
        atom = self._atom()
        repeats = self._repeats()
        if repeats and self._peek() in ("*", "+", "?", "{"):
            if self._peek() != "?":
                raise RegexError("A repetition is repeated; put it into a group.")
            self._take()  # whether the repetition is lazy does not change what matches
        return atom + repeats

    def _one_of(self, ranges: Ranges) -> str:
        return charset.one_of(charset.common(ranges, self._within))

    def _group(self) -> str:
        return f"(?:{super()._group()})"
