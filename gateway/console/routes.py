"""Every route of the console."""

from __future__ import annotations

from gateway.console import pages, signing_in
from gateway.console.screens import home
from gateway.console.screens.access import audit, keys, limits, tenants
from gateway.console.screens.money import (
    anomalies,
    billing,
    invoices,
    prices,
    rerating,
    usage,
    usage_changes,
    usage_labels,
)
from gateway.console.screens.operation import books, cache, doctor, fairness, upstreams, webhooks, workers
from gateway.console.screens.traffic import batches, playground, request, requests, sessions

ROUTES = [
    *signing_in.ROUTES,
    *home.ROUTES,
    *requests.ROUTES,
    *usage.ROUTES,
    *usage_changes.ROUTES,
    *usage_labels.ROUTES,
    *billing.ROUTES,
    *invoices.ROUTES,
    *rerating.ROUTES,
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
    *upstreams.ROUTES,
    *cache.ROUTES,
    *fairness.ROUTES,
    *webhooks.ROUTES,
    *doctor.ROUTES,
    pages.get("/{rest:(?s:.*)}", pages.nowhere),
    pages.no_form(""),
    pages.no_form("/{rest:(?s:.*)}"),
]
