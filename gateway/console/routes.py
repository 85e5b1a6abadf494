"""Every route of the console."""

from __future__ import annotations

from gateway.console import signing_in
from gateway.console.screens import batches, doctor, home, playground, request, requests, sessions

ROUTES = [
    *signing_in.ROUTES,
    *home.ROUTES,
    *requests.ROUTES,
    *request.ROUTES,
    *sessions.ROUTES,
    *batches.ROUTES,
    *playground.ROUTES,
    *doctor.ROUTES,
]
