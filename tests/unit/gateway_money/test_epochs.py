"""What a gateway remembers of losses of limiter state."""

from __future__ import annotations

from accounting.limits.limiter_state import Incident
from gateway.limiter.incidents import Epochs


def test_a_settled_incident_leaves_the_epoch_of_its_tenant_and_no_times() -> None:
    epochs = Epochs()
    for epoch in range(1, 1001):
        epochs.note(Incident(epoch, f"proj_{epoch % 3}", epoch))
    epochs.forget(998)
    assert epochs.raised_at_ms.keys() == epochs.noted_at.keys() == {999, 1000}
    assert [epochs.of(f"proj_{number}") for number in range(3)] == [999, 1000, 998]
