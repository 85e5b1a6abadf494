"""The reading side and the writing side of a parser: output comes in pieces of any size, and parts go out.

A format is a generator: it reads by the methods below, and yields where it needs more output to go on. So each format
is written as if the whole output were there, and cannot depend on where it was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from gateway.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Span, Text, new_call_id
from gateway.schema.custom_tools import InputText
from gateway.schema.tools import Tools

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A generator that yields where more output is needed, and returns a `T`."""
Format = Callable[["Scan"], Wait[None]]

SPACES = " \n\r\t"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Scan:
    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.is_closed = False
        """Whether the output has ended."""
        self.num_complete = 0
        self.reasoning: list[Span] = []
        self.out: list[Part] = []
        self._buffer = ""
        self._place = 0
        """The number of characters that were read."""
        self._kept: list[str] | None = None
        self._num_begun = 0
        self._input: InputText | None = None
        """Reads the text for a custom tool, while its call is written."""
        self._blank = ""
        """White space that is no text yet: it is dropped in front of a call."""
        self._has_text = False
        self._named = ""
        """The name of the call that is read and has not begun."""

    # Reading

    def feed(self, text: str) -> None:
        self._buffer += text

    @property
    def place(self) -> int:
        return self._place

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted, because the one call that is allowed is complete."""
        return self.num_complete > 0 and not self.tools.parallel

    def _more(self) -> Wait[bool]:
        """Waits for more output. Returns False at the end."""
        if self.is_closed:
            return False
        yield
        return True

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._place += size
        if self._kept is not None:
            self._kept.append(text)
        return text

    def peek(self) -> Wait[str]:
        """Returns the next character without reading it; "" at the end."""
        while not self._buffer:
            if not (yield from self._more()):
                return ""
        return self._buffer[0]

    def char(self) -> Wait[str]:
        """Reads one character; "" at the end."""
        if not (yield from self.peek()):
            return ""
        return self._take(1)

    def spaces(self) -> Wait[str]:
        """Reads white space."""
        found = ""
        while (one := (yield from self.peek())) and one in SPACES:
            found += self._take(1)
        return found

    def accept(self, *literals: str) -> Wait[str]:
        """Reads one of the literals if it comes next, the longest that fits; "" if none does."""
        while True:
            longer = [one for one in literals if len(one) > len(self._buffer) and one.startswith(self._buffer)]
            if not longer or self.is_closed:
                break
            yield
        fits = [one for one in literals if self._buffer.startswith(one)]
        return self._take(len(max(fits, key=len))) if fits else ""

    def run(self, ends: str, write: Callable[[str], None]) -> Wait[str]:
        """Reads and writes text in front of one of the characters, which is returned and not read; "" at the end."""
        while True:
            place = min((at for end in ends if (at := self._buffer.find(end)) >= 0), default=len(self._buffer))
            if place:
                write(self._take(place))
            if self._buffer:
                return self._buffer[0]
            if not (yield from self._more()):
                return ""

    def up_to(self, tags: Sequence[str], write: Callable[[str], None]) -> Wait[str]:
        """Reads and writes text until a tag, which is read and returned; "" at the end. What may begin a tag waits."""
        while True:
            places = [(place, -len(tag), tag) for tag in tags if (place := self._buffer.find(tag)) >= 0]
            if places:
                place, _, tag = min(places)
                if self.is_closed or not any(
                    one.startswith(self._buffer[place:]) for one in tags if len(one) > len(self._buffer) - place
                ):
                    write(self._take(place))
                    return self._take(len(tag))
                write(self._take(place))  # a longer tag may still come
            else:
                num_open = 0 if self.is_closed else _num_open(self._buffer, tags)
                write(self._take(len(self._buffer) - num_open))
            if not (yield from self._more()):
                return ""

    def word(self, ends: str, most: int = 256) -> Wait[str]:
        """Reads characters in front of one of `ends`, at most `most`; the end is not read."""
        found = ""
        while (one := (yield from self.peek())) and one not in ends and len(found) < most:
            found += self._take(1)
        return found

    def before(self, *tags: str) -> Wait[tuple[str, str]]:
        """Reads up to a tag, which is read too. Returns the text in front of it and the tag, which is "" at the end."""
        pieces: list[str] = []
        tag = yield from self.up_to(tags, pieces.append)
        return "".join(pieces), tag

    # Text that may be a call

    def keep(self, before: str = "") -> None:
        """Keeps `before` and what is read from here on, until a call begins, or `drop` or `restore`."""
        self._kept = [before]

    def drop(self) -> None:
        self._kept, self._named = None, ""

    def restore(self) -> str:
        """Returns what `keep` kept, and keeps no more."""
        kept = "".join(self._kept or ())
        self.drop()
        return kept

    def give_up(self, *marks: str) -> None:
        """Writes what `keep` kept as text, because it was no call. A rest of mere marks is dropped if the output has
        ended and already has calls: the model ended before it named a further one."""
        kept = self.restore()
        is_end = self.is_closed and not self._buffer and self.num_complete > 0
        named = kept
        for mark in marks:
            named = named.replace(mark, "")
        if not is_end or named.strip(SPACES):
            self.text(kept)

    # Writing

    def text(self, text: str) -> None:
        """Writes text. White space waits for what comes after it."""
        body = text.rstrip(SPACES)
        if body:
            self.out.append(Text(self._blank + body))
            self._has_text, self._blank = True, text[len(body) :]
        else:
            self._blank += text

    def flush(self) -> None:
        """Writes the white space at the end of a text. After a call it is no text."""
        if self._blank and (self._has_text or not self._num_begun):
            self.out.append(Text(self._blank))
        self._blank = ""

    def cut(self) -> None:
        """Ends an output that the model would have gone on with. What may be a mark or the head of a call is no text
        then, nor is white space that may stand in front of one. A call whose name is known begins.
        """
        if self._named:
            self.begin(self._named)
        elif not self.tools.may_call:
            self.flush()

    def thought(self, text: str) -> None:
        if text:
            self.out.append(Reasoning(text))

    def takes_name(self, name: str) -> bool:
        """Notes the name of the call that is read. Returns whether such a call may begin."""
        self._named = name if name in self.tools.allowed and not self.is_over else ""
        return bool(self._named)

    def begin(self, name: str) -> None:
        """Begins a call; the text in front of it is over."""
        self.drop()
        self._blank, self._has_text = "", False
        is_custom = name in self.tools.custom
        self._input = InputText() if is_custom else None
        self.out.append(CallBegin(self._num_begun, new_call_id(), name, is_custom))
        self._num_begun += 1

    def argument(self, text: str) -> None:
        """Writes a fragment of the arguments of the call that was begun last."""
        if self._input is not None:
            text = self._input.push(text)
        if text:
            self.out.append(CallArguments(self._num_begun - 1, text, self._input is not None))

    def string(self, *ends: str) -> Wait[bool]:
        """Writes what comes up to one of the tags as a string of JSON. Returns whether one of them came."""
        self.argument('"')
        tag = yield from self.up_to(ends, lambda text: self.argument(json.dumps(text, ensure_ascii=False)[1:-1]))
        self.argument('"' if tag else "")
        return bool(tag)

    def complete(self) -> None:
        """Notes that the arguments of the last call are complete."""
        self.num_complete += 1

    def call(self, name: str, arguments: dict[str, Any]) -> bool:
        """Writes a whole call. Returns False, and writes nothing, for arguments that JSON cannot say."""
        try:
            text = json_text(arguments)
        except (ValueError, RecursionError):
            return False
        self.begin(name)
        self.argument(text)
        self.complete()
        return True


def json_text(value: Any) -> str:
    """Returns what a model wrote as JSON. Halves of surrogate pairs, which an escape can name and UTF-8 cannot say, become
    U+FFFD. Raises ValueError for infinities, for NaN and for integers of thousands of digits, RecursionError.
    """
    return _SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))


ReadCall = Callable[[Scan, str], Wait[bool]]
"""Reads a call behind the tag that was read, and returns whether there was one."""


def behind(tags: Sequence[str], read: ReadCall, skipped: Sequence[str] = ()) -> Format:
    """Returns the format of a text in which calls begin with one of the tags. A tag without a call behind it is text;
    tags that are `skipped` are neither."""
    return partial(_behind, (*tags, *skipped), read, frozenset(skipped))


def _behind(tags: Sequence[str], read: ReadCall, skipped: frozenset[str], scan: Scan) -> Wait[None]:
    while tag := (yield from scan.up_to(tags, scan.text)):
        if tag in skipped:
            continue
        scan.keep(tag)
        if not (yield from read(scan, tag)):
            scan.give_up(tag)
        if scan.is_over:
            return


class Parser:
    """The parser (`gateway/parsers/parts.py`) of one choice, for any format."""

    def __init__(self, run: Format, tools: Tools) -> None:
        self._scan = Scan(tools)
        self._waiting: Wait[None] | None = run(self._scan)
        self._advance()

    @property
    def has_calls(self) -> bool:
        return self._scan.num_complete > 0

    @property
    def is_over(self) -> bool:
        return self._scan.is_over

    @property
    def reasoning(self) -> Sequence[Span]:
        return self._scan.reasoning

    def push(self, text: str) -> list[Part]:
        if not text or self.is_over:
            return []
        self._scan.feed(text)
        self._advance()
        return self._taken()

    def end(self, *, is_cut: bool = False) -> list[Part]:
        if is_cut:
            self._scan.cut()
            return self._taken()
        self._scan.is_closed = True
        self._advance()
        if not self.is_over:
            self._scan.flush()
        return self._taken()

    def _advance(self) -> None:
        if self._waiting is None:
            return
        try:
            next(self._waiting)
        except StopIteration:
            self._waiting = None

    def _taken(self) -> list[Part]:
        parts, self._scan.out = self._scan.out, []
        return _joined(parts)


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with neighbours of one kind as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        match last, part:
            case Text(before), Text(text):
                joined[-1] = Text(before + text)
            case Reasoning(before), Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(same, text) if index == same:
                joined[-1] = CallArguments(index, before + text, last.is_custom)
            case _:
                joined.append(part)
    return joined


def _num_open(text: str, tags: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that some tag begins with."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), longest, -1):
            if tag.startswith(text[len(text) - size :]):
                longest = size
                break
    return longest
