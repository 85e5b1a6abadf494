"""Every route of the console."""

from __future__ import annotations

from gateway.console import signing_in
from gateway.console.screens import cache, fairness, home, requests, webhooks, workers

ROUTES = [
    *signing_in.ROUTES,
    *home.ROUTES,
    *requests.ROUTES,
    *workers.ROUTES,
    *cache.ROUTES,
    *fairness.ROUTES,
    *webhooks.ROUTES,
]
