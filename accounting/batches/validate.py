"""The check of an input file: it finds the lines that can run and the faults of the others. The module is pure: bytes
in, values out.

It streams: it holds one line at a time and, for each good line, its position and sort key. Nothing is executed or
fetched. The content of `body` is checked when the line runs, and a fault there fails that line alone; only what the
file as a whole needs is checked here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any, Literal

import msgspec

from accounting.batches.order import Placed, predicted_tokens, prefix_bytes, sort_key

MAX_LINES = 50_000
MAX_LINE_BYTES = 16 * 1024 * 1024
"""The longest body that the gateway accepts."""
MAX_REPORTED = 1_000
MAX_CUSTOM_ID_CHARS = 512

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
]

_MESSAGES: dict[str, str] = {
    "invalid_json_line": "This line is not parseable as a valid JSON object with a body object.",
    "missing_custom_id": "This line has no custom_id of 1 to 512 characters.",
    "duplicate_custom_id": "The custom_id of this line has been used before.",
    "invalid_method": "The method of this line is not POST.",
    "mismatched_url": "The url of this line is not the batch's endpoint.",
    "mismatched_model": "The model of this line is not that of the first line.",
    "model_not_found": "The model of this line does not exist or you do not have access to it.",
    "empty_file": "The input file has no lines.",
    "too_many_lines": f"The input file has more than {MAX_LINES} lines.",
    "backlog_exceeded": "The enqueued prompt tokens of this model would exceed the limit of your project.",
    "input_file_unreadable": "The input file could not be read for as long as the batch had time.",
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


class _Refused(Exception):
    def __init__(self, code: Code, custom_id: str | None = None) -> None:
        super().__init__(code)
        self.code = code
        self.custom_id = custom_id


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: Any = None


def validate(parts: Iterable[bytes], endpoint: str, models: Container[str]) -> Validated:
    """Check a file. `models` are those that the submitting key may use."""
    found = Validated([], [], None, None, 0)
    seen: set[str] = set()
    decoder = msgspec.json.Decoder(_Line)
    for line_no, (offset, raw) in enumerate(split(parts), 1):
        if line_no > MAX_LINES:
            return Validated([], found.faults, Fault("too_many_lines", None), None, line_no)
        found.num_lines = line_no
        try:
            placed = _check(decoder, raw, line_no, offset, endpoint, models, found, seen)
        except _Refused as refused:
            found.faults.append(Fault(refused.code, line_no, refused.custom_id))
        else:
            found.lines.append(placed)
    if not found.num_lines:
        found.whole = Fault("empty_file", None)
    return found


def split(parts: Iterable[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield (offset, line) without the line's ending (LF or CRLF). The line is None if it is too long. A last newline
    may be missing; a blank line counts as a line."""
    start = position = 0
    line = bytearray()
    for part in parts:
        begin = 0
        while (end := part.find(b"\n", begin)) >= 0:
            _extend(line, part[begin:end])
            yield start, _ended(line)
            start, begin = position + end + 1, end + 1
            line.clear()
        _extend(line, part[begin:])
        position += len(part)
    if position > start:
        yield start, _ended(line)


def _extend(line: bytearray, piece: bytes) -> None:
    """Append to a line. One byte beyond the limit is kept, so that the excess is noticed; the rest of a huge line never
    fills memory."""
    line += piece[: MAX_LINE_BYTES + 1 - len(line)]


def _ended(line: bytearray) -> bytes | None:
    if len(line) > MAX_LINE_BYTES:
        return None
    return bytes(line[:-1] if line.endswith(b"\r") else line)


def _check(
    decoder: msgspec.json.Decoder[_Line],
    raw: bytes | None,
    line_no: int,
    offset: int,
    endpoint: str,
    models: Container[str],
    found: Validated,
    seen: set[str],
) -> Placed:
    if raw is None:
        raise _Refused("invalid_json_line")
    try:
        line = decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise _Refused("invalid_json_line") from None
    custom_id = line.custom_id
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _Refused("missing_custom_id")
    if custom_id in seen:
        raise _Refused("duplicate_custom_id")
    seen.add(custom_id)
    if not isinstance(line.body, dict):
        raise _Refused("invalid_json_line", custom_id)
    if line.method != "POST":
        raise _Refused("invalid_method", custom_id)
    if line.url != endpoint:
        raise _Refused("mismatched_url", custom_id)
    model = line.body.get("model")
    if not isinstance(model, str) or model not in models:
        raise _Refused("model_not_found", custom_id)
    if found.model is None:
        found.model = model
    elif model != found.model:
        raise _Refused("mismatched_model", custom_id)
    prefix = prefix_bytes(line.body)
    return Placed(line_no, offset, len(raw), sort_key(prefix), predicted_tokens(prefix))
