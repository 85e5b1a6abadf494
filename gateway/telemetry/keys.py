"""The keys of telemetry objects in the application and on a request.

They are separate from the classes that they name: the poster's process has logs too, and must not import aiohttp for
them.
"""

from __future__ import annotations

from aiohttp import web

from gateway.telemetry.observers import Observers
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.tracing import Tracing

TRACING = web.AppKey("tracing", Tracing)
OBSERVERS = web.AppKey("observers", Observers)
"""Access log, metrics, request log, tracing."""
RECORD = web.RequestKey("record", RequestRecord)
PAGE_READ = web.RequestKey("page_read", bool)
"""Set on a request that a page of the console makes for what it shows."""
