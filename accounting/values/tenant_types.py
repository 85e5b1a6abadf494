"""Values that an administrator reads and changes: tenants, their limits by model and their permissions, service accounts, keys."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from accounting.values.types import CacheShare, Limits, TenantStatus


class StreamsEnd(NamedTuple):
    """The change that ended the requests which run under a key."""

    version: int
    """Requests that began under an older version of the key or its tenant have to end."""
    tenant_status: TenantStatus
    """The tenant's status, which refuses its next request; `active` where the key itself does not work any more."""


class TenantInfo(msgspec.Struct, frozen=True):
    """A tenant as the admin surface shows it (there it is called a project)."""

    id: str
    name: str
    status: TenantStatus
    created_at: int
    archived_at: int | None
    limits: Limits
    weight: float = 1.0
    """The tenant's share of a busy worker, compared with the 1.0 of other tenants."""
    cache: CacheShare = CacheShare()
    time_zone: str = "UTC"
    """The time zone in which times are shown to the tenant; billing periods are in UTC."""
    stores_responses: bool = True
    """Whether responses of `/v1/responses` may be stored."""
    buys_overflow: bool = False
    """Whether bought capacity may answer, at its own price, where workers of our own would be late."""


class ModelLimits(msgspec.Struct, frozen=True):
    """A tenant's limits on one model, with the defaults filled in."""

    model: str
    limits: Limits
    batch_backlog_tokens: int | None


class ServiceAccountInfo(msgspec.Struct, frozen=True):
    id: str
    tenant_id: str
    name: str
    role: Literal["member", "none"]
    created_at: int


class ApiKeyInfo(msgspec.Struct, frozen=True):
    """All data of a key except its secret."""

    id: str
    public_id: str
    kind: Literal["live", "test", "admin"]
    tenant_id: str
    service_account_id: str | None
    name: str | None
    scopes: frozenset[str]
    models: frozenset[str] | None
    created_at: int
    expires_at: int | None
    last_used_at: int | None
    revoked_at: int | None
    limits: Limits
    disabled: bool = False
    addresses: tuple[str, ...] | None = None
    previous_until: int | None = None
    """The time until which the secret before the last rotation works."""

    @property
    def redacted_value(self) -> str:
        return f"hg_{self.kind}_{self.public_id}_***"


class NewApiKey(msgspec.Struct, frozen=True):
    """A new key with its secret. The secret exists only here and with the caller."""

    info: ApiKeyInfo
    value: str


class KeyChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """The wanted changes of a key. A field of UNSET is not changed; None stands for no bound."""

    scopes: tuple[str, ...] | UnsetType = UNSET
    expires_at: int | UnsetType | None = UNSET
    models: tuple[str, ...] | UnsetType | None = UNSET
    addresses: tuple[str, ...] | UnsetType | None = UNSET
    disabled: bool | UnsetType = UNSET
    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    concurrency: int | UnsetType | None = UNSET


class ModelPermissions(msgspec.Struct, frozen=True):
    """A tenant's permissions for models, valid for all its keys. By default no model is denied."""

    mode: Literal["allow_list", "deny_list"] = "deny_list"
    model_ids: tuple[str, ...] = ()

    def narrow(self, models: frozenset[str] | None) -> frozenset[str] | None:
        """Returns a key's allow-list within the tenant's. None stands for every model."""
        if self.mode == "deny_list":
            return models
        allowed = frozenset(self.model_ids)
        return allowed if models is None else models & allowed

    @property
    def denied(self) -> frozenset[str]:
        return frozenset(self.model_ids) if self.mode == "deny_list" else frozenset()


class Credentials(msgspec.Struct, frozen=True, omit_defaults=True):
    """The keys of a first start, as the home keeps them."""

    admin_key: str
    tenant_id: str
    api_key: str
    fresh: bool = False
    """The keys were not shown yet. It is true from the start that made them until a start has printed them."""
