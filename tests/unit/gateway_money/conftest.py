from __future__ import annotations

import pytest

from accounting.values.types import Opened


@pytest.fixture
def opened():
    """Makes OPEN payloads."""

    def make(number: int) -> Opened:
        return Opened(
            request_id=f"req_{number:08d}",
            tenant_id="proj_1",
            key_id="key_1",
            model="m",
            root="r",
            tier="interactive",
            price_version="standard@1",
            currency="USD",
            opened_at_ms=1_790_000_000_000,
            prompt_tokens=100,
            reserved=5000,
        )

    return make
