"""The payloads of the gateway's journal: msgpack of the kinds in `workers/protocol/journal.py`. The module is pure.

OPEN is an `Opened`, SETTLE and VOID are a `Posting`; their fields lie flat in one map, as they always have. SEAL follows
the OPENs that a segment takes over from the one before, and is the last record of a segment; nobody reads what older
gateways wrote in it. No prompt, no output, no word of a client and no secret ever enters a payload.
"""

from __future__ import annotations

import msgspec

from accounting.values.types import Opened, Posting


def encode(payload: Opened | Posting) -> bytes:
    return msgspec.msgpack.encode(payload)


def opened(payload: bytes) -> Opened:
    """Decodes an OPEN. Raises `msgspec.DecodeError`, like the function below."""
    return msgspec.msgpack.decode(payload, type=Opened)


def posting(payload: bytes) -> Posting:
    return msgspec.msgpack.decode(payload, type=Posting)
