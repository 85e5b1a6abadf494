"""Objects of the request log, and the filters of its lists. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from accounting.requests.request_log import LoggedRequest, RequestFilter, RequestOutcome, RequestPage, StatusClass
from accounting.requests.request_prices import RequestPrice
from accounting.requests.request_volume import Volume
from accounting.requests.sessions import Sessions
from accounting.values import timelines
from accounting.values.periods import LAST_SECOND
from accounting.values.timelines import Event, Phase
from accounting.values.types import Tier
from gateway.base import errors
from gateway.schema import otlp, query
from gateway.schema.query import Query

FILTERS = (
    "project_id",
    "api_key_id",
    "model",
    "trace_id",
    "session_id",
    "request_id",
    "service_tier",
    "batch_id",
    "end_user",
    "error_code",
    "status_class",
    "outcome",
    "start_time",
    "end_time",
    "min_duration_ms",
)
_STATUS_CLASSES: Mapping[str, StatusClass] = {"2xx": 2, "4xx": 4, "5xx": 5}
_TIERS: Mapping[str, str] = {"interactive": "default", "batch": "batch"}
_TIERS_ASKED: Mapping[str, Tier] = {"default": "interactive", "batch": "batch"}
MAX_MS = 2**48
MAX_BUCKETS = 200


def filter_of(asked: Query, tenant_id: str | None) -> RequestFilter:
    """Reads the filters. With `tenant_id` only that tenant's requests are found, whatever is asked. Raises
    `ApiError` 400.
    """
    query.refuse_unknown(asked, (*FILTERS, "limit", "after"))
    return _filter(asked, tenant_id)


def volume_filter_of(asked: Query, tenant_id: str | None, now_ms: int) -> tuple[RequestFilter, int]:
    """Reads the filters of a volume, which needs a start, and the number of its buckets. Raises `ApiError` 400."""
    query.refuse_unknown(asked, (*FILTERS, "num_buckets"))
    wanted = _filter(asked, tenant_id)
    if wanted.since_ms is None:
        raise errors.invalid("Missing required parameter: 'start_time'.", "start_time", "missing_required_parameter")
    num_buckets = query.integer(asked, "num_buckets")
    if num_buckets is None:
        num_buckets = 48
    if not 1 <= num_buckets <= MAX_BUCKETS:
        raise errors.invalid(f"'num_buckets' must be 1 to {MAX_BUCKETS}.", "num_buckets")
    return msgspec.structs.replace(wanted, until_ms=wanted.until_ms or now_ms), num_buckets


def _filter(asked: Query, tenant_id: str | None) -> RequestFilter:
    outcome: Any = query.choice(asked, "outcome", get_args(RequestOutcome))
    status_class = query.choice(asked, "status_class", tuple(_STATUS_CLASSES))
    service_tier = query.choice(asked, "service_tier", tuple(_TIERS_ASKED))
    since_ms, until_ms = _seconds(asked, "start_time"), _seconds(asked, "end_time")
    query.refuse_empty_span(since_ms, until_ms)
    return RequestFilter(
        tenant_id=query.text(asked, "project_id") if tenant_id is None else tenant_id,
        key_id=query.text(asked, "api_key_id"),
        model=query.text(asked, "model"),
        trace_id=query.text(asked, "trace_id"),
        session_id=query.text(asked, "session_id"),
        request_id=query.text(asked, "request_id"),
        tier=None if service_tier is None else _TIERS_ASKED[service_tier],
        batch_id=query.text(asked, "batch_id"),
        end_user=query.text(asked, "end_user"),
        error_code=query.text(asked, "error_code"),
        status_class=None if status_class is None else _STATUS_CLASSES[status_class],
        outcome=outcome,
        since_ms=since_ms,
        until_ms=until_ms,
        min_duration_ms=_number(asked, "min_duration_ms", MAX_MS),
    )


def page(found: RequestPage, *, for_operator: bool) -> dict[str, Any]:
    """Returns a list in OpenAI's shape. A page may be short or empty although there is more; then `last_id` is the
    place in the log at which the next page goes on.
    """
    data = [summary(one, for_operator=for_operator) for one in found.items]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": found.next_after or (data[-1]["id"] if data else None),
        "has_more": found.next_after is not None,
    }


def summary(one: LoggedRequest, *, for_operator: bool) -> dict[str, Any]:
    """Returns a request without its timeline. Only the operator sees workers."""
    shown = {
        "id": one.request_id,
        "object": "request",
        "created_at": one.started_at_ms // 1000,
        "created_at_ms": one.started_at_ms,
        "project_id": one.tenant_id,
        "api_key_id": one.key_id,
        "endpoint": one.endpoint,
        "model": one.model or None,
        "service_tier": _TIERS.get(one.tier),
        "batch_id": one.batch_id,
        "end_user": one.end_user or None,
        "metadata": one.metadata,
        "stream": one.is_stream,
        "status": one.status,
        "outcome": one.outcome,
        "error_code": one.error_code or None,
        "finish_reason": one.finish_reason or None,
        "usage": {
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "cache_write_tokens": one.cache_write_tokens,
            "completion_tokens": one.output_tokens,
        },
        "charge_micro_units": one.charge,
        "currency": one.currency or None,
        "ttft_ms": one.ttft_ms,
        "duration_ms": one.duration_ms,
        "num_retries": one.num_retries,
        "cache": {"miss_reason": one.miss_reason or None, "diverged_at_token": one.diverged_at_token},
        "trace_id": one.trace_id or None,
        "session_id": one.session_id or None,
    }
    return shown | {"worker": one.worker or None} if for_operator else shown


def sessions_filter_of(asked: Query, tenant_id: str | None) -> RequestFilter:
    """Reads the filters of sessions. Raises `ApiError` 400."""
    query.refuse_unknown(asked, ("project_id", "model", "api_key_id", "start_time", "end_time", "limit"))
    return _filter(asked, tenant_id)


def sessions(found: Sessions) -> dict[str, Any]:
    """Returns sums per conversation, the newest first. Requests before `counted_from_ms` are in none of them."""
    return {
        "object": "list",
        "data": [
            {
                "id": one.session_id,
                "object": "session",
                "project_id": one.tenant_id,
                "num_requests": one.num_requests,
                "first_at_ms": one.first_ms,
                "last_at_ms": one.last_ms,
                "usage": {
                    "prompt_tokens": one.prompt_tokens,
                    "cached_tokens": one.cached_tokens,
                    "completion_tokens": one.output_tokens,
                },
                "charge_micro_units": one.charge,
                "currency": one.currency or None,
            }
            for one in found.items
        ],
        "counted_from_ms": found.counted_from_ms,
    }


def volume(found: Volume) -> dict[str, Any]:
    """Returns the number of requests per bucket, the oldest first. Buckets before `counted_from_ms` are too low."""
    return {
        "object": "request_volume",
        "counted_from_ms": found.counted_from_ms,
        "data": [
            {
                "start_ms": found.since_ms + number * found.bucket_ms,
                "end_ms": found.since_ms + (number + 1) * found.bucket_ms,
                "num_requests": num_requests,
                "num_failed": num_failed,
            }
            for number, (num_requests, num_failed) in enumerate(found.counts)
        ],
    }


def detail(one: LoggedRequest, price: RequestPrice | None, *, for_operator: bool) -> dict[str, Any]:
    """Returns a request with its timeline and the parts of its price."""
    timeline = timelines.unpack(one.timeline)
    return summary(one, for_operator=for_operator) | {
        "traceparent": otlp.traceparent(one),
        "price": None if price is None else _price(price),
        "timeline": {
            "phases": [_phase(phase) for phase in timelines.phases(timeline)],
            "events": [
                *(_event(event, "gateway") for event in timeline.gateway),
                *(_event(event, "worker") for event in timeline.worker),
            ],
            "num_events_left_out": timeline.num_left_out,
        },
    }


def _price(price: RequestPrice) -> dict[str, Any]:
    return {
        "version": price.version,
        "currency": price.currency,
        "charge_micro_units": price.charge,
        "is_reversed": price.is_reversed,
        "invoice": price.invoice,
        "invoice_period": price.invoice_period,
        "parts": [
            {
                "part": part.name,
                "quantity": part.quantity,
                "rate_micro_units_per_million": part.rate,
                "amount_micro_units": part.amount,
            }
            for part in price.parts
        ],
    }


def _phase(phase: Phase) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": phase.name, "start_ms": phase.start_us / 1000, "end_ms": phase.end_us / 1000}
    return shown | _step(phase)


def _event(event: Event, source: str) -> dict[str, Any]:
    return {"source": source, "name": event.name, "at_ms": event.at_us / 1000} | _step(event)


def _step(one: Phase | Event) -> dict[str, Any]:
    return {"step": one.step, "num_tokens": one.num_tokens} if one.step >= 0 else {}


def _seconds(asked: Query, name: str) -> int | None:
    value = _number(asked, name, LAST_SECOND)
    return None if value is None else value * 1000


def _number(asked: Query, name: str, most: int) -> int | None:
    value = query.integer(asked, name)
    if value is not None and not 0 <= value <= most:
        raise errors.invalid(f"'{name}' must be 0 to {most}.", name)
    return value
