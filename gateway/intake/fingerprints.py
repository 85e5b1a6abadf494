"""The identity of a repeated request: its path, and its body whatever the order of its members.

The digest of a large body is made in pieces, off the loop: one call over all of it would hold the interpreter lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

PIECE_CHARS = 64 * 1024
PIECE_ITEMS = 4096
_MAY_BE_LARGE = {dict, list, str}


def fingerprint(path: str, value: Mapping[str, Any]) -> bytes:
    """Returns the digest of a small body, in one call. The digest is always stored together with the
    tenant or the key.
    """
    canonical = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(path.encode() + b"\0" + canonical).digest()


def fingerprint_in_pieces(path: str, value: dict[str, Any]) -> bytes:
    """Returns the same digest for a body of any size; for a thread."""
    digest = hashlib.sha256(path.encode() + b"\0")
    for piece in _pieces(value):
        digest.update(piece)
    return digest.digest()


def fingerprint_of_lines(path: str, lines: Iterable[Mapping[str, Any]]) -> bytes:
    """Returns the digest of the lines of a file, each whatever the order of its members; for a thread."""
    digest = hashlib.sha256(path.encode() + b"\0")
    for line in lines:
        for piece in _pieces(line):
            digest.update(piece)
        digest.update(b"\n")
    return digest.digest()


class Fingerprint:
    """The digest of one request. It is made when it is first asked for, unless it was made where the
    body was decoded.
    """

    def __init__(self, path: str, value: Mapping[str, Any], digest: bytes | None = None) -> None:
        self._made = digest
        self._of = None if digest else (path, value)
        """Path and body, kept only until the digest is made: a body may be large."""

    def digest(self) -> bytes:
        if self._made is None:
            assert self._of is not None
            self._made, self._of = fingerprint(*self._of), None
        return self._made


def _pieces(value: Any) -> Iterator[bytes]:
    """Yields `msgspec.json.encode(value, order="deterministic")` piece by piece."""
    if isinstance(value, dict) and value:
        opening = b"{"
        for name in sorted(value):
            yield opening + msgspec.json.encode(name) + b":"
            yield from _pieces(value[name])
            opening = b","
        yield b"}"
    elif isinstance(value, list) and value:
        opening = b"["
        for start in range(0, len(value), PIECE_ITEMS):
            for piece in _items(value[start : start + PIECE_ITEMS]):
                yield opening
                yield from piece
                opening = b","
        yield b"]"
    elif isinstance(value, str):
        yield b'"'
        for start in range(0, len(value), PIECE_CHARS):
            yield msgspec.json.encode(value[start : start + PIECE_CHARS])[1:-1]
        yield b'"'
    else:
        yield msgspec.json.encode(value)


def _items(part: list[Any]) -> Iterator[Iterator[bytes]]:
    """Encodes numbers and the like together, and items that may be large by themselves."""
    if _MAY_BE_LARGE.isdisjoint(map(type, part)):
        yield iter([msgspec.json.encode(part)[1:-1]])
    else:
        yield from map(_pieces, part)


FINGERPRINT = web.RequestKey("fingerprint", Fingerprint)
"""A request has a fingerprint only if its repeat may have to be recognised."""
