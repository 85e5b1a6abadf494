"""One group of tokens and its KV as it is stored. Only a process that knows the deployment's secret can seal it. The
module is pure.

    magic 6 | identity 16 | number of tokens u32 | tokens i32 ... | KV ... | seal 16        (little endian)

The identity names the KV: model, weights, adapter, layout of a block. The seal is a keyed hash over the name under which
the value is stored and everything before the seal. So nobody without the secret can give KV to a model, or KV of one
prefix to another, and no changed bit goes unnoticed.
"""

from __future__ import annotations

import hmac
import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

from cache.tree.hashing import HASH_BYTES

MAGIC = b"hgkv2\0"
_HEAD = struct.Struct(f"<{len(MAGIC)}s{HASH_BYTES}sI")

Fault = Literal["truncated", "foreign", "corrupted"]


class Refused(Exception):
    """The value that was found is not the one that was asked for."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault: Fault = fault


def seal(secret: bytes, identity: bytes, name: str, tokens: Sequence[int], kv: bytes) -> bytes:
    body = _HEAD.pack(MAGIC, identity, len(tokens)) + _raw(tokens) + kv
    return body + _digest(secret, name, body)


def unseal(secret: bytes, identity: bytes, name: str, tokens: Sequence[int], num_bytes: int, data: bytes) -> memoryview:
    """Returns the KV, `num_bytes` of it. Raises `Refused` unless the value is sealed for this name and belongs to
    exactly these tokens."""
    raw = _raw(tokens)
    if len(data) < _HEAD.size:
        raise Refused("truncated")
    magic, found, number = _HEAD.unpack_from(data)
    if magic != MAGIC or found != identity:
        raise Refused("foreign")
    start = _HEAD.size + len(raw)
    if len(data) != start + num_bytes + HASH_BYTES:
        raise Refused("truncated")
    view = memoryview(data)
    if not hmac.compare_digest(_digest(secret, name, view[:-HASH_BYTES]), view[-HASH_BYTES:]):
        raise Refused("corrupted")
    if number != len(tokens) or view[_HEAD.size : start] != raw:
        raise Refused("foreign")  # another prefix of the same hash
    return view[start:-HASH_BYTES]


def _raw(tokens: Sequence[int]) -> bytes:
    data = array("i", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def _digest(secret: bytes, name: str, data: bytes | memoryview) -> bytes:
    hasher = blake2b(name.encode(), digest_size=HASH_BYTES, key=secret, person=b"hg-kv-seal")
    hasher.update(data)
    return hasher.digest()
