"""Every route of the console."""

from __future__ import annotations

from gateway.console import signing_in
from gateway.console.screens import anomalies, audit, home, keys, limits, requests, tenants

ROUTES = [
    *signing_in.ROUTES,
    *home.ROUTES,
    *requests.ROUTES,
    *keys.ROUTES,
    *tenants.ROUTES,
    *limits.ROUTES,
    *audit.ROUTES,
    *anomalies.ROUTES,
]
