"""The interface of what an upstream speaks: a request in its words, and its events in ours. There is one for each API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gateway.upstreams.wires.values import Ask, Chunk, Garbage, Outgoing, Upstream

MAX_TOKENS_STATED = 2**40
MAX_ID_CHARS = 128
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""A decoder raises these for bytes that are no JSON, no text, or too deep."""


class Failure(Exception):
    """The upstream ended its answer with an error. `is_busy` says that it has too much to do."""

    def __init__(self, why: str, *, is_busy: bool = False) -> None:
        super().__init__(why)
        self.is_busy = is_busy


class Reader(Protocol):
    """Reads the events of one answer. It keeps state."""

    def read(self, data: bytes) -> Sequence[Chunk]:
        """Returns what one event says. Raises `Garbage`, or `Failure` for an error in the stream."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether the upstream has said that this was all."""
        ...


class Wire(Protocol):
    def request(self, upstream: Upstream, served: str, ask: Ask) -> Outgoing: ...

    def reader(self, ask: Ask) -> Reader: ...

    def whole(self, data: bytes, ask: Ask) -> Sequence[Chunk]:
        """Reads a body that is no stream: embeddings. Raises `Garbage`."""
        ...

    def probe(self, upstream: Upstream) -> Outgoing | None:
        """Returns a GET that costs nothing and shows whether address and credential are right; None if there is none."""
        ...


def decoded(data: bytes) -> dict[str, Any]:
    """Decodes one JSON object. Raises `Garbage`."""
    try:
        value = msgspec.json.decode(data)
    except NOT_JSON:
        raise Garbage("an event is not JSON") from None
    if not isinstance(value, dict):
        raise Garbage("an event is not an object")
    return value


def text_of(value: Any, what: str) -> str:
    """Returns a text; none for null. Raises `Garbage` for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Garbage(f"{what} is not text")
    return value


def id_of(value: Any) -> str:
    """Returns the provider's id of an answer, without what no database takes; none for anything but text."""
    return "".join(filter(str.isprintable, value[:MAX_ID_CHARS])) if isinstance(value, str) else ""


def objects_of(value: Any, what: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise Garbage(f"{what} is not a list of objects")
    return value


def parts_of(value: Any) -> dict[str, Any]:
    """Returns an object; an empty one for anything else, where it may be missing."""
    return value if isinstance(value, dict) else {}


def number_of(value: Any, what: str) -> int:
    """Returns a count. Raises `Garbage` for what is none: also one that nobody can have counted."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS_STATED:
        raise Garbage(f"{what} is not a count")
    return value
