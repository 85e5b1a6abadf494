"""Ids of objects: a prefix, the creation time in nanoseconds, 128 random bits. The module does not know the objects.

Ids of one kind sort in the order of creation. Lists need an order within a second, and a position for objects that are
deleted.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Literal

Prefix = Literal[
    "proj",
    "svc_acct",
    "key",
    "file",
    "batch",
    "prefix",
    "budget",
    "adj",
    "spend_alert",
    "credit",
    "adapter",
    "webhook",
    "resp",
]


def new_id(prefix: Prefix) -> str:
    """Returns a new id. `file-` is the only prefix that OpenAI writes with a hyphen."""
    return f"{_begin(prefix)}{time.time_ns():016x}{secrets.token_hex(16)}"


def made_at(prefix: Prefix, id_: str) -> int | None:
    """Returns the creation time in Unix seconds. It is None for any other text."""
    match = re.fullmatch(f"{_begin(prefix)}([0-9a-f]{{16}})[0-9a-f]{{32}}", id_)
    return None if match is None else int(match[1], 16) // 1_000_000_000


def _begin(prefix: Prefix) -> str:
    return f"{prefix}{'-' if prefix == 'file' else '_'}"
