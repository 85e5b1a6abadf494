"""What all rebuilds in here have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose disk stalls for two seconds is no other answer of the limiter."""
    monkeypatch.setattr("gateway.rebuild.WAIT_S", 20.0)
