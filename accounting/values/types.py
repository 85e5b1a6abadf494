"""The frozen values that cross accounting's edge. Integers only; no SQL, no HTTP, no frames.

Token counts are >= 0. Money is in micro-units (integer millionths of the currency), rates are micro-units per
million tokens. Times are Unix milliseconds where a name ends in `_ms`, Unix seconds where it ends in `_at`.
Every id of a tenant, key or request is an opaque string that accounting made or was handed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from accounting.values.budget_types import Budget, Quota

Tier = Literal["interactive", "batch"]
TokenClass = Literal["cache_read", "cache_write", "uncached", "output"]
TOKEN_CLASSES: tuple[TokenClass, ...] = ("cache_read", "cache_write", "uncached", "output")

Outcome = Literal[
    "ok",
    "client_gone",
    "internal",
    "worker_lost",
    "drain",
    "quarantine",
    "lease_lost",
    "batch_cancelled",
    "gateway_crash",
]
"""How a request ended (metering.md section 8)."""

WriteOffReason = Literal[
    "gateway_crash",
    "worker_crash",
    "resume",
    "internal",
    "drain",
    "quarantine",
    "lease_lost",
    "late_abort",
    "batch_retry",
    "batch_cancelled",
    "sdk_retry",
    "recompute",
    "speculation",
    "warm_up",
]

BILLED = ("settle", "reversal")
"""Kinds that rollups and invoices sum; the second takes a whole settle back."""
CORRECTIONS = ("credit_note", "adjustment")
"""Kinds of ledger rows that take back a part of a charge."""
GRANT_KINDS = ("grant", "grant_use", "grant_expiry")
"""Kinds that move prepaid money and charge nothing."""
RESIDENCY = "residency"
"""The kind for KV that was kept for a tenant: it moves money and has no tokens."""
WITHOUT_REQUEST = (*GRANT_KINDS, RESIDENCY)
"""Kinds behind which no request stands."""

OPERATOR_TENANT = "operator"
"""Warm-up and public prefixes belong to this reserved tenant."""


class Usage(msgspec.Struct, frozen=True):
    """Disjoint token counts of one request or attempt: prompt = cache_read + cache_write + uncached."""

    cache_read: int = 0
    cache_write: int = 0
    uncached: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        return self.cache_read + self.cache_write + self.uncached

    @property
    def total(self) -> int:
        return self.prompt + self.output


class Rates(msgspec.Struct, frozen=True):
    """Micro-units per million tokens, by class."""

    cache_read: int
    cache_write: int
    uncached: int
    output: int


class Price(msgspec.Struct, frozen=True):
    """The rates in force for one (tenant, model, tier) at one moment; `version` goes into OPEN."""

    version: str
    """`<sheet>@<n>`"""
    currency: str
    rates: Rates


class Charge(msgspec.Struct, frozen=True):
    """One rounded amount and its exact split over the token classes (micro-units)."""

    total: int
    cache_read: int
    cache_write: int
    uncached: int
    output: int


class Limits(msgspec.Struct, frozen=True):
    """Quotas of one level (tenant or key). None: no limit at this level."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


DEFAULT_MODEL_LIMITS = Limits(requests_per_minute=10_000, tokens_per_minute=10_000_000)
"""What a new tenant may do with each model (metering.md section 5)."""


class CacheShare(msgspec.Struct, frozen=True):
    """What a tenant may keep in the prefix cache of each worker. Blocks and seconds: what they are is the worker's."""

    floor_blocks: int = 0
    """That others' needs leave to it."""
    quota_blocks: int | None = None
    """None: no bound."""
    ttl_s: int | None = None
    """Interactive prompts are pinned for so long after each use, within the worker's budget of pins."""
    read: bool = True
    write: bool = True
    """False: nothing of the tenant's prompts is taken from the cache, or left in it."""


class Principal(msgspec.Struct, frozen=True):
    """Who a request comes from: what the gateway knows after authentication. Immutable and versioned."""

    kind: Literal["operator", "tenant", "batch"]
    tenant_id: str
    key_id: str
    """`key_...`; never the secret."""
    scopes: frozenset[str]
    tenant_status: Literal["active", "suspended", "archived"] = "active"
    models: frozenset[str] | None = None
    """Allow-list; None: every model."""
    denied_models: frozenset[str] = frozenset()
    addresses: tuple[str, ...] | None = None
    """Networks that the key may be used from; None: any."""
    tenant_limits: Limits = Limits()
    key_limits: Limits = Limits()
    model_limits: tuple[tuple[str, Limits], ...] = ()
    """What was set for single models of the tenant; others have DEFAULT_MODEL_LIMITS."""
    weight: float = 1.0
    cache: CacheShare = CacheShare()
    time_zone: str = "UTC"
    expires_at: int | None = None
    version: int = 0
    batch_id: str | None = None
    budgets: tuple[Budget, ...] = ()
    """Every one of the tenant; which of them bind is the request's to say."""
    quotas: tuple[Quota, ...] = ()

    def may_use(self, model: str) -> bool:
        return model not in self.denied_models and (self.models is None or model in self.models)


class Posting(msgspec.Struct, frozen=True, kw_only=True):
    """One ending of a request, complete in itself: what a journal SETTLE or VOID carries into the ledger."""

    kind: Literal["settle", "void"]
    request_id: str
    outcome: Outcome
    tenant_id: str
    key_id: str
    model: str
    root: str
    tier: Tier
    price_version: str
    currency: str
    opened_at_ms: int
    ended_at_ms: int
    usage: Usage = Usage()
    """Billed tokens; zero for a void."""
    charge: Charge = Charge(0, 0, 0, 0, 0)
    write_off: WriteOffReason = "internal"
    """The reason under which engine tokens beyond `usage` are written off."""
    reserved: int = 0
    """Micro-units reserved over all leases; charge <= reserved."""
    trace_id: str = ""
    batch_id: str | None = None
    line_no: int | None = None
    end_user: str = ""
    """The place under which the limiter counts the client's own user, where a limit does."""


class WitnessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says it computed for one attempt: the independent count behind equation I1."""

    worker: str
    seq: int
    request_id: str
    attempt: int
    tenant_id: str
    root: str
    usage: Usage
    speculated: int = 0
    recomputed: int = 0
    reason: str = ""


LedgerRow = Mapping[Any, Any]
"""A ledger entry or an engine record by column name: a row of SQL, or one that will be written to it."""


class PostResult(msgspec.Struct, frozen=True):
    """What one transaction of the ledger changed; a duplicate is not an error."""

    num_new: int
    num_duplicate: int


class TenantInfo(msgspec.Struct, frozen=True):
    """A tenant as the admin surface shows it (there it is called a project)."""

    id: str
    name: str
    status: Literal["active", "suspended", "archived"]
    created_at: int
    archived_at: int | None
    limits: Limits
    weight: float = 1.0
    """Its share of a busy worker, against other tenants' 1.0."""
    cache: CacheShare = CacheShare()
    time_zone: str = "UTC"
    """In which moments are shown to it; periods are UTC's."""


class ModelLimits(msgspec.Struct, frozen=True):
    """A tenant's limits on one model, defaults filled in."""

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
    """Everything about a key but its secret."""

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
    """The secret before the last rotation works until then."""

    @property
    def redacted_value(self) -> str:
        return f"hg_{self.kind}_{self.public_id}_***"


class NewApiKey(msgspec.Struct, frozen=True):
    """The one moment in which the secret exists outside of the caller's hands."""

    info: ApiKeyInfo
    value: str


class KeyChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """What shall become of a key; UNSET: as it was. None: no bound."""

    scopes: tuple[str, ...] | UnsetType = UNSET
    expires_at: int | UnsetType | None = UNSET
    models: tuple[str, ...] | UnsetType | None = UNSET
    addresses: tuple[str, ...] | UnsetType | None = UNSET
    disabled: bool | UnsetType = UNSET
    requests_per_minute: int | UnsetType | None = UNSET
    tokens_per_minute: int | UnsetType | None = UNSET
    concurrency: int | UnsetType | None = UNSET


class ModelPermissions(msgspec.Struct, frozen=True):
    """Of a tenant, for all its keys. Without any: no model is denied."""

    mode: Literal["allow_list", "deny_list"] = "deny_list"
    model_ids: tuple[str, ...] = ()

    def narrow(self, models: frozenset[str] | None) -> frozenset[str] | None:
        """A key's allow-list within the tenant's. None: every model."""
        if self.mode == "deny_list":
            return models
        allowed = frozenset(self.model_ids)
        return allowed if models is None else models & allowed

    @property
    def denied(self) -> frozenset[str]:
        return frozenset(self.model_ids) if self.mode == "deny_list" else frozenset()
