"""Names of objects: a prefix and 128 random bits (api.md 1.2). Knows nothing of what they name."""

from __future__ import annotations

import secrets
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
]


def new_id(prefix: Prefix) -> str:
    """`file-` is the one prefix that OpenAI writes with a hyphen."""
    return f"{prefix}{'-' if prefix == 'file' else '_'}{secrets.token_hex(16)}"
