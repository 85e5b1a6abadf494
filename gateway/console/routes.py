"""Every route of the console."""

from __future__ import annotations

from gateway.console import signing_in
from gateway.console.screens import books, home, invoices, prices, requests, usage, usage_changes

ROUTES = [
    *signing_in.ROUTES,
    *home.ROUTES,
    *requests.ROUTES,
    *usage.ROUTES,
    *usage_changes.ROUTES,
    *invoices.ROUTES,
    *prices.ROUTES,
    *books.ROUTES,
]
