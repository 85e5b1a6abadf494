"""The base of all tables, and those of tenants, keys, prices and the ledger: names, types and constraints alone.

Money is in micro-units and tokens are counts, both BIGINT. Columns ending in `_ms` are Unix milliseconds, those ending
in `_at` Unix seconds. Rows of the ledger, its legs, engine records, price versions and the audit log are appended and
never edited: triggers in the first migration refuse it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
# SQLite numbers rows by itself only if the type is written INTEGER.
RowNumber = BigInteger().with_variant(Integer(), "sqlite")


def partial_index(name: str, *columns: str, where: str, unique: bool = False) -> Index:
    """Returns an index over the rows that meet a condition, for both databases."""
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


class Base(DeclarativeBase):
    metadata = MetaData(
        # Migrations name constraints by it, so it never changes.
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - read by SQLAlchemy, not an instance default
        int: BigInteger,
        str: Text,
        dict[str, Any]: Json,
        list[str]: Json,
        list[Any]: Json,
    }


# Tenants, keys, limits


class Tenant(Base):
    __tablename__ = "tenant"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    status: Mapped[str] = mapped_column(server_default="active")
    """One of active, suspended, archived."""
    created_at: Mapped[int]
    archived_at: Mapped[int | None]
    version: Mapped[int] = mapped_column(server_default="0")
    """The auth epoch of the last change."""
    weight_percent: Mapped[int] = mapped_column(server_default="100")
    cache_floor_blocks: Mapped[int] = mapped_column(server_default="0")
    """Blocks on each worker that are kept for the tenant even if others need them."""
    cache_quota_blocks: Mapped[int | None]
    """The most blocks that the tenant may have on each worker. None stands for no bound."""
    cache_ttl_s: Mapped[int | None]
    """The seconds for which interactive prompts are pinned after each use."""
    cache_read: Mapped[bool] = mapped_column(server_default=true())
    cache_write: Mapped[bool] = mapped_column(server_default=true())
    cache_moves_volatile: Mapped[bool] = mapped_column(server_default=false())
    """Volatile lines of system prompts are put after what the cache can serve."""
    cache_isolation: Mapped[str] = mapped_column(server_default="tenant")
    """The requests that may use each other's KV: those of the same tenant, key, or end_user."""
    time_zone: Mapped[str] = mapped_column(server_default="UTC")
    """The time zone in which times are shown to the tenant; billing periods are in UTC."""
    stores_responses: Mapped[bool] = mapped_column(server_default=true())
    """Whether responses of `/v1/responses` may be stored."""
    buys_overflow: Mapped[bool] = mapped_column(server_default=false())
    """Requests may be answered by bought capacity, at its price, where workers of our own would be late."""
    erased_at: Mapped[int | None]
    """The time of erasure. Its texts cannot be read any more; the books stay."""
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrency: Mapped[int | None]

    __table_args__ = (CheckConstraint("status IN ('active', 'suspended', 'archived')", "status"),)


class ModelLimit(Base):
    """A tenant's limits on one model; a missing row means the defaults of `tenants.py`."""

    __tablename__ = "model_limit"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrency: Mapped[int | None]
    batch_backlog_tokens: Mapped[int | None]


class ServiceAccount(Base):
    __tablename__ = "service_account"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    name: Mapped[str]
    role: Mapped[str] = mapped_column(server_default="member")
    created_at: Mapped[int]
    deleted_at: Mapped[int | None]


class ApiKey(Base):
    """An API key. The secret itself is stored nowhere: `hash` is HMAC-SHA256 under the pepper of `pepper_version`."""

    __tablename__ = "api_key"

    id: Mapped[str] = mapped_column(primary_key=True)
    public_id: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    """One of live, test, admin."""
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    service_account_id: Mapped[str | None] = mapped_column(ForeignKey("service_account.id"), index=True)
    name: Mapped[str | None]
    hash: Mapped[bytes] = mapped_column(unique=True)
    pepper_version: Mapped[int] = mapped_column(server_default="1")
    scopes: Mapped[list[str]]
    models: Mapped[list[str] | None]
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    last_used_at: Mapped[int | None]
    revoked_at: Mapped[int | None]
    disabled: Mapped[bool] = mapped_column(server_default=false())
    addresses: Mapped[list[str] | None]
    """The networks that the key may be used from. None stands for any."""
    previous_hash: Mapped[bytes | None]
    """The hash of the secret before the last rotation, which works until `previous_until`."""
    previous_until: Mapped[int | None]
    streams_ended: Mapped[int | None]
    """The auth epoch of the last change that ended the requests under this key."""
    version: Mapped[int] = mapped_column(server_default="0")
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    concurrency: Mapped[int | None]

    __table_args__ = (CheckConstraint("kind IN ('live', 'test', 'admin')", "kind"),)


class AuthEpoch(Base):
    """A table of one row. The epoch rises with each change that authentication has to notice."""

    __tablename__ = "auth_epoch"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    epoch: Mapped[int]


class AuditLog(Base):
    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True)
    at_ms: Mapped[int]
    actor: Mapped[str]
    """A key id, `cli` or `system`."""
    event: Mapped[str]
    tenant_id: Mapped[str | None] = mapped_column(index=True)
    object_id: Mapped[str | None] = mapped_column(index=True)
    detail: Mapped[dict[str, Any]]


# Public prefixes


class PublicPrefix(Base):
    """A prompt that the operator published: every tenant's requests that begin with it share its KV."""

    __tablename__ = "public_prefix"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    model: Mapped[str]
    token_ids: Mapped[bytes]
    """The token ids as int32, little endian."""
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    deleted_at: Mapped[int | None]


# Prices


class PriceSheet(Base):
    __tablename__ = "price_sheet"

    id: Mapped[str] = mapped_column(primary_key=True)
    currency: Mapped[str]
    created_at: Mapped[int]


class PriceSheetVersion(Base):
    """A version in force in a half-open interval in UTC. The newest version is open until its successor sets
    `until_ms`, once."""

    __tablename__ = "price_sheet_version"

    sheet_id: Mapped[str] = mapped_column(ForeignKey("price_sheet.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    from_ms: Mapped[int]
    until_ms: Mapped[int | None]
    created_at: Mapped[int]

    __table_args__ = (
        CheckConstraint("until_ms IS NULL OR until_ms > from_ms", "interval"),
        UniqueConstraint("sheet_id", "from_ms"),
        partial_index("uq_price_sheet_version_open", "sheet_id", where="until_ms IS NULL", unique=True),
    )


class PriceRate(Base):
    """Micro-units per million tokens. Tier `batch` has its own rows, as a discount is a rate and not a multiplier."""

    __tablename__ = "price_rate"

    sheet_id: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    cache_read: Mapped[int]
    cache_write: Mapped[int]
    uncached: Mapped[int]
    output: Mapped[int]

    __table_args__ = (
        ForeignKeyConstraint(["sheet_id", "version"], ["price_sheet_version.sheet_id", "price_sheet_version.version"]),
        CheckConstraint("tier IN ('interactive', 'batch')", "tier"),
        *(
            CheckConstraint(f"{name} >= 0 AND {name} <= 1000000000000", name)
            for name in ("cache_read", "cache_write", "uncached", "output")
        ),
    )


class PriceAssignment(Base):
    """The tenant's own sheet. Without a row the default sheet applies."""

    __tablename__ = "price_assignment"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), primary_key=True)
    from_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    until_ms: Mapped[int | None]
    sheet_id: Mapped[str] = mapped_column(ForeignKey("price_sheet.id"))

    __table_args__ = (
        CheckConstraint("until_ms IS NULL OR until_ms > from_ms", "interval"),
        partial_index("uq_price_assignment_open", "tenant_id", where="until_ms IS NULL", unique=True),
    )


# The ledger


class LedgerEntry(Base):
    """One event. `kind` is settle, void or a write-off reason, or that of a reversal, a correction, a grant or kept KV.
    `attempt` is 0 for settle and void."""

    __tablename__ = "ledger_entry"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    model: Mapped[str]
    root: Mapped[str]
    tier: Mapped[str]
    price_version: Mapped[str]
    currency: Mapped[str]
    outcome: Mapped[str]
    write_off: Mapped[str]
    """The reason for engine tokens beyond this entry's. In a write-off row it is the row's kind."""
    opened_at_ms: Mapped[int]
    ended_at_ms: Mapped[int]
    posted_at_ms: Mapped[int]
    cache_read: Mapped[int]
    cache_write: Mapped[int]
    uncached: Mapped[int]
    output: Mapped[int]
    speculated: Mapped[int]
    recomputed: Mapped[int]
    charge: Mapped[int]
    charge_cache_read: Mapped[int]
    charge_cache_write: Mapped[int]
    charge_uncached: Mapped[int]
    charge_output: Mapped[int]
    reserved: Mapped[int]
    trace_id: Mapped[str]
    batch_id: Mapped[str | None]
    line_no: Mapped[int | None]

    __table_args__ = (
        partial_index("uq_ledger_entry_ending", "request_id", where="kind IN ('settle', 'void')", unique=True),
        Index("ix_ledger_entry_tenant_id_opened_at_ms", "tenant_id", "opened_at_ms"),
    )


class LedgerLeg(Base):
    """Double entry: debits are positive, credits negative, and per entry and unit they add up to 0. PostgreSQL has no
    foreign key here: `booking.py` makes legs from the entries in SQL, and entries are never deleted."""

    __tablename__ = "ledger_leg"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account: Mapped[str] = mapped_column(primary_key=True)
    unit: Mapped[str] = mapped_column(primary_key=True)
    """The unit: `tokens` or a currency."""
    token_class: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]

    __table_args__ = (
        ForeignKeyConstraint(
            ["request_id", "kind", "attempt"], ["ledger_entry.request_id", "ledger_entry.kind", "ledger_entry.attempt"]
        ),
        {"sqlite_with_rowid": False},
    )


class BatchCharge(Base):
    """The request that a batch line is charged for. A line is charged once, however many requests were sent for it."""

    __tablename__ = "batch_charge"

    batch_id: Mapped[str] = mapped_column(primary_key=True)
    line_no: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    request_id: Mapped[str] = mapped_column(unique=True)


class EngineRecordRow(Base):
    """The token counts of a worker for one attempt. They are E in the equations."""

    __tablename__ = "engine_record"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    worker: Mapped[str]
    seq: Mapped[int]
    tenant_id: Mapped[str] = mapped_column(index=True)
    root: Mapped[str]
    posted_at_ms: Mapped[int]
    cache_read: Mapped[int]
    cache_write: Mapped[int]
    uncached: Mapped[int]
    output: Mapped[int]
    speculated: Mapped[int]
    recomputed: Mapped[int]
    reason: Mapped[str]


class JournalOffset(Base):
    __tablename__ = "journal_offset"

    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    offset: Mapped[int]
    posted_at_ms: Mapped[int]


class Rollup:
    """Sums of settled requests by the start of the request. `bucket` is the bucket's first Unix second."""

    bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    price_version: Mapped[str] = mapped_column(primary_key=True)
    currency: Mapped[str] = mapped_column(primary_key=True)
    num_requests: Mapped[int]
    cache_read: Mapped[int]
    cache_write: Mapped[int]
    uncached: Mapped[int]
    output: Mapped[int]
    charge: Mapped[int]
    charge_cache_read: Mapped[int]
    charge_cache_write: Mapped[int]
    charge_uncached: Mapped[int]
    charge_output: Mapped[int]


class RollupMinute(Rollup, Base):
    __tablename__ = "rollup_minute"


class RollupHour(Rollup, Base):
    __tablename__ = "rollup_hour"


class RollupDay(Rollup, Base):
    __tablename__ = "rollup_day"
