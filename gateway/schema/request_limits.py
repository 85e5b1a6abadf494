"""The limits on requests of a tenant or of a key, by the names that the API and the books have for them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from accounting.values.types import Limits

Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
NAMES = {
    "max_requests_per_1_minute": "requests_per_minute",
    "max_tokens_per_1_minute": "tokens_per_minute",
    "max_running_requests": "concurrency",
}


def shown(limits: Limits) -> dict[str, int | None]:
    return {name: getattr(limits, field) for name, field in NAMES.items()}
