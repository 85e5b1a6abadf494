"""The sums of a home page: `/admin/v1/usage/summary` of all tenants for the operator, `/v1/usage/summary` of a tenant's
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

from accounting.billing import forecasts, summaries
from accounting.limits import caps
from accounting.requests import failures
from accounting.values import clock
from accounting.values.periods import DAY_S, bounds, month_start, period_of
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.routes.admin import only_of, route
from gateway.schema import query
from gateway.schema import usage_summary as shapes
from gateway.schema.organization import reply
from gateway.schema.usage_summary import Spending

NUM_CAPS, NUM_TENANTS, NUM_CAUSES = 10, 10, 5


async def show(request: web.Request) -> web.Response:
    """Sums up what was spent today and this month, its forecast, the cache's part, failures and the nearest caps."""
    query.refuse_unknown(request.query, ())
    tenant_id = only_of(request)
    now_ms = clock.now_ms()
    now = now_ms // 1000
    month, today = month_start(now), now - now % DAY_S
    first = min(month, today - forecasts.NUM_DAYS * DAY_S)
    async with reading(request) as conn:
        charges = await summaries.charges_by_day(conn, first, today + DAY_S, tenant_id)
        prompts = await summaries.prompts(conn, month, tenant_id)
        failed = await failures.of_newest(conn, now_ms - DAY_S * 1000, tenant_id, NUM_CAUSES)
        nearest = await caps.nearest(conn, now_ms, tenant_id, NUM_CAPS)
        tenants = await summaries.top_tenants(conn, month, NUM_TENANTS) if tenant_id is None else None
    shown = shapes.summary(
        now_ms=now_ms,
        period=period_of(now),
        spending=[_spending(currency, days, first, now) for currency, days in sorted(charges.items())],
        prompts=prompts,
        failures=failed,
        caps=nearest,
        tenants=tenants,
    )
    return reply(shown)


def _spending(currency: str, charges: Mapping[int, int], first: int, now: int) -> Spending:
    month, today = month_start(now), now - now % DAY_S
    days: Sequence[tuple[int, int]] = [(day, charges.get(day, 0)) for day in range(first, today + DAY_S, DAY_S)]
    spent = sum(amount for day, amount in days if day >= month)
    recent = [amount for day, amount in days if day < today]
    _, month_end = bounds(period_of(now))
    return Spending(currency, charges.get(today, 0), spent, days, forecasts.forecast(spent, recent, now, month_end))


ROUTES = [route("GET", "/admin/v1/usage/summary", show), Route("GET", "/v1/usage/summary", show, "usage:read")]
