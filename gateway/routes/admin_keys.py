"""`/admin/v1/keys`: properties of keys for which OpenAI's shapes have no field (rotation, models, addresses,
suspension, limits), and leaked keys.
"""

from __future__ import annotations

from aiohttp import web

from accounting.access import api_keys
from gateway.base.app_keys import PEPPER
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import route
from gateway.schema import admin_keys as shapes
from gateway.schema.organization import reply

KEY = "/admin/v1/keys/{key_id}"


async def get(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        return reply(shapes.key(await api_keys.find(conn, admin.part(request, "key_id"))))


async def change(request: web.Request) -> web.Response:
    wanted = shapes.changes(await admin.json_object(request))
    async with writing(request) as conn:
        present = await api_keys.find(conn, admin.part(request, "key_id"))
        end_streams = admin.ends_streams(request, default=wanted.disabled is True)
        changed = await api_keys.change(
            conn,
            present.tenant_id,
            present.id,
            wanted,
            now=admin.now(),
            end_streams=end_streams,
            actor=admin.actor(request),
        )
    return reply(shapes.key(changed))


async def rotate(request: web.Request) -> web.Response:
    fields = await admin.fields(request, shapes.Rotation)
    async with writing(request) as conn:
        rotated = await api_keys.rotate(
            conn,
            request.app[PEPPER],
            admin.part(request, "key_id"),
            fields.overlap_seconds,
            now=admin.now(),
            actor=admin.actor(request),
        )
    return reply(shapes.key(rotated.info) | {"value": rotated.value})


async def report_leak(request: web.Request) -> web.Response:
    fields = await admin.fields(request, shapes.LeakedKey)
    async with writing(request) as conn:
        await api_keys.revoke_leaked(
            conn, request.app[PEPPER], fields.value, now=admin.now(), actor=admin.actor(request)
        )
    return reply({"object": "leaked_key.report", "received": True})


ROUTES = [
    route("GET", KEY, get),
    route("PATCH", KEY, change, shapes.KeyPatch),
    route("POST", f"{KEY}/rotate", rotate, shapes.Rotation),
    route("POST", "/admin/v1/leaked-keys", report_leak, shapes.LeakedKey),
]
