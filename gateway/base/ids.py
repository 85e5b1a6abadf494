"""The ids that the gateway makes. Request ids begin with the time; object ids do not."""

from __future__ import annotations

import secrets

from accounting.values import clock


def request_id() -> str:
    """Returns `req_` and the 32 hex digits of a UUIDv7 (48 bits of milliseconds, then 74 random bits)."""
    value = clock.now_ms() << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76  # version 7
    value = value & ~(0x3 << 62) | 0x2 << 62  # variant 10
    return f"req_{value:032x}"


def object_id(prefix: str) -> str:
    """Returns the prefix and 128 random bits."""
    return prefix + secrets.token_hex(16)
