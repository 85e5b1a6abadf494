"""Names of objects: a prefix, the moment in nanoseconds, 128 random bits. Knows nothing of what they name.

Of one kind, they sort as they were made: lists need an order within a second, and a place for what is gone.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Literal

Prefix = Literal[
    "proj", "svc_acct", "key", "file", "batch", "prefix", "budget", "adj", "spend_alert", "credit", "adapter", "webhook"
]


def new_id(prefix: Prefix) -> str:
    """`file-` is the one prefix that OpenAI writes with a hyphen."""
    return f"{_begin(prefix)}{time.time_ns():016x}{secrets.token_hex(16)}"


def made_at(prefix: Prefix, id_: str) -> int | None:
    """In Unix seconds; None for what is no such id, those of older versions among them, which are random alone."""
    match = re.fullmatch(f"{_begin(prefix)}([0-9a-f]{{16}})[0-9a-f]{{32}}", id_)
    return None if match is None else int(match[1], 16) // 1_000_000_000


def _begin(prefix: Prefix) -> str:
    return f"{prefix}{'-' if prefix == 'file' else '_'}"
