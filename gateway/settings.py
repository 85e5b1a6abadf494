"""What a gateway process is told: one frozen class, read once from the environment, handed down as values.

Knows the names and the ranges. Does not know who reads them. A name that no process of Headgate knows, or a
value that cannot be read, stops the start with one sentence that names the variable.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pydantic_settings

from accounting.egress import Egress
from gateway.addresses import Network
from gateway.cli.home import Home

PREFIX = "HEADGATE_"

# Names that other processes read (supervisor, worker, jobs, tests, benchmarks): not ours, not unknown.
OTHER_NAMES = frozenset({
    "HEADGATE_API_KEY", "HEADGATE_FILES_URL", "HEADGATE_GATEWAYS", "HEADGATE_MODEL",
    "HEADGATE_PORT", "HEADGATE_HOST", "HEADGATE_READY_FILE", "HEADGATE_REDIS_SERVER", "HEADGATE_SOAK",
    "HEADGATE_MODEL_ID", "HEADGATE_OPS_BIND", "HEADGATE_OPS_FD", "HEADGATE_THREADS", "HEADGATE_URL", "HEADGATE_WORKERS",
})  # fmt: skip
OTHER_PREFIXES = (
    "HEADGATE_BENCH_", "HEADGATE_ENGINE_", "HEADGATE_JOBS_", "HEADGATE_TEST_", "HEADGATE_UP_",
    "HEADGATE_WORKER_",
)  # fmt: skip


class SettingsError(Exception):
    """One sentence for the operator."""


class ModelSource(pydantic.BaseModel, frozen=True, extra="forbid"):
    """Where a served model's tokenizer and template lie, and what the operator set for it."""

    path: str
    max_output_tokens: int | None = None
    """The model's output cap; None: the context is the only bound."""


LOOPBACK: tuple[Network, ...] = (
    ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"),
)  # fmt: skip
# Read by validators of ours: JSON or a comma-separated list, not pydantic-settings' own JSON.
_Raw = pydantic_settings.NoDecode


class GatewaySettings(pydantic_settings.BaseSettings):
    model_config = pydantic_settings.SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", arbitrary_types_allowed=True
    )

    home: Path
    slot: int = pydantic.Field(default=0, ge=0)
    bind: str = "127.0.0.1:8080"
    listen_fd: int | None = pydantic.Field(default=None, ge=0)
    """An inherited listening socket that several gateway processes share; wins over `bind`."""
    state_dir: Path | None = None
    """Where the slots' journals are; None: `home/state`."""
    database_url: str | None = None
    redis_url: str = "redis://127.0.0.1:6379/0"
    limiter_timeout_s: float = pydantic.Field(default=0.1, gt=0, le=5)
    """How long an answer of the limiter's Redis is waited for; later is 503 `limiter_unavailable`."""
    broker_url: str | None = None
    """Celery's broker, to ring for batches; None: the jobs process finds them by itself, within seconds."""
    models: Annotated[dict[str, ModelSource], _Raw] = pydantic.Field(default_factory=dict)

    invoice_issuer: str = pydantic.Field(default="Headgate", min_length=1, max_length=200)
    """Who the invoices are from."""
    invoice_automatic: bool = False
    """Close every tenant's month 48 hours after its end; False: `headgate invoice close` does."""

    drain_grace_s: float = pydantic.Field(default=5.0, ge=0)
    """Unready, but the listener stays open: time for a load balancer to look."""
    drain_s: float = pydantic.Field(default=60.0, ge=0)
    trace_ratio: float = pydantic.Field(default=0.01, ge=0, le=1)
    trace_parent_from: Annotated[tuple[Network, ...], _Raw] = ()
    request_log_rows: int = pydantic.Field(default=1_000_000, ge=0)
    metrics_tenants: int = pydantic.Field(default=100, ge=0)
    log_level: str = pydantic.Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    trusted_networks: Annotated[tuple[Network, ...], _Raw] = LOOPBACK
    """Peers without a limit of connections, whose `X-Forwarded-For` is believed: listed proxies, the jobs hosts."""
    max_connections: int = pydantic.Field(default=10_000, ge=1)
    max_connections_per_address: int = pydantic.Field(default=100, ge=1)
    max_connections_per_key: int = pydantic.Field(default=200, ge=1)
    smtp_url: str | None = None
    """Where mail of spend alerts goes out; None: alerts are noted and logged."""
    mail_from: str = "headgate@localhost"
    webhook_allowed_networks: Annotated[tuple[Network, ...], _Raw] = ()
    """Networks of the operator's own that webhooks may go to; else they go to public addresses alone."""
    retention_days: int = pydantic.Field(default=30, ge=0)
    """How long an archived tenant is kept before it may be deleted."""
    first_byte_s: float = pydantic.Field(default=5.0, gt=0)
    headers_s: float = pydantic.Field(default=10.0, gt=0)
    body_s: float = pydantic.Field(default=30.0, gt=0)
    keepalive_s: float = pydantic.Field(default=75.0, gt=0)
    write_timeout_s: float = pydantic.Field(default=30.0, gt=0)
    text_threads: int = pydantic.Field(default=2, ge=1)
    """Threads that tokenize and render templates, off the loop."""

    @pydantic.field_validator("models", mode="before")
    @classmethod
    def _read_models(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError:
            raise ValueError('must be a JSON object like {"name": {"path": "/dir"}}') from None

    @pydantic.field_validator(
        "trusted_networks", "trace_parent_from", "webhook_allowed_networks", mode="before"
    )
    @classmethod
    def _read_networks(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(
            ipaddress.ip_network(part.strip()) for part in value.split(",") if part.strip()
        )

    @property
    def egress(self) -> Egress:
        return Egress(self.webhook_allowed_networks)

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.home / 'headgate.db'}"

    @property
    def journals_dir(self) -> Path:
        """Of all slots."""
        return self.state_dir or self.home / "state"

    @property
    def journal_dir(self) -> Path:
        return self.journals_dir / f"gateway-{self.slot}" / "journal"

    @property
    def files_dir(self) -> Path:
        return self.home / "files"

    @property
    def run_dir(self) -> Path:
        return Home(self.home).run

    @property
    def ops_socket(self) -> Path:
        return self.run_dir / f"gateway-{self.slot}.sock"

    def secret(self, name: str) -> bytes:
        """A key file of the state directory. Raises `SettingsError`."""
        path = self.home / "secrets" / name
        try:
            value = path.read_bytes()
        except OSError as error:
            raise SettingsError(f"Cannot read the key file {path}: {error.strerror}.") from None
        if len(value) < 32:
            raise SettingsError(f"The key file {path} is too short: 32 bytes are needed.")
        return value


def load(environ: Mapping[str, str] | None = None) -> GatewaySettings:
    """Reads the environment. Raises `SettingsError`."""
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    known = {PREFIX + field.upper() for field in GatewaySettings.model_fields}
    for name in given:
        if name not in known | OTHER_NAMES and not name.startswith(OTHER_PREFIXES):
            raise SettingsError(f"Unknown environment variable {name}.")
    values = {name[len(PREFIX) :].lower(): given[name] for name in given if name in known}
    try:
        return GatewaySettings.model_validate(values)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        name = PREFIX + str(fault["loc"][0]).upper()
        if fault["type"] == "missing":
            raise SettingsError(f"The environment variable {name} is not set.") from None
        raise SettingsError(
            f"Cannot use the environment variable {name}: {fault['msg']}."
        ) from None
