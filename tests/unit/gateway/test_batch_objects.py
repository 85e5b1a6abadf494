"""What a batch shows of its progress."""

from __future__ import annotations

import pytest

from accounting.batches.batches import TIMESTAMPS, BatchInfo
from accounting.values.types import Usage
from gateway.schema.batches import batch_object


def shown(state: str, **at: int) -> dict:
    batch = BatchInfo(
        id="batch_1",
        tenant_id="t",
        key_id="k",
        endpoint="/v1/messages",
        model="m",
        completion_window="24h",
        input_file_id="f",
        output_file_id=None,
        error_file_id=None,
        state=state,
        created_at=1_000,
        expires_at=87_400,
        at=dict.fromkeys(TIMESTAMPS) | at,
        paused_reason=None,
        invalid_lines="skip",
        output_expires_after_s=None,
        num_total=50_000,
        num_completed=10,
        num_failed=49_990,
        num_invalid=0,
        usage=Usage(),
        errors=None,
        metadata=None,
        traceparent="",
    )
    return batch_object(batch, 0, "USD", 2_000)["headgate"]


@pytest.mark.parametrize("state", ["cancelling", "cancelled", "expired"])
def test_lines_that_were_cut_off_are_no_speed(state: str) -> None:
    """A batch that was cancelled after ten seconds had run 5,000 lines a second."""
    assert shown(state, in_progress_at=1_000, cancelling_at=1_010, expired_at=1_010)["lines_per_s"] is None


def test_a_completed_batch_shows_its_speed() -> None:
    assert shown("completed", in_progress_at=1_000, finalizing_at=2_000)["lines_per_s"] == 50.0
