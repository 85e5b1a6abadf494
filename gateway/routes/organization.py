"""`/v1/organization/projects`: tenants, their service accounts, keys and rate limits, in OpenAI's admin shapes.

Thin: what a change means is accounting's. Operator keys only; another tenant's object is a 404 like any unknown one.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting import api_keys, prices, tenants
from accounting.errors import NotFoundError
from accounting.types import ApiKeyInfo, ModelLimits
from gateway import body, errors
from gateway.keys import PEPPER, PRINCIPAL
from gateway.routes.table import Handler, Route
from gateway.routes.tenants import purge
from gateway.schema import organization as shapes
from gateway.schema import query
from gateway.schema.convert import convert
from gateway.schema.json_body import decode_object
from gateway.schema.organization import reply
from gateway.sql import reading, writing

PROJECTS = "/v1/organization/projects"
MAX_BODY_BYTES = 64 * 1024
T = TypeVar("T", bound=msgspec.Struct)


async def create_project(request: web.Request) -> web.Response:
    fields = await _fields(request, shapes.ProjectFields, shapes.PROJECT_UNSUPPORTED)
    async with writing(request) as conn:
        tenant = await tenants.create(conn, fields.name, now=_now(), actor=_actor(request))
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
        tenant = await tenants.get(conn, _project(request))
    return reply(shapes.project(tenant))


async def update_project(request: web.Request) -> web.Response:
    fields = await _fields(request, shapes.ProjectFields, shapes.PROJECT_UNSUPPORTED)
    async with writing(request) as conn:
        tenant = await tenants.rename(
            conn, _project(request), fields.name, now=_now(), actor=_actor(request)
        )
    return reply(shapes.project(tenant))


async def archive_project(request: web.Request) -> web.Response:
    async with writing(request) as conn:
        tenant = await tenants.archive(conn, _project(request), now=_now(), actor=_actor(request))
    purge(request.app, tenant.id)
    return reply(shapes.project(tenant))


async def create_service_account(request: web.Request) -> web.Response:
    fields = await _fields(request, shapes.NewServiceAccount)
    with_key = not fields.create_service_account_only
    if not with_key and fields.expires_in_seconds is not None:
        raise errors.invalid("An account without a key has no expiry.", "expires_in_seconds")
    async with writing(request) as conn:
        account = await tenants.create_service_account(
            conn,
            _project(request),
            fields.name,
            now=_now(),
            with_key=with_key,
            actor=_actor(request),
        )
        key = None
        if with_key:
            wanted = shapes.NewKey(expires_in_seconds=fields.expires_in_seconds)
            key = await _create_key(request, conn, account.id, wanted)
    return reply({**shapes.service_account(account), "api_key": key})


async def list_service_accounts(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        await tenants.get(conn, _project(request))
        page = await tenants.list_service_accounts(
            conn,
            _project(request),
            after=query.text(request.query, "after"),
            limit=query.limit(request.query, 20, 100),
        )
    return reply(shapes.page_of(page, shapes.service_account))


async def get_service_account(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        account = await tenants.get_service_account(
            conn, _project(request), _part(request, "account_id")
        )
    return reply(shapes.service_account(account))


async def update_service_account(request: web.Request) -> web.Response:
    fields = await _fields(request, shapes.ProjectFields, ("role",))
    async with writing(request) as conn:
        account = await tenants.rename_service_account(
            conn,
            _project(request),
            _part(request, "account_id"),
            fields.name,
            now=_now(),
            actor=_actor(request),
        )
    return reply(shapes.service_account(account))


async def delete_service_account(request: web.Request) -> web.Response:
    account_id = _part(request, "account_id")
    async with writing(request) as conn:
        await tenants.delete_service_account(
            conn, _project(request), account_id, now=_now(), actor=_actor(request)
        )
    return reply(shapes.deleted(account_id, "organization.project.service_account"))


async def create_key(request: web.Request) -> web.Response:
    fields = await _fields(request, shapes.NewKey)
    async with writing(request) as conn:
        await tenants.living(conn, _project(request))
        account = await tenants.get_service_account(
            conn, _project(request), _part(request, "account_id")
        )
        key = await _create_key(request, conn, account.id, fields)
    return reply(key)


async def _create_key(
    request: web.Request, conn: AsyncConnection, account_id: str, fields: shapes.NewKey
) -> dict[str, Any]:
    key = await api_keys.create(
        conn, request.app[PEPPER], tenant_id=_project(request), now=_now(), name=fields.name,
        service_account_id=account_id, scopes=fields.scopes, expires_at=_expiry(fields.expires_in_seconds),
        actor=_actor(request),
    )  # fmt: skip
    return shapes.new_key(key)


async def list_keys(request: web.Request) -> web.Response:
    access = query.choice(request.query, "owner_project_access", ("active", "inactive", "any"))
    async with reading(request) as conn:
        await tenants.get(conn, _project(request))
        page = await api_keys.list_keys(
            conn,
            _project(request),
            after=query.text(request.query, "after"),
            limit=query.limit(request.query, 20, 100),
        )
        data = [await _with_owner(conn, key) for key in page.items]
    # The owner of a living key always has access: deleting a service account revokes its keys.
    return reply(
        shapes.listing([], False) if access == "inactive" else shapes.listing(data, page.has_more)
    )


async def get_key(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        key = await api_keys.get(conn, _project(request), _part(request, "key_id"))
        return reply(await _with_owner(conn, key))


async def update_key(request: web.Request) -> web.Response:
    fields = await _fields(request, shapes.KeyChanges)
    async with writing(request) as conn:
        key = await api_keys.change(
            conn, _project(request), _part(request, "key_id"), now=_now(), scopes=fields.scopes,
            expires_at=_expiry(fields.expires_in_seconds), actor=_actor(request),
        )  # fmt: skip
        return reply(await _with_owner(conn, key))


async def delete_key(request: web.Request) -> web.Response:
    key_id = _part(request, "key_id")
    async with writing(request) as conn:
        await api_keys.revoke(conn, _project(request), key_id, now=_now(), actor=_actor(request))
    return reply(shapes.deleted(key_id, "organization.project.api_key"))


async def _with_owner(conn: AsyncConnection, key: ApiKeyInfo) -> dict[str, Any]:
    owner = None
    if key.service_account_id is not None:
        owner = await tenants.get_service_account(conn, key.tenant_id, key.service_account_id)
    return shapes.api_key(key, owner)


async def list_rate_limits(request: web.Request) -> web.Response:
    after, before = query.text(request.query, "after"), query.text(request.query, "before")
    size = query.limit(request.query, 100, 100)
    async with reading(request) as conn:
        data = [shapes.rate_limit(entry) for entry in await _rate_limits(conn, _project(request))]
    data = [
        entry
        for entry in data
        if (after is None or entry["id"] > after) and (before is None or entry["id"] < before)
    ]
    # Walking backwards, the page is the one that ends where the caller stands.
    page = data[-size:] if before is not None and after is None else data[:size]
    return reply(shapes.listing(page, len(data) > size))


async def update_rate_limit(request: web.Request) -> web.Response:
    fields = await _fields(request, shapes.RateLimitChanges, shapes.RATE_LIMIT_UNSUPPORTED)
    async with writing(request) as conn:
        present = {
            shapes.RATE_LIMIT_PREFIX + e.model: e
            for e in await _rate_limits(conn, _project(request))
        }
        entry = present.get(_part(request, "rate_limit_id"))
        if entry is None:
            raise NotFoundError("No such rate limit.")
        changed = _changed(entry, fields)
        await tenants.set_model_limits(
            conn, _project(request), changed, now=_now(), actor=_actor(request)
        )
    return reply(shapes.rate_limit(changed))


async def _rate_limits(conn: AsyncConnection, tenant_id: str) -> list[ModelLimits]:
    """One per model that the tenant can be billed for, by name; what was never set has the defaults."""
    await tenants.get(conn, tenant_id)
    present = await tenants.model_limits(conn, tenant_id)
    models = {*present, *await prices.priced_models(conn, tenant_id, time.time_ns() // 1_000_000)}
    return [present.get(model, tenants.default_limits(model)) for model in sorted(models)]


def _changed(entry: ModelLimits, fields: shapes.RateLimitChanges) -> ModelLimits:
    limits = {
        "requests_per_minute": fields.max_requests_per_1_minute,
        "tokens_per_minute": fields.max_tokens_per_1_minute,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    backlog = fields.batch_1_day_max_input_tokens
    return ModelLimits(
        entry.model,
        msgspec.structs.replace(entry.limits, **given),
        entry.batch_backlog_tokens if backlog is None else backlog,
    )


async def _fields(request: web.Request, kind: type[T], unsupported: tuple[str, ...] = ()) -> T:
    value = decode_object(await body.read(request, MAX_BODY_BYTES))
    for name in unsupported:
        if value.get(name) is not None:
            raise errors.invalid(
                f"The parameter '{name}' is not supported.", name, "unsupported_parameter"
            )
    return convert(value, kind)


def _project(request: web.Request) -> str:
    return _part(request, "project_id")


def _part(request: web.Request, name: str) -> str:
    return request.match_info[name]


def _actor(request: web.Request) -> str:
    return request[PRINCIPAL].key_id


def _expiry(seconds: int | None) -> int | None:
    return None if seconds is None else _now() + seconds


def _now() -> int:
    return int(time.time())


def _route(method: Any, path: str, handler: Handler) -> Route:
    return Route(
        method,
        PROJECTS + path,
        handler,
        "admin",
        MAX_BODY_BYTES,
        json_body=not path.endswith("/archive"),
    )


PROJECT, ACCOUNT = "/{project_id}", "/{project_id}/service_accounts/{account_id}"
KEY = "/{project_id}/api_keys/{key_id}"

ROUTES = [
    _route("POST", "", create_project),
    _route("GET", "", list_projects),
    _route("GET", PROJECT, get_project),
    _route("POST", PROJECT, update_project),
    _route("POST", f"{PROJECT}/archive", archive_project),
    _route("POST", f"{PROJECT}/service_accounts", create_service_account),
    _route("GET", f"{PROJECT}/service_accounts", list_service_accounts),
    _route("GET", ACCOUNT, get_service_account),
    _route("POST", ACCOUNT, update_service_account),
    _route("DELETE", ACCOUNT, delete_service_account),
    _route("POST", f"{ACCOUNT}/api_keys", create_key),
    _route("GET", f"{PROJECT}/api_keys", list_keys),
    _route("GET", KEY, get_key),
    _route("POST", KEY, update_key),
    _route("DELETE", KEY, delete_key),
    _route("GET", f"{PROJECT}/rate_limits", list_rate_limits),
    _route("POST", f"{PROJECT}/rate_limits/{{rate_limit_id}}", update_rate_limit),
]
