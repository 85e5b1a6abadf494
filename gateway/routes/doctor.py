"""`/admin/v1/settings`: the versions and settings of the gateway that answers, and whether its database is in step."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform

from aiohttp import web

from accounting.database import migrate
from accounting.values.errors import SchemaError
from gateway.base.app_keys import LIFECYCLE, SETTINGS
from gateway.generation.served.models import MODELS
from gateway.http.sql import translated
from gateway.routes.admin import route
from gateway.schema import settings as shapes
from gateway.schema.organization import reply


async def show(request: web.Request) -> web.Response:
    """Shows this gateway's versions, models and settings, secrets masked."""
    settings = request.app[SETTINGS]
    try:
        with translated():
            await asyncio.to_thread(migrate.check, settings.sql_url)
        fault = None
    except SchemaError as error:
        fault = str(error)
    return reply(
        {
            "object": "settings",
            "version": importlib.metadata.version("headgate"),
            "python": platform.python_version(),
            "slot": settings.slot,
            "models": request.app[MODELS].names,
            "workers": request.app[LIFECYCLE].num_workers(),
            "migrations": {"in_step": fault is None, "message": fault},
            "data": shapes.shown(settings),
        }
    )


ROUTES = [route("GET", "/admin/v1/settings", show)]
