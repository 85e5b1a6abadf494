"""Decodes JSON in calls that are short, because each holds the interpreter lock. A text is cut in two at commas, and each
piece is made a whole text by the brackets that are open at its two ends.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

_LIST = ord("[")
TO_CLOSING = 2
"""The distance from an opening bracket's byte to the closing one's."""
_BEGUN = secrets.token_hex(16)
"""The name of a member whose value began in an earlier piece. No client knows it, so no body has such a member."""
_BEGUN_TEXT = b'"%b":' % _BEGUN.encode()


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """A comma between two values or members, at which a text is cut in two."""

    place: int
    containers: bytes
    """The brackets that are open there, the outermost first."""


def decode_in_pieces(body: bytes, cuts: list[Cut]) -> Any:
    """Decodes a text as `msgspec.json.decode` does, but in calls of some 32 KiB at most, between which other threads get
    the interpreter lock: one call over 390,000 token ids holds it for 9 ms. Only what has no comma in it, a string for
    example, is decoded in one longer call. Raises `ValueError`.
    """
    whole: Any = None
    before = Cut(-1, b"")
    for cut in [*cuts, Cut(len(body), b"")]:
        text = body[before.place + 1 : cut.place]
        piece = msgspec.json.decode(_opening(before.containers) + text + _closing(cut.containers))
        _check_end(piece, cut.containers)
        if before.containers:
            _append(whole, piece, before.containers)
        else:
            whole = piece
        before = cut
    return whole


def _opening(containers: bytes) -> bytes:
    return containers.replace(b"{", b"{" + _BEGUN_TEXT).removesuffix(_BEGUN_TEXT)


def _closing(containers: bytes) -> bytes:
    return bytes(bracket + TO_CLOSING for bracket in reversed(containers))


def _check_end(piece: Any, containers: bytes) -> None:
    """Raises `ValueError` if there is no value in front of the comma at which a piece ends."""
    for bracket in containers[:-1]:
        piece = _last(piece, bracket)
    if containers and not piece:
        raise ValueError


def _append(whole: Any, piece: Any, containers: bytes) -> None:
    """Appends what stands behind a cut to the containers that are open there. Raises `ValueError` if nothing does."""
    for bracket in containers[:-1]:
        begun = _last(whole, bracket)
        if bracket == _LIST:
            rest = piece[0]
            whole += piece[1:]
        else:
            rest = piece.pop(_BEGUN)
            whole |= piece
        whole, piece = begun, rest
    if not piece or type(whole) is not type(piece):
        raise ValueError
    if containers[-1] == _LIST:
        whole += piece
    else:
        whole |= piece


def _last(container: Any, bracket: int) -> Any:
    """Returns the value that was put into a container last. Raises `ValueError` if another container stands in its
    place, as after a key that came twice.
    """
    if container and isinstance(container, list) and bracket == _LIST:
        return container[-1]
    if container and isinstance(container, dict) and bracket != _LIST:
        return next(reversed(container.values()))
    raise ValueError
