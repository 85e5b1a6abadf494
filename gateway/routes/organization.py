"""`/v1/organization/projects`: tenants in OpenAI's admin shapes.

The routes are thin: accounting defines what a change means. Operator keys only; another tenant's object is a 404 like
any unknown one.
"""

from __future__ import annotations

from aiohttp import web

from accounting.lifecycle import tenant_status
from accounting.tenants import tenants
from gateway.base.jobs_notifier import JOBS_NOTIFIER
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import PROJECT, PROJECTS, route
from gateway.routes.tenants import purge
from gateway.schema import organization as shapes
from gateway.schema import query
from gateway.schema.organization import reply
from gateway.telemetry.keys import RECORD


async def create_project(request: web.Request) -> web.Response:
    fields = await admin.fields(request, shapes.ProjectFields, shapes.PROJECT_UNSUPPORTED)
    async with writing(request) as conn:
        tenant = await tenants.create(conn, fields.name, now=admin.now(), actor=admin.actor(request))
    return reply(shapes.project(tenant))


async def list_projects(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        page = await tenants.list_tenants(
            conn,
            after=query.text(request.query, "after"),
            limit=query.limit(request.query, 20, 100),
            include_archived=query.boolean(request.query, "include_archived") or False,
        )
    return reply(shapes.page_of(page, shapes.project))


async def get_project(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        tenant = await tenants.get(conn, admin.project(request))
    return reply(shapes.project(tenant))


async def update_project(request: web.Request) -> web.Response:
    fields = await admin.fields(request, shapes.ProjectFields, shapes.PROJECT_UNSUPPORTED)
    async with writing(request) as conn:
        tenant = await tenants.rename(
            conn, admin.project(request), fields.name, now=admin.now(), actor=admin.actor(request)
        )
    return reply(shapes.project(tenant))


async def archive_project(request: web.Request) -> web.Response:
    async with writing(request) as conn:
        tenant = await tenant_status.archive(
            conn,
            admin.project(request),
            now=admin.now(),
            end_streams=admin.ends_streams(request),
            actor=admin.actor(request),
        )
    purge(request.app, tenant.id)
    await request.app[JOBS_NOTIFIER].notify(request[RECORD].outgoing_traceparent)
    return reply(shapes.project(tenant))


ROUTES = [
    route("POST", PROJECTS, create_project, shapes.ProjectFields),
    route("GET", PROJECTS, list_projects),
    route("GET", PROJECT, get_project),
    route("POST", PROJECT, update_project, shapes.ProjectFields),
    route("POST", f"{PROJECT}/archive", archive_project),
]
