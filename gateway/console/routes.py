"""Every route of the console."""

from __future__ import annotations

from gateway.console import signing_in
from gateway.console.screens import (
    anomalies,
    audit,
    batches,
    books,
    cache,
    fairness,
    home,
    invoices,
    keys,
    limits,
    playground,
    prices,
    request,
    requests,
    sessions,
    tenants,
    usage,
    webhooks,
    workers,
)
from gateway.console.screens import anomalies, audit, home, keys, limits, requests, tenants
from gateway.console.screens import batches, doctor, home, playground, request, requests, sessions

ROUTES = [
    *signing_in.ROUTES,
    *home.ROUTES,
    *requests.ROUTES,
    *usage.ROUTES,
    *invoices.ROUTES,
    *prices.ROUTES,
    *books.ROUTES,
    *keys.ROUTES,
    *tenants.ROUTES,
    *limits.ROUTES,
    *audit.ROUTES,
    *anomalies.ROUTES,
    *request.ROUTES,
    *sessions.ROUTES,
    *batches.ROUTES,
    *playground.ROUTES,
    *workers.ROUTES,
    *cache.ROUTES,
    *fairness.ROUTES,
    *webhooks.ROUTES,
    *doctor.ROUTES,
]
