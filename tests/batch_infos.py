"""Batches as SQL has them, for tests of how they are shown."""

from __future__ import annotations

from typing import Any

from accounting.batches.batches import TIMESTAMPS, BatchInfo
from accounting.values.types import Usage


def batch_info(state: Any, at: dict[str, int], **others: Any) -> BatchInfo:
    """A batch of Messages that began at 1,790,000,000. `at` has moments by their names."""
    fields = {
        "id": "batch_1",
        "tenant_id": "t",
        "key_id": "k",
        "endpoint": "/v1/messages",
        "model": "m",
        "completion_window": "24h",
        "input_file_id": "f",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": 1_790_000_000,
        "expires_at": 1_790_086_400,
        "paused_reason": None,
        "invalid_lines": "skip",
        "output_expires_after_s": None,
        "num_total": 4,
        "num_completed": 0,
        "num_failed": 0,
        "num_invalid": 0,
        "usage": Usage(),
        "errors": None,
        "metadata": None,
        "traceparent": "",
    }
    return BatchInfo(state=state, at=dict.fromkeys(TIMESTAMPS) | at, **fields | others)
