"""The time of this machine. Functions that decide take the time as an argument; who calls them reads it here."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Returns Unix milliseconds."""
    return time.time_ns() // 1_000_000
