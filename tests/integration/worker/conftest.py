"""Tiny real models for whole workers; torch stays on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that wait for a worker's heartbeat. It comes each second otherwise."""
    monkeypatch.setattr("workers.engine.service.HEARTBEAT_S", 0.1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
