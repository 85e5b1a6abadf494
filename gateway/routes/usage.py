"""`GET /v1/organization/usage/completions`, `/usage/embeddings` and `/costs`: rollups in OpenAI's shape (api.md 6.2).

The operator sees every tenant; a tenant key with `usage:read` sees its own tenant, whatever it filters by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from accounting.billing import reports
from accounting.billing.reports import Bucket, CostResult, Report, ReportQuery, UsageResult
from gateway.base import errors
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.routes.common import work_of
from gateway.schema import query
from gateway.schema.money import decimal
from gateway.schema.organization import reply

NEVER_SPLIT = {"user_id", "api_source"}
"""Dimensions of OpenAI's API that are always null here."""
COMMON = {"start_time", "end_time", "bucket_width", "limit", "page", "group_by", "project_ids", "api_key_ids"}


async def usage(request: web.Request) -> web.Response:
    """Reports the tokens and requests of completions in buckets of time."""
    asked = _query(request, COMMON | {"models", "user_ids", "batch"})
    async with reading(request) as conn:
        report = await reports.usage(conn, asked, int(time.time()))
    return await _reply(request, report, _usage_result)


async def usage_of_embeddings(request: web.Request) -> web.Response:
    """Reports the part of `usage` that is of models for embeddings."""
    asked = msgspec.structs.replace(_query(request, COMMON | {"models", "user_ids"}), of_embeddings=True)
    async with reading(request) as conn:
        report = await reports.usage(conn, asked, int(time.time()))
    return await _reply(request, report, _embeddings_result)


async def costs(request: web.Request) -> web.Response:
    """Reports the costs in buckets of time."""
    asked = _query(request, COMMON | {"line_items"})
    async with reading(request) as conn:
        report = await reports.costs(conn, asked, int(time.time()))
    return await _reply(request, report, _cost_result)


def _query(request: web.Request, known: set[str]) -> ReportQuery:
    asked = request.query
    query.refuse_unknown(asked, known)
    start = query.integer(asked, "start_time")
    if start is None:
        raise errors.invalid("Missing required parameter: 'start_time'.", "start_time", "missing_required_parameter")
    width: Any = query.choice(asked, "bucket_width", ("1m", "1h", "1d")) or "1d"
    groups: Any = tuple(dict.fromkeys(g for g in query.array(asked, "group_by") or () if g not in NEVER_SPLIT))
    principal = request[PRINCIPAL]
    # Nothing is booked on a user, so a filter by users finds nothing.
    nobody = query.array(asked, "user_ids") is not None
    return ReportQuery(
        start_time=start,
        end_time=query.integer(asked, "end_time"),
        width=width,
        limit=query.integer(asked, "limit"),
        group_by=groups,
        tenant_ids=query.array(asked, "project_ids") if principal.kind == "operator" else (principal.tenant_id,),
        key_ids=() if nobody else query.array(asked, "api_key_ids"),
        models=query.array(asked, "models"),
        batch=query.boolean(asked, "batch"),
        line_items=query.array(asked, "line_items"),
        page=query.text(asked, "page"),
    )


async def _reply(request: web.Request, report: Report, shape: Callable[[Any], dict[str, Any]]) -> web.Response:
    """Returns a page. Thousands of results are written off the loop, in their tenant's turn."""
    num_results = sum(len(bucket.results) for bucket in report.buckets)
    data = await work_of(request)(num_results, lambda: [_bucket(bucket, shape) for bucket in report.buckets])
    return reply(
        {
            "object": "page",
            "data": data,
            "has_more": report.next_page is not None,
            "next_page": report.next_page,
            "as_of": report.as_of,
        }
    )


def _bucket(bucket: Bucket, shape: Callable[[Any], dict[str, Any]]) -> msgspec.Raw:
    return msgspec.Raw(
        msgspec.json.encode(
            {
                "object": "bucket",
                "start_time": bucket.start_time,
                "end_time": bucket.end_time,
                "results": [shape(result) for result in bucket.results],
            }
        )
    )


def _embeddings_result(result: UsageResult) -> dict[str, Any]:
    return {
        "object": "organization.usage.embeddings.result",
        "input_tokens": result.usage.prompt,
        "input_cached_tokens": result.usage.cache_read,
        "num_model_requests": result.num_requests,
        "project_id": result.tenant_id,
        "user_id": None,
        "api_key_id": result.key_id,
        "model": result.model,
    }


def _usage_result(result: UsageResult) -> dict[str, Any]:
    tiers = {None: None, "interactive": "default", "batch": "batch"}
    # The currency of the charges is ours: whoever does not group by it gets OpenAI's fields alone.
    ours = {} if result.currency is None else {"currency": result.currency.lower()}
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": result.usage.prompt,
        "input_cached_tokens": result.usage.cache_read,
        "input_cache_write_tokens": result.usage.cache_write,
        "input_uncached_tokens": result.usage.uncached,
        "output_tokens": result.usage.output,
        "num_model_requests": result.num_requests,
        "project_id": result.tenant_id,
        "user_id": None,
        "api_key_id": result.key_id,
        "model": result.model,
        "batch": result.batch,
        "service_tier": tiers[result.service_tier],
        "api_source": None,
        **ours,
    }


def _cost_result(result: CostResult) -> dict[str, Any]:
    return {
        "object": "organization.costs.result",
        "amount": {"value": msgspec.Raw(decimal(result.amount).encode()), "currency": result.currency.lower()},
        "line_item": result.line_item,
        "quantity": result.quantity,
        "quantity_unit": result.unit,
        "project_id": result.tenant_id,
        "api_key_id": result.key_id,
        "user_id": None,
        "api_source": None,
    }


ROUTES = [
    Route("GET", "/v1/organization/usage/completions", usage, "usage:read"),
    Route("GET", "/v1/organization/usage/embeddings", usage_of_embeddings, "usage:read"),
    Route("GET", "/v1/organization/costs", costs, "usage:read"),
]
