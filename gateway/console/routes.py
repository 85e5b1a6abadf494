"""Every route of the console."""

from __future__ import annotations

from gateway.console import signing_in
from gateway.console.screens import (
    anomalies,
    audit,
    batches,
    books,
    cache,
    doctor,
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
    usage_changes,
    webhooks,
    workers,
)

ROUTES = [
    *signing_in.ROUTES,
    *home.ROUTES,
    *requests.ROUTES,
    *usage.ROUTES,
    *usage_changes.ROUTES,
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
