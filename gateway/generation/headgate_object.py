"""The `headgate` object at the end of an answer (api.md 4.2), as plain values. The module is pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.limiter.limit_replies import scope_of
from gateway.limiter.rules import BudgetUse
from gateway.metering.endings import Settled
from gateway.text.volatile import VolatilePart, to_blame
from workers.protocol.messages import CacheReport, Failed, Finished, TimelineEvent


def headgate_of(
    request_id: str,
    tier: str,
    settled: Sequence[Settled],
    final: Finished | Failed | None,
    stop: BudgetUse | None,
    volatile: Sequence[VolatilePart] = (),
    num_resumes: int = 0,
) -> dict[str, Any]:
    """Returns the object. Needs every settlement of the request. `volatile` are the volatile lines of its prompt."""
    last = settled[-1]
    report = final.cache if isinstance(final, Finished) else CacheReport()
    return {
        "request_id": request_id,
        "tier": tier,
        "charge_micro_units": sum(one.charge_micro_units for one in settled),
        "currency": last.currency,
        "price_version": last.price_version,
        **_phases(final.timeline if final else ()),
        "num_resumes": num_resumes,
        "cache": {
            "cached_tokens": report.cached_tokens,
            "public_tokens": report.public_tokens,
            "miss_reason": report.miss_reason or None,
            "volatile_part": to_blame(volatile, report.diverged_at_token) if report.miss_reason == "diverged" else None,
            "diverged_at_token": _unless_negative(report.diverged_at_token),
            "evicted_age_s": None if report.evicted_age_ms < 0 else report.evicted_age_ms / 1000,
        },
        "stop": None if stop is None else "budget",
        **({"scope": None, "resets_at": None} if stop is None else scope_of(stop)),
    }


def _unless_negative(value: int) -> int | None:
    return None if value < 0 else value


def _phases(timeline: Sequence[TimelineEvent]) -> dict[str, int | None]:
    """Returns whole milliseconds between the worker's own timeline events."""
    at: dict[str, int] = {}
    for event in timeline:
        at.setdefault(event.name, event.offset_us)
    spans = (
        ("queue_ms", "queued", "matched"),
        ("prefill_ms", "matched", "first_token"),
        ("decode_ms", "first_token", "finished"),
    )
    return {name: (at[end] - at[start]) // 1000 if start in at and end in at else None for name, start, end in spans}
