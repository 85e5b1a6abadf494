"""Every route of the console."""

from __future__ import annotations

from gateway.console import signing_in
from gateway.console.screens import home, keys, requests

ROUTES = [*signing_in.ROUTES, *home.ROUTES, *requests.ROUTES, *keys.ROUTES]
