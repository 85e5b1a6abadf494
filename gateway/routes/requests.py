"""The request log over HTTP: `/admin/v1/requests` for the operator, `/v1/requests` for a tenant's own."""

from __future__ import annotations

from aiohttp import web

from accounting.requests import label_usage, request_log, request_prices, request_volume, sessions
from accounting.values import clock
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.routes.admin import only_of, part, route
from gateway.schema import label_usage as by_label
from gateway.schema import otlp, query
from gateway.schema import requests as shapes
from gateway.schema.organization import reply


async def list_requests(request: web.Request) -> web.Response:
    """Lists requests, the newest first, without their timelines."""
    tenant_id = only_of(request)
    wanted = shapes.filter_of(request.query, tenant_id)
    async with reading(request) as conn:
        found = await request_log.list_requests(conn, wanted, **query.page(request.query))
        older: dict[str, int | None] = {}
        if wanted.session_id is not None:
            after = found.next_after
            older["num_older"] = 0 if after is None else await request_log.count_older(conn, wanted, after)
    return reply(shapes.page(found, for_operator=tenant_id is None) | older)


async def show(request: web.Request) -> web.Response:
    """Shows one request with its timeline and why it cost what it did."""
    tenant_id = only_of(request)
    async with reading(request) as conn:
        found = await request_log.get(conn, part(request, "request_id"), tenant_id)
        price = await request_prices.price_of(conn, found)
    return reply(shapes.detail(found, price, for_operator=tenant_id is None))


async def show_spans(request: web.Request) -> web.Response:
    """Shows one request as OTLP/JSON, for any tool that reads traces."""
    tenant_id = only_of(request)
    async with reading(request) as conn:
        found = await request_log.get(conn, part(request, "request_id"), tenant_id)
    return reply(otlp.document(found, for_operator=tenant_id is None))


async def volume(request: web.Request) -> web.Response:
    """Counts requests over time."""
    wanted, num_buckets = shapes.volume_filter_of(request.query, only_of(request), clock.now_ms())
    async with reading(request) as conn:
        found = await request_volume.volume(conn, wanted, num_buckets)
    return reply(shapes.volume(found))


async def list_sessions(request: web.Request) -> web.Response:
    """Lists conversations with their sums, the newest first; their requests are listed with `session_id`."""
    wanted = shapes.sessions_filter_of(request.query, only_of(request))
    async with reading(request) as conn:
        found = await sessions.list_sessions(conn, wanted, query.limit(request.query, 20, 100))
    return reply(shapes.sessions(found))


async def list_label_sums(request: web.Request) -> web.Response:
    """Lists the sums of charged requests by end user or by a field of their metadata, the largest first."""
    wanted = by_label.filter_of(request.query, only_of(request), clock.now_ms())
    async with reading(request) as conn:
        labels = await label_usage.list_labels(conn, wanted)
        found = await label_usage.list_sums(conn, wanted, query.limit(request.query, 100, 1000))
        days = None
        if query.boolean(request.query, "by_day"):
            days = await label_usage.list_days(conn, wanted, by_label.largest(found))
    return reply(by_label.sums(found, labels, days))


ROUTES = [
    route("GET", "/admin/v1/requests", list_requests),
    route("GET", "/admin/v1/requests/volume", volume),
    route("GET", "/admin/v1/requests/{request_id}", show),
    route("GET", "/admin/v1/requests/{request_id}/otlp", show_spans),
    route("GET", "/admin/v1/sessions", list_sessions),
    route("GET", "/admin/v1/usage/labels", list_label_sums),
    Route("GET", "/v1/usage/labels", list_label_sums, "usage:read"),
    Route("GET", "/v1/sessions", list_sessions, "usage:read"),
    Route("GET", "/v1/requests", list_requests, "usage:read"),
    Route("GET", "/v1/requests/volume", volume, "usage:read"),
    Route("GET", "/v1/requests/{request_id}", show, "usage:read"),
    Route("GET", "/v1/requests/{request_id}/otlp", show_spans, "usage:read"),
]
