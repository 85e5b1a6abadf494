"""Bodies and objects of files and batches (api.md section 8). The module holds shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from accounting.batches.batches import BatchInfo
from accounting.batches.files import MAX_EXPIRY_S, MIN_EXPIRY_S, FileInfo
from accounting.batches.validate import MAX_LINES
from accounting.requests.batch_results import LineFailures
from gateway.schema.convert import OwnBody

Seconds = Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(msgspec.Struct, frozen=True):
    anchor: Literal["created_at"]
    seconds: Seconds


class HeadgateOptions(OwnBody, frozen=True):
    invalid_lines: Literal["reject", "skip"] = "reject"


class NewBatch(msgspec.Struct, frozen=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    headgate: HeadgateOptions = HeadgateOptions()


Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"]


class EstimateOptions(HeadgateOptions, frozen=True):
    max_counted_lines: Annotated[int, Meta(ge=1, le=MAX_LINES)] = 2_000
    """A file with more lines is sampled evenly."""


class EstimateFields(NewBatch, frozen=True, forbid_unknown_fields=True):
    """The body of a batch that is not submitted yet."""

    endpoint: Endpoint
    completion_window: str = "24h"
    headgate: EstimateOptions = EstimateOptions()


def file_object(file: FileInfo) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(
    batch: BatchInfo, charge_micro_units: int, currency: str, now: int, failures: Sequence[LineFailures] | None = None
) -> dict[str, Any]:
    """Returns the batch as clients see it. `failures` counts its failed lines by how they failed; None if nobody asked."""
    errors = None if batch.errors is None else {"object": "list", "data": batch.errors}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.state,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **batch.at,
        "request_counts": {"total": batch.num_total, "completed": batch.num_completed, "failed": batch.num_failed},
        "usage": _usage(batch),
        "metadata": batch.metadata,
        "headgate": {
            **_progress(batch, now),
            "charge_micro_units": charge_micro_units,
            "currency": currency,
            **({} if failures is None else {"failures": [msgspec.structs.asdict(one) for one in failures]}),
        },
    }


def _usage(batch: BatchInfo) -> dict[str, Any]:
    usage = batch.usage
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cache_read},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total,
    }


def _progress(batch: BatchInfo, now: int) -> dict[str, Any]:
    """Returns what the API has no field for: speed, remaining time, cached share, and the reason of a pause."""
    began = batch.at["in_progress_at"]
    until = batch.at["finalizing_at"] or batch.at["cancelling_at"] or batch.at["expired_at"] or now
    num_ended = batch.num_completed + batch.num_failed - batch.num_invalid
    is_cut_off = batch.state in ("cancelling", "cancelled", "expired")  # lines that were never sent have ended, too
    rate = None if began is None or is_cut_off else num_ended / max(1, until - began)
    num_left = batch.num_total - batch.num_completed - batch.num_failed
    eta_s = round(num_left / rate) if rate and batch.state == "in_progress" else None
    prompt = batch.usage.prompt
    return {
        "eta_s": eta_s,
        "lines_per_s": None if rate is None else round(rate, 3),
        "cached_share": round(batch.usage.cache_read / prompt, 4) if prompt else None,
        "paused_reason": batch.paused_reason,
        "num_invalid_lines": batch.num_invalid,
    }
