"""The choice of the failed lines of a batch that are worth another try. The module is pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

CUT_OFF = ("batch_cancelled", "batch_expired")
"""The codes of lines that did not run before their batch ended."""
UNANSWERED = ("connection_lost", "invalid_answer")
BROKE_WHAT_RAN_IT = ("line_quarantined", "request_quarantined")
AGAIN = (408, 409, 429)
"""Statuses of requests that may go well later, beside those of 500 and above."""


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Response(msgspec.Struct):
    status_code: int | None = None


class _Line(msgspec.Struct):
    id: str
    response: _Response | None = None
    error: _Error | None = None


class Left(msgspec.Struct, frozen=True):
    """Why a line is not retried."""

    status: int | None
    code: str
    reason: str


class Sorted(msgspec.Struct):
    """The failed lines of a batch, sorted."""

    retried: set[int]
    """The numbers of the lines to run again, from 1 on, as they stand in the input."""
    left: Counter[Left]
    """The number of the other lines, by the reason."""


def sort(error_lines: Iterable[bytes]) -> Sorted:
    """Reads the lines of an error file. Raises `msgspec.MsgspecError`, and ValueError for a line that is no result."""
    found = Sorted(set(), Counter())
    for raw in error_lines:
        line = msgspec.json.decode(raw, type=_Line)
        status = None if line.response is None else line.response.status_code
        error = line.error or _Error()
        reason = why_left(status, error.code or "")
        if reason is None:
            found.retried.add(int(line.id.rpartition("_")[2]))
        else:
            found.left[Left(status, error.code or "", reason)] += 1
    return found


def why_left(status: int | None, code: str) -> str | None:
    """Returns why a line that failed so is not retried, or None if it is."""
    if code in BROKE_WHAT_RAN_IT:
        return "The line ended the processes that ran it."
    if status is None:
        return None if code in CUT_OFF + UNANSWERED else "The line itself is invalid: correct it."
    if status in AGAIN or status >= 500:
        return None
    return "The request was refused: correct it, or the rights and limits of the key."


def as_value(found: Sorted) -> list[dict[str, Any]]:
    """Returns the lines that are not retried, the largest number first."""
    return [{"num_lines": number, **msgspec.structs.asdict(one)} for one, number in found.left.most_common()]
