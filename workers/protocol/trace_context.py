"""The trace context of a request, W3C's `traceparent`, as far as every process that counts requests reads it."""

from __future__ import annotations

import re

_SAMPLED = re.compile(r"00-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-01")


def exemplar(traceparent: str) -> dict[str, str] | None:
    """Returns the labels of an exemplar, or None. Only a request whose flag was set at its start has one: its spans are
    exported whatever becomes of it, and any other trace id might lead nowhere.
    """
    found = _SAMPLED.fullmatch(traceparent)
    return None if found is None else {"trace_id": found[1]}
