"""Bodies and object of `/admin/v1/keys` and `/v1/keys`. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from accounting.access import delegation
from accounting.values.tenant_types import ApiKeyInfo, KeyChanges
from accounting.values.types import Limits
from gateway.schema import request_limits
from gateway.schema.convert import OwnBody, convert
from gateway.schema.request_limits import Count

Text = Annotated[str, Meta(min_length=1, max_length=200)]

_NULLABLE = ("models", "addresses", *request_limits.NAMES)


class NewKey(OwnBody, frozen=True):
    """A new key. A tenant's key leaves `project_id` out; what it leaves out of the rest is as it is for itself."""

    project_id: str = ""
    name: Text = "Secret Key"
    scopes: list[str] = field(default_factory=list)
    models: Annotated[list[Text], Meta(max_length=1000)] | None = None
    addresses: Annotated[list[Text], Meta(max_length=100)] | None = None
    expires_in_seconds: Annotated[int, Meta(ge=1, le=10**10)] | None = None
    max_requests_per_1_minute: Count | None = None
    max_tokens_per_1_minute: Count | None = None
    max_running_requests: Count | None = None


class KeyPatch(OwnBody, frozen=True):
    """Changes of a key. An absent field stays as it was; null removes the bound."""

    models: Annotated[list[Text], Meta(max_length=1000)] | UnsetType = UNSET
    addresses: Annotated[list[Text], Meta(max_length=100)] | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET
    max_requests_per_1_minute: Count | UnsetType = UNSET
    max_tokens_per_1_minute: Count | UnsetType = UNSET
    max_running_requests: Count | UnsetType = UNSET


class Rotation(OwnBody, frozen=True):
    overlap_seconds: Annotated[int, Meta(ge=0, le=604_800)] = 0


class LeakedKey(OwnBody, frozen=True):
    value: Annotated[str, Meta(min_length=1, max_length=256)]


def wanted(fields: NewKey, now: int, holder: ApiKeyInfo | None) -> dict[str, Any]:
    """Returns the properties of a new key by the names that accounting has for them. `holder` is the tenant's key that
    asks: what is left out is as it is for that key, and the scope `keys` is passed on only where it is named.
    """
    expires_at = None if fields.expires_in_seconds is None else now + fields.expires_in_seconds
    found: dict[str, Any] = {
        "name": fields.name,
        "scopes": fields.scopes or None,
        "models": fields.models,
        "addresses": fields.addresses,
        "expires_at": expires_at,
        "limits": Limits(**{field: getattr(fields, name) for name, field in request_limits.NAMES.items()}),
    }
    if holder is None:
        return found | {"scopes": fields.scopes}
    like_holder = {
        "scopes": holder.scopes - {delegation.SCOPE} or holder.scopes,
        "models": holder.models,
        "addresses": holder.addresses,
        "expires_at": holder.expires_at,
    }
    left_out = {name: value for name, value in like_holder.items() if found[name] is None}
    return found | left_out | {"service_account_id": holder.service_account_id}


def changes(body: Mapping[str, Any]) -> KeyChanges:
    """Reads the changes. Raises `ApiError` 400."""
    patch = convert(body, KeyPatch)
    given: dict[str, Any] = {}
    for name in KeyPatch.__struct_fields__:
        value = getattr(patch, name)
        if name in _NULLABLE and name in body and body[name] is None:
            value = None
        if value is not UNSET:
            given[request_limits.NAMES.get(name, name)] = tuple(value) if isinstance(value, list) else value
    return KeyChanges(**given)


def key(info: ApiKeyInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "api_key",
        "kind": info.kind,
        "project_id": info.tenant_id,
        "name": info.name,
        "redacted_value": info.redacted_value,
        "scopes": sorted(info.scopes),
        "models": None if info.models is None else sorted(info.models),
        "addresses": None if info.addresses is None else list(info.addresses),
        "disabled": info.disabled,
        "created_at": info.created_at,
        "last_used_at": info.last_used_at,
        "expires_at": info.expires_at,
        "previous_value_until": info.previous_until,
        **request_limits.shown(info.limits),
    }
