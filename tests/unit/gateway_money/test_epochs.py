"""What a gateway remembers of losses of limiter state."""

from __future__ import annotations

from accounting.limits.limiter_state import Incident
from accounting.values import clock
from gateway.limiter.incidents import Epochs


def test_a_settled_incident_leaves_the_epoch_of_its_tenant_and_no_times() -> None:
    epochs = Epochs()
    for epoch in range(1, 1001):
        epochs.note(Incident(epoch, f"proj_{epoch % 3}", epoch))
    epochs.forget(998)
    assert epochs.raised_at_ms.keys() == epochs.noted_at.keys() == {999, 1000}
    assert [epochs.of(f"proj_{number}") for number in range(3)] == [999, 1000, 998]


def test_gateways_whose_clocks_are_seconds_apart_wait_for_each_others_lists() -> None:
    epochs = Epochs()
    epochs.note(Incident(1, None, clock.now_ms() - 4_000))
    epochs.note(Incident(2, "proj_1", clock.now_ms() - 60_000))
    assert (epochs.is_over(1), epochs.is_over(2)) == (False, True)
    epochs.noted_at[1] -= 3.1
    assert epochs.is_over(1)
