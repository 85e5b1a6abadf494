"""Bodies and objects of the OpenAI admin API: an organization's project is a tenant (api.md 6.1). The module holds
shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from accounting.database.paging import Page
from accounting.values.tenant_types import (
    ApiKeyInfo,
    ModelLimits,
    ModelPermissions,
    NewApiKey,
    ServiceAccountInfo,
    TenantInfo,
)
from gateway.schema.request_limits import Count

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Seconds = Annotated[int, Meta(ge=1, le=10**10)]

RATE_LIMIT_PREFIX = "rl-"
PROJECT_UNSUPPORTED = ("residency", "geography", "external_key_id")
RATE_LIMIT_UNSUPPORTED = ("max_requests_per_1_day", "max_images_per_1_minute", "max_audio_megabytes_per_1_minute")
T = TypeVar("T")


class ProjectFields(msgspec.Struct, frozen=True):
    name: Name


class NewServiceAccount(msgspec.Struct, frozen=True):
    name: Name
    expires_in_seconds: Seconds | None = None
    create_service_account_only: bool = False


class NewKey(msgspec.Struct, frozen=True):
    name: Name = "Secret Key"
    expires_in_seconds: Seconds | None = None
    scopes: list[str] = []


class NewAdminKey(msgspec.Struct, frozen=True):
    name: Name
    expires_in_seconds: Seconds | None = None
    scopes: list[str] = []
    """`admin` or `admin:read`. An empty list stands for `admin`."""


class KeyFields(msgspec.Struct, frozen=True):
    scopes: list[str] | None = None
    expires_in_seconds: Seconds | None = None


class ModelPermissionFields(msgspec.Struct, frozen=True):
    mode: Literal["allow_list", "deny_list"]
    model_ids: Annotated[list[Name], Meta(max_length=1000)]

    @property
    def permissions(self) -> ModelPermissions:
        return ModelPermissions(self.mode, tuple(self.model_ids))


class RateLimitChanges(msgspec.Struct, frozen=True):
    max_requests_per_1_minute: Count | None = None
    max_tokens_per_1_minute: Count | None = None
    batch_1_day_max_input_tokens: Count | None = None


def project(tenant: TenantInfo) -> dict[str, Any]:
    return {
        "id": tenant.id,
        "object": "organization.project",
        "name": tenant.name,
        "created_at": tenant.created_at,
        "archived_at": tenant.archived_at,
        "status": "archived" if tenant.status == "archived" else "active",
    }


def service_account(account: ServiceAccountInfo) -> dict[str, Any]:
    return {
        "id": account.id,
        "object": "organization.project.service_account",
        "name": account.name,
        "role": account.role,
        "created_at": account.created_at,
    }


def new_key(key: NewApiKey) -> dict[str, Any]:
    """Returns a new key. This is the only shape with the secret in it."""
    return {
        "id": key.info.id,
        "object": "organization.project.service_account.api_key",
        "name": key.info.name,
        "value": key.value,
        "created_at": key.info.created_at,
        "expires_at": key.info.expires_at,
    }


def api_key(key: ApiKeyInfo, owner: ServiceAccountInfo | None) -> dict[str, Any]:
    """Returns a key. If `owner` is None, the key was made at the command line, without a service account."""
    account = None
    if owner is not None:
        account = {"id": owner.id, "name": owner.name, "role": owner.role, "created_at": owner.created_at}
    return {
        "id": key.id,
        "object": "organization.project.api_key",
        "name": key.name or "",
        "redacted_value": key.redacted_value,
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "expires_at": key.expires_at,
        "owner": {"type": "service_account", "service_account": account},
        "owner_project_access": "active",
        "scopes": sorted(key.scopes),
    }


def admin_key(key: ApiKeyInfo) -> dict[str, Any]:
    """Returns a key of the operator. OpenAI's owner is a person; here it is always the operator."""
    owner = {
        "type": "user",
        "object": "organization.user",
        "id": key.tenant_id,
        "name": key.tenant_id,
        "created_at": key.created_at,
        "role": "owner",
    }
    return {
        "id": key.id,
        "object": "organization.admin_api_key",
        "name": key.name or "",
        "redacted_value": key.redacted_value,
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "expires_at": key.expires_at,
        "owner": owner,
        "scopes": sorted(key.scopes),
    }


def rate_limit(entry: ModelLimits) -> dict[str, Any]:
    return {
        "id": RATE_LIMIT_PREFIX + entry.model,
        "object": "project.rate_limit",
        "model": entry.model,
        "max_requests_per_1_minute": entry.limits.requests_per_minute,
        "max_tokens_per_1_minute": entry.limits.tokens_per_minute,
        "batch_1_day_max_input_tokens": entry.batch_backlog_tokens,
    }


def model_permissions(found: ModelPermissions) -> dict[str, Any]:
    return {"object": "project.model_permissions", "mode": found.mode, "model_ids": list(found.model_ids)}


def deleted(object_id: str, kind: str) -> dict[str, Any]:
    return {"id": object_id, "object": f"{kind}.deleted", "deleted": True}


def page_of(page: Page[T], shape: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    return listing([shape(item) for item in page.items], page.has_more)


def listing(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def reply(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
