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
    """Creates a project, which is a tenant."""
    fields = await admin.fields(request, shapes.ProjectFields, shapes.PROJECT_UNSUPPORTED)
    async with writing(request) as conn:
        tenant = await tenants.create(conn, fields.name, **admin.who(request))
    return reply(shapes.project(tenant))


async def list_projects(request: web.Request) -> web.Response:
    """Lists projects."""
    async with reading(request) as conn:
        page = await tenants.list_tenants(
            conn,
            **query.page(request.query),
            include_archived=query.boolean(request.query, "include_archived") or False,
            ids=query.array(request.query, "ids"),
        )
    return reply(shapes.page_of(page, shapes.project))


async def get_project(request: web.Request) -> web.Response:
    """Shows a project."""
    async with reading(request) as conn:
        tenant = await tenants.get(conn, admin.project(request))
    return reply(shapes.project(tenant))


async def update_project(request: web.Request) -> web.Response:
    """Changes a project."""
    fields = await admin.fields(request, shapes.ProjectFields, shapes.PROJECT_UNSUPPORTED)
    async with writing(request) as conn:
        tenant = await tenants.rename(conn, admin.project(request), fields.name, **admin.who(request))
    return reply(shapes.project(tenant))


async def archive_project(request: web.Request) -> web.Response:
    """Archives a project."""
    async with writing(request) as conn:
        tenant = await tenant_status.archive(
            conn, admin.project(request), end_streams=admin.ends_streams(request), **admin.who(request)
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
