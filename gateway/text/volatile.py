"""Volatile parts of a system prompt: lines that differ from request to request and so defeat the prefix cache. The
module is pure.

A prefix cache serves a prompt up to its first difference. A clock, an id or a hash near the top of a system prompt
therefore makes all the rest cold. Such lines are recognised, and for tenants who ask for it they are put where they do
no harm: a line that is moved stands at the end of the last message, and one that means nothing to a model is fixed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["billing_header", "timestamp", "id"]

BLOCK_TOKENS = 64
MAX_LINE_CHARS = 400
MAX_LINES = 8
"""More lines than this are the subject of a prompt, such as a log, and no decoration of it: they stay."""
_HEADER = re.compile(r"x-anthropic-billing-header:")
"""The first line of Claude Code's system prompts. It has a hash of the conversation, and means nothing to a model."""
_TIME = re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\b\d{1,2}:\d\d:\d\d\b|\b1[6-9]\d{8}(?:\d{3})?\b")
"""A time of day, or Unix seconds or milliseconds. A day alone serves a day's requests, and stays."""
_ID = re.compile(r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b|\b[0-9a-f]{32,64}\b", re.IGNORECASE)


@dataclass(frozen=True)
class VolatileLine:
    kind: Kind
    text: str


@dataclass(frozen=True)
class VolatilePart:
    """A volatile line, as a range of a prompt's tokens."""

    kind: Kind
    start: int
    end: int


def volatile_lines(messages: Sequence[dict[str, Any]]) -> list[VolatileLine]:
    """Returns the volatile lines of the system messages in front of a conversation."""
    found = [VolatileLine(kind, line) for line in _lines(messages) if (kind := _kind(line)) is not None]
    return found if len(found) <= MAX_LINES else []


def steady(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages without volatile lines in front: they are fixed, or stand at the end of the last message that
    is not the assistant's.
    """
    lines = volatile_lines(messages)
    target = max((i for i, one in enumerate(messages) if one["role"] in ("user", "tool")), default=None)
    if not lines or target is None:
        return list(messages)
    gone = {line.text for line in lines}
    made = [dict(message) for message in messages]
    for message in made[: _num_leading(messages)]:
        message["content"] = "\n".join(_kept(line) for line in message["content"].split("\n") if _stays(line, gone))
    moved = [line.text for line in lines if line.kind != "billing_header"]
    if moved:
        made[target]["content"] = "\n\n".join(filter(None, (made[target]["content"], "\n".join(moved))))
    return made


def to_blame(parts: Sequence[VolatilePart], diverged_at: int) -> Kind | None:
    """Returns the kind of the part in which a prompt left what the cache knows. The cache tells the place by whole
    blocks, so a part that begins within the block is meant, too.
    """
    first = next((part for part in parts if part.end > diverged_at), None)
    return first.kind if diverged_at >= 0 and first is not None and first.start <= diverged_at + BLOCK_TOKENS else None


def _num_leading(messages: Sequence[dict[str, Any]]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _lines(messages: Sequence[dict[str, Any]]) -> list[str]:
    leading = messages[: _num_leading(messages)]
    return [line for message in leading for line in message["content"].split("\n")]


def _kind(line: str) -> Kind | None:
    if len(line) > MAX_LINE_CHARS:
        return None
    if _HEADER.match(line):
        return "billing_header"
    if _TIME.search(line):
        return "timestamp"
    return "id" if _ID.search(line) else None


def _stays(line: str, gone: set[str]) -> bool:
    return line not in gone or _HEADER.match(line) is not None


def _kept(line: str) -> str:
    """Returns the line; of the billing header only its name is left."""
    header = _HEADER.match(line)
    return header[0] if header is not None and len(line) <= MAX_LINE_CHARS else line
