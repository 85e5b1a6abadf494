"""The payloads of the gateway's journal: msgpack of the kinds in `workers/protocol/journal.py`. The module is pure.

OPEN is an `Opened`, SETTLE and VOID are a `Posting`; their fields lie flat in one map, as they always have. No prompt,
no output, no word of a client and no secret ever enters a payload.
"""

from __future__ import annotations

import msgspec

from accounting.values.types import Opened, Posting


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """SEAL: it follows the OPENs that a segment takes over from the one before, and it is the last
    record of a segment.
    """

    last_seq: int
    num_open: int


def encode(payload: Opened | Sealed | Posting) -> bytes:
    return msgspec.msgpack.encode(payload)


def opened(payload: bytes) -> Opened:
    """Decodes an OPEN. Raises `msgspec.DecodeError`, like the function below."""
    return msgspec.msgpack.decode(payload, type=Opened)


def posting(payload: bytes) -> Posting:
    return msgspec.msgpack.decode(payload, type=Posting)
