"""The frozen values at accounting's interface. They have integers only; no SQL, no HTTP, no frames.

Token counts are >= 0. Money is in micro-units (integer millionths of the currency), rates are micro-units per million
tokens. Times are Unix milliseconds where a name ends in `_ms`, Unix seconds where it ends in `_at`. Every id of a
tenant, key or request is an opaque string that accounting made or was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from accounting.values.budget_types import Budget, Quota

Tier = Literal["interactive", "batch"]
TokenClass = Literal["cache_read", "cache_write", "uncached", "output"]
TOKEN_CLASSES: tuple[TokenClass, ...] = ("cache_read", "cache_write", "uncached", "output")

Outcome = Literal[
    "ok", "client_gone", "internal", "worker_lost", "drain", "lease_lost", "batch_cancelled", "gateway_crash"
]
"""The ways in which a request can end (metering.md section 8)."""

WriteOffReason = Literal[
    "gateway_crash",
    "worker_crash",
    "resume",
    "internal",
    "drain",
    "lease_lost",
    "late_abort",
    "batch_retry",
    "batch_cancelled",
    "sdk_retry",
    "recompute",
    "speculation",
    "warm_up",
    "upstream_drift",
]

BILLED = ("settle", "reversal")
"""The kinds that rollups and invoices sum. A reversal takes a whole settle back."""
ENDED_BATCH = ("failed", "completed", "expired", "cancelled")
"""The states of a batch that never change again."""
CORRECTIONS = ("credit_note", "adjustment")
"""The kinds of ledger rows that take back a part of a charge."""
GRANT_KINDS = ("grant", "grant_use", "grant_expiry")
"""The kinds that move prepaid money and charge nothing."""
RESIDENCY = "residency"
"""The kind for KV that was kept for a tenant. It moves money and has no tokens."""
BILL_KINDS = ("tax", "payment")
"""The kinds that documents make: tax that a customer owes, and money that came in for an invoice."""
WITHOUT_REQUEST = (*GRANT_KINDS, RESIDENCY, *BILL_KINDS)
"""The kinds that belong to no request."""

OPERATOR_TENANT = "operator"
"""The reserved tenant that warm-up and public prefixes belong to."""


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
    """Micro-units per million tokens, by token class."""

    cache_read: int
    cache_write: int
    uncached: int
    output: int


class Price(msgspec.Struct, frozen=True):
    """The rates in force for one (tenant, model, tier) at one time. `version` is recorded in OPEN."""

    version: str
    """The version, written `<sheet>@<n>`."""
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
    """The limits of one level (tenant or key). None stands for no limit at this level."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


DEFAULT_MODEL_LIMITS = Limits(requests_per_minute=10_000, tokens_per_minute=10_000_000)
"""The limits of a new tenant on each model (metering.md section 5)."""


CacheIsolation = Literal["tenant", "key", "end_user"]


class CacheShare(msgspec.Struct, frozen=True):
    """The KV that a tenant may keep in the prefix cache of each worker. Only the worker knows the size of a block."""

    floor_blocks: int = 0
    """Blocks that stay with the tenant even if others need them."""
    quota_blocks: int | None = None
    """The most blocks. None stands for no bound."""
    ttl_s: int | None = None
    """The seconds for which interactive prompts are pinned after each use, within the worker's budget of pins."""
    read: bool = True
    write: bool = True
    """Nothing of the tenant's prompts is taken from the cache if `read` is False, or stored in it if `write` is
    False."""
    moves_volatile: bool = False
    """Lines of a system prompt that differ from request to request are put after what the cache can serve."""
    isolation: CacheIsolation = "tenant"
    """The requests that may meet each other's KV: those of the tenant, of one key, or of one key's end user."""


TenantStatus = Literal["active", "suspended", "archived"]


class Principal(msgspec.Struct, frozen=True):
    """The sender of a request, as the gateway knows it after authentication. It is immutable and versioned."""

    kind: Literal["operator", "tenant", "batch"]
    tenant_id: str
    key_id: str
    """The id of the key, `key_...`; never the secret."""
    scopes: frozenset[str]
    tenant_status: TenantStatus = "active"
    models: frozenset[str] | None = None
    """An allow-list. None stands for every model."""
    denied_models: frozenset[str] = frozenset()
    addresses: tuple[str, ...] | None = None
    """The networks that the key may be used from. None stands for any."""
    tenant_limits: Limits = Limits()
    key_limits: Limits = Limits()
    model_limits: tuple[tuple[str, Limits], ...] = ()
    """The limits that were set for single models of the tenant. Other models have DEFAULT_MODEL_LIMITS."""
    weight: float = 1.0
    cache: CacheShare = CacheShare()
    time_zone: str = "UTC"
    expires_at: int | None = None
    version: int = 0
    batch_id: str | None = None
    budgets: tuple[Budget, ...] = ()
    """All budgets of the tenant. Which of them bind depends on the request."""
    quotas: tuple[Quota, ...] = ()
    stores_responses: bool = True
    """Whether responses of `/v1/responses` may be stored."""
    buys_overflow: bool = False
    """Whether bought capacity may answer, at its own price, where workers of our own would be late."""

    def may_use(self, model: str) -> bool:
        return model not in self.denied_models and (self.models is None or model in self.models)


class LastingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a request that the journal and the ledger keep: ids, counts and fixed words. They have no room for a
    word of the client.
    """

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    tier: Tier
    endpoint: str = ""
    """The template of the route. It is empty for work that no client asked for."""
    prompt_tokens: int = 0
    trace_id: str = ""
    batch_id: str | None = None
    line_no: int | None = None


class RequestFacts(LastingFacts, frozen=True, kw_only=True):
    """The facts of a request. The gateway describes it once, when its prompt is counted. Admission, journal, settlement,
    ledger and logs take this value, or the lasting part of it, and copy no field by hand.
    """

    user: str = ""
    """The id that the client gives its own user."""
    metadata: Mapping[str, str] | None = None
    """The pairs that the client gives the request."""
    session_id: str = ""
    """The conversation that the client names."""

    def lasting(self) -> dict[str, Any]:
        """Returns the fields of `LastingFacts`."""
        return {name: getattr(self, name) for name in LastingFacts.__struct_fields__}


class Opened(LastingFacts, frozen=True, kw_only=True):
    """A request that was admitted: the journal's OPEN. It alone is enough for a successor of the process to end the
    request.
    """

    root: str
    """The KV identity of the worker that the request went to (`Hello.root`): it names the version of the weights."""
    price_version: str
    currency: str
    opened_at_ms: int
    reserved: int = 0
    """Micro-units reserved over all leases."""
    end_user: str = ""
    """The digest under which the limiter counts the client's own user. It is empty if no limit counts end users."""

    def void(
        self, outcome: Outcome, write_off: WriteOffReason, ended_at_ms: int, reserved: int | None = None
    ) -> Posting:
        """Returns the ending that charges nothing."""
        fields = msgspec.structs.asdict(self)
        if reserved is not None:
            fields["reserved"] = reserved
        return Posting(**fields, kind="void", outcome=outcome, write_off=write_off, ended_at_ms=ended_at_ms)


class BoughtAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at a server of somebody else: what its provider states, and what we judge. It has fixed words, names
    of the operator's and counts.
    """

    attempt: int
    upstream: str
    model: str
    """The provider's own name of the model."""
    state: Literal["delivered", "cut", "failed"]
    started_at_ms: int
    provider_id: str = ""
    """The provider's id of its answer."""
    stated: Usage | None = None
    """The usage that the provider states. None if it states none."""
    judged: Usage = Usage()
    """The most that is billed of it; zero for an attempt that failed."""
    drift: str = ""
    """The reason why `stated` and `judged` differ (docs/upstreams.md); empty where they agree."""
    expected_cost: int = 0
    """The charge of the provider by its price for `judged`, in micro-units."""
    stated_cost: int | None = None
    """The charge as the provider says it, in micro-units."""

    @property
    def counted(self) -> Usage:
        """The tokens that count as computed: what is stated, and no less than what is judged."""
        stated = self.stated or Usage()
        return Usage(*(max(getattr(stated, name), getattr(self.judged, name)) for name in TOKEN_CLASSES))


class Posting(Opened, frozen=True, kw_only=True):
    """One ending of a request, complete in itself: a journal's SETTLE or VOID. It carries the request into the ledger.
    Its charge is at most `reserved`.
    """

    kind: Literal["settle", "void"]
    outcome: Outcome
    ended_at_ms: int
    usage: Usage = Usage()
    """The billed tokens; zero for a void."""
    charge: Charge = Charge(0, 0, 0, 0, 0)
    write_off: WriteOffReason = "internal"
    """The reason under which engine tokens beyond `usage` are written off."""
    bought: tuple[BoughtAttempt, ...] = ()
    """The attempts that were bought of others for the request."""


class WitnessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that the engine reports for one attempt: the independent count in equation I1."""

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
