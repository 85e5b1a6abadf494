"""The check of an input file: it finds the lines that can run and the faults of the others. The module is pure: bytes
in, values out.

It streams: it holds one line at a time and, for each good line, its position and sort key. Nothing is executed or
fetched. The content of `body` is checked when the line runs, and a fault there fails that line alone; only what the
file as a whole needs is checked here. No large part of a line is decoded, since lists of lists take fifty times their
bytes.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Container, Iterable, Iterator
from hashlib import blake2b
from typing import Any, Final, Literal, TypeVar

import msgspec

from accounting.batches.order import Placed, predicted_tokens, prefix_bytes, sort_key

MAX_LINES = 50_000
MAX_LINE_BYTES = 16 * 1024 * 1024
"""The longest body that the gateway accepts."""
MAX_REPORTED = 1_000
MAX_CUSTOM_ID_CHARS = 512
MAX_TEXT_BYTES = 8 * 1024
"""The longest text of a field that is decoded. A custom_id takes up to 6 KiB, and nothing longer is right in any
field."""
MAX_BESIDE_BYTES = 64 * 1024
"""The most bytes of a line beside its body. They are decoded."""
MAX_CANONICAL_BYTES = 1024 * 1024
"""The longest line whose prefix is made canonical. Longer ones are sorted by their bytes as they were sent."""

L = TypeVar("L")

Code = Literal[
    "invalid_json_line",
    "missing_custom_id",
    "duplicate_custom_id",
    "invalid_method",
    "mismatched_url",
    "mismatched_model",
    "model_not_found",
    "empty_file",
    "too_many_lines",
    "backlog_exceeded",
    "input_file_unreadable",
    "batch_expired",
]

_MESSAGES: dict[str, str] = {
    "invalid_json_line": "This line is not parseable as a valid JSON object with a body object, has a key twice, or has more "
    "than 64 KiB beside its body.",
    "missing_custom_id": "This line has no custom_id of 1 to 512 characters other than the null character.",
    "duplicate_custom_id": "The custom_id of this line has been used before.",
    "invalid_method": "The method of this line is not POST.",
    "mismatched_url": "The url of this line is not the batch's endpoint.",
    "mismatched_model": "The model of this line is not that of the first line.",
    "model_not_found": "The model of this line does not exist or you do not have access to it.",
    "empty_file": "The input file has no lines.",
    "too_many_lines": f"The input file has more than {MAX_LINES} lines.",
    "backlog_exceeded": "The enqueued prompt tokens of this model would exceed the limit of your project.",
    "input_file_unreadable": "The input file could not be read for as long as the batch had time.",
    "batch_expired": "The time of this batch was over before its lines had been checked.",
}
_PARAMS = {
    "missing_custom_id": "custom_id",
    "duplicate_custom_id": "custom_id",
    "invalid_method": "method",
    "mismatched_url": "url",
    "mismatched_model": "body.model",
    "model_not_found": "body.model",
}


class Fault(msgspec.Struct, frozen=True):
    code: Code
    line_no: int | None
    custom_id: str | None = None
    """The custom_id of the line. It is None if an earlier line has the same one."""

    def shown(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": _MESSAGES[self.code],
            "param": _PARAMS.get(self.code),
            "line": self.line_no,
        }


class Validated(msgspec.Struct):
    lines: list[Placed]
    faults: list[Fault]
    """The faults of single lines."""
    whole: Fault | None
    """A fault of the whole file. It fails the batch whether faulty lines are rejected or skipped."""
    model: str | None
    num_lines: int

    @property
    def predicted_tokens(self) -> int:
        return sum(line.predicted_tokens for line in self.lines)


class Refused(Exception):
    """A line that cannot run."""

    def __init__(self, code: Code, custom_id: str | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.custom_id = custom_id


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()


class Body(msgspec.Struct):
    """The parts of a body that precede generation, as they were sent. The others are skipped."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    def present(self) -> dict[str, msgspec.Raw]:
        return {name: part for name in self.__struct_fields__ if (part := getattr(self, name))}


_LINE: Final = msgspec.json.Decoder(_Line)
_BODY: Final = msgspec.json.Decoder(Body)
_TEXT: Final = msgspec.json.Decoder(str)
_ANY: Final = msgspec.json.Decoder()
_KEYS: Final = json.JSONDecoder(object_pairs_hook=lambda pairs: [name for name, _ in pairs])
"""Decodes an object to its keys. The other decoders keep the last one of a key that is there twice."""


class LineChecker:
    """Checks the lines of one file, in their order. `models` are those that the submitting key may use."""

    def __init__(self, endpoint: str, models: Container[str]) -> None:
        self.model: str | None = None
        """The model of the first good line, which all must have."""
        self._endpoint = endpoint
        self._models = models
        self._seen: set[bytes] = set()
        """Hashes of the custom_ids: ids of 512 characters would take a hundred megabytes."""

    def check(self, raw: bytes | None) -> Body:
        """Returns the body of a line that can run; None stands for a line that is too long. Raises `Refused`."""
        line = _decoded(_LINE, raw)
        custom_id = _text(line.custom_id)
        # A null character is no part of a text of PostgreSQL: writing such a line would fail, each time it is tried.
        if custom_id is None or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS or "\0" in custom_id:
            raise Refused("missing_custom_id")
        known_by = blake2b(custom_id.encode(), digest_size=16).digest()
        if known_by in self._seen:
            raise Refused("duplicate_custom_id")
        self._seen.add(known_by)
        if not _begins(line.body, b"{"):
            raise Refused("invalid_json_line", custom_id)
        if _text(line.method) != "POST":
            raise Refused("invalid_method", custom_id)
        if _text(line.url) != self._endpoint:
            raise Refused("mismatched_url", custom_id)
        assert raw is not None
        _refuse_doubled(raw, line.body)
        body = _decoded(_BODY, line.body)
        model = _text(body.model)
        if model is None or model not in self._models:
            raise Refused("model_not_found", custom_id)
        if self.model is None:
            self.model = model
        elif model != self.model:
            raise Refused("mismatched_model", custom_id)
        return body


def validate(parts: Iterable[bytes], endpoint: str, models: Container[str]) -> Validated:
    """Checks a file. `models` are those that the submitting key may use."""
    found = Validated([], [], None, None, 0)
    checker = LineChecker(endpoint, models)
    for line_no, (offset, raw) in enumerate(split(parts, MAX_LINE_BYTES), 1):
        if line_no > MAX_LINES:
            return Validated([], found.faults, Fault("too_many_lines", None), None, line_no)
        found.num_lines, num_bytes = line_no, len(raw or b"")
        try:
            prefix = _prefix(checker.check(raw), num_bytes)
        except Refused as refused:
            found.faults.append(Fault(refused.code, line_no, refused.custom_id))
        else:
            found.lines.append(Placed(line_no, offset, num_bytes, sort_key(prefix), predicted_tokens(prefix)))
    found.model = checker.model
    if not found.num_lines:
        found.whole = Fault("empty_file", None)
    return found


def _decoded(decoder: msgspec.json.Decoder[L], raw: bytes | msgspec.Raw | None) -> L:
    """Decodes a line or a part of it. Raises `Refused`."""
    if raw is None:
        raise Refused("invalid_json_line")
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Refused("invalid_json_line") from None


def _refuse_doubled(raw: bytes, body: msgspec.Raw) -> None:
    """Refuses a line that has a key twice: nobody can say which of the two was meant. A key inside of the body is judged
    when the line runs. Raises `Refused`."""
    if len(raw) - len(body) > MAX_BESIDE_BYTES:  # it also bounds the search for the body
        raise Refused("invalid_json_line")
    beside = b"0".join(raw.rsplit(body, 1))
    try:
        keys = _KEYS.decode(beside.decode())
    except (ValueError, RecursionError):
        raise Refused("invalid_json_line") from None
    if len(set(keys)) < len(keys):
        raise Refused("invalid_json_line")


def _text(raw: msgspec.Raw) -> str | None:
    """Returns the text that a field holds. None stands for anything else, and for a text that is too long."""
    return _decoded(_TEXT, raw) if _begins(raw, b'"') and len(raw) <= MAX_TEXT_BYTES else None


def _begins(raw: msgspec.Raw, first: bytes) -> bool:
    return memoryview(raw)[:1] == first


def _prefix(body: Body, line_bytes: int) -> bytes:
    """Returns what the line is sorted by. Raises `Refused`."""
    parts = body.present()
    if line_bytes > MAX_CANONICAL_BYTES:
        return b",".join(parts.values())
    return prefix_bytes({name: _decoded(_ANY, part) for name, part in parts.items()})


def split(parts: Iterable[bytes], most: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Yields (offset, line) without the line's ending (LF or CRLF) and without the file's byte-order mark. The line is
    None if it has more than `most` bytes. A last newline may be missing; a blank line counts as a line."""
    start = position = 0
    line = bytearray()
    for part in parts:
        begin = 0
        while (end := part.find(b"\n", begin)) >= 0:
            _extend(line, part[begin:end], most)
            yield _ended(start, line, most)
            start, begin = position + end + 1, end + 1
            line.clear()
        _extend(line, part[begin:], most)
        position += len(part)
    if position > start:
        yield _ended(start, line, most)


def _extend(line: bytearray, piece: bytes, most: int) -> None:
    """Appends to a line. One byte beyond the limit is kept, so that the excess is noticed; the rest of a huge line
    never fills memory."""
    line += piece[: most + 1 - len(line)]


def _ended(start: int, line: bytearray, most: int) -> tuple[int, bytes | None]:
    if len(line) > most:
        return start, None
    first = len(BOM_UTF8) if start == 0 and line.startswith(BOM_UTF8) else 0
    return start + first, bytes(line[first:-1] if line.endswith(b"\r") else line[first:])
