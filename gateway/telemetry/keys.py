"""Keys under which telemetry stands in the application and on a request.

They are apart from what they name: the poster's process has logs too, and is not to load aiohttp for them.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from gateway.telemetry.record import RequestRecord
from gateway.telemetry.tracing import Tracing

TRACING = web.AppKey("tracing", Tracing)
OBSERVERS = web.AppKey("observers", list[Callable[[RequestRecord], None]])
"""Each is called once per request after its end: access log, metrics, request log, tracing."""
RECORD = web.RequestKey("record", RequestRecord)
