"""What a batch shows of its progress."""

from __future__ import annotations

import pytest
from batch_infos import batch_info

from gateway.schema.batches import batch_object


def shown(state: str, **at: int) -> dict:
    batch = batch_info(state, at, created_at=1_000, num_total=50_000, num_completed=10, num_failed=49_990)
    return batch_object(batch, 0, "USD", 2_000)["headgate"]


@pytest.mark.parametrize("state", ["cancelling", "cancelled", "expired"])
def test_lines_that_were_cut_off_are_no_speed(state: str) -> None:
    """A batch that was cancelled after ten seconds had run 5,000 lines a second."""
    assert shown(state, in_progress_at=1_000, cancelling_at=1_010, expired_at=1_010)["lines_per_s"] is None


def test_a_completed_batch_shows_its_speed() -> None:
    assert shown("completed", in_progress_at=1_000, finalizing_at=2_000)["lines_per_s"] == 50.0
