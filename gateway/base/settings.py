"""The settings of a gateway process: one frozen class, read once from the environment and handed down as values.

It knows the names and the ranges. It does not know who reads them. A name that no process of Headgate knows, or a value
that cannot be read, stops the start with one sentence that names the variable.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from accounting.events.egress import Egress, networks
from accounting.values import environment
from gateway.base.addresses import LOOPBACK, Network
from gateway.base.home import Home
from gateway.base.output_formats import REASONING_FORMATS, TOOL_FORMATS
from gateway.base.redis_link import TIMEOUT_S
from gateway.base.upstream_source import MAX_UPSTREAMS, UpstreamName, UpstreamSource
from workers.process import refused_settings, setting_forms
from workers.process.refused_settings import SettingsError as SettingsError
from workers.process.tls.certificates import Files, Setting, link_files

PREFIX = "HEADGATE_"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


class CannotStartYet(Exception):
    """The process cannot start because of something that may change while its settings stay, such as a database that
    is away. One sentence for the operator; the same start may succeed later.
    """


Name = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f]+$")]
"""A name that clients put into `model`."""


class ModelSource(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The directory of a served model's tokenizer and template, and the operator's settings for it."""

    path: str = pydantic.Field(min_length=1)
    """The model's directory. In headgate.toml it may be a hub id, which `headgate up` fetches."""
    max_output_tokens: int | None = pydantic.Field(default=None, ge=1)
    """The most tokens of one answer. If it is unset, the context is the only bound."""
    max_model_len: int | None = pydantic.Field(default=None, ge=2)
    """The longest context, prompt and answer together. If it is unset, the model's own is the bound."""
    aliases: tuple[Name, ...] = ()
    """Further names of the model. Prices, permissions and the ledger use the model's own name."""
    fallbacks: tuple[Name, ...] = ()
    """The models that are tried in this order when no worker of this one can answer."""
    tool_format: str = ""
    """The dialect in which the model writes tool calls (docs/tools.md); empty: found from the chat template."""
    reasoning_format: str = ""
    """The tags of the model's reasoning (docs/tools.md); empty: found from the chat template; `none`: it has none."""

    @property
    def digest(self) -> str:
        """Returns a text that is equal for equal settings, and shows no path."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    @pydantic.field_validator("tool_format")
    @classmethod
    def _known_tool_format(cls, name: str) -> str:
        return _one_of(name, TOOL_FORMATS)

    @pydantic.field_validator("reasoning_format")
    @classmethod
    def _known_reasoning_format(cls, name: str) -> str:
        return _one_of(name, REASONING_FORMATS)


def _one_of(name: str, known: Sequence[str]) -> str:
    """Returns the name of a format, or "" for the one that is found. Raises ValueError."""
    if name and name not in known:
        raise ValueError(f"must be one of {', '.join(known)}")
    return name


def _read_json(value: Any, example: str) -> Any:
    """Returns what a variable's text holds. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"must be a JSON object like {example}") from None


class GatewaySettings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)

    home: Path
    """The state directory: secrets, journals, files, sockets."""
    slot: int = pydantic.Field(default=0, ge=0)
    """The number of this gateway among those of the state directory. Each gateway has its own journal."""
    bind: setting_forms.Bind = "127.0.0.1:8080"
    """Address and port of the base URL."""
    tls_cert: Path | None = None
    """A file with the certificate of the base URL and those between it and its authority (PEM). With it the listener speaks
    TLS alone. It is read again when it changes.
    """
    tls_key: Path | None = None
    """The file of the certificate's private key (PEM, without a password), which other users must not be able to read."""
    listen_fd: int | None = pydantic.Field(default=None, ge=0)
    """An inherited listening socket that several gateway processes share; wins over `bind`."""
    local_fd: int | None = pydantic.Field(default=None, ge=0)
    """An inherited unix socket that listens for the base URL without TLS: this machine's own processes call it."""
    ops_bind: setting_forms.Bind = ""
    """Address and port of the operator's listener: probes with details and the metrics of all gateways of this home. If
    it is empty, the listener is on loopback at port 9300 + slot, or at another port if that one is taken.
    """
    ops_fd: int | None = pydantic.Field(default=None, ge=0)
    """An inherited listening socket for the operator's listener; wins over `ops_bind`."""
    heartbeat_fd: int | None = pydantic.Field(default=None, ge=0)
    """An inherited descriptor that the loop beats on each second; `headgate up` restarts a gateway that is silent."""
    state_dir: Path | None = None
    """The directory of the slots' journals. If it is unset, the directory is `home/state`."""
    database_url: setting_forms.DatabaseUrl | None = None
    """`postgresql+psycopg://user@host/db` or `sqlite+aiosqlite:///path`; unset: SQLite in the state directory."""
    redis_url: setting_forms.RedisUrl = "redis://127.0.0.1:6379/0"
    """The limiter's Redis or Valkey: `redis://host:port/db`, `rediss://` or `unix:///path`."""
    limiter_timeout_s: float = pydantic.Field(default=TIMEOUT_S, gt=0, le=5)
    """The longest time to wait for an answer of the limiter's Redis. A later answer means 503 `limiter_unavailable`."""
    broker_url: setting_forms.BrokerUrl | None = None
    """Celery's broker, which wakes the jobs process for batches. If it is unset, the jobs process finds batches by
    itself within seconds.
    """
    models: dict[str, ModelSource] = pydantic.Field(default_factory=dict)
    """The served models: JSON like `{"name": {"path": "/dir", "max_output_tokens": 4096}}`. `tool_format` and
    `reasoning_format` of a model say how it writes tool calls and reasoning (docs/tools.md), where its template does not.
    """
    models_file: Path | None = None
    """A file with the served models, used in place of `models` and read again at SIGHUP: a headgate.toml, or JSON in the
    form of `models`.
    """
    upstreams: dict[UpstreamName, UpstreamSource] = pydantic.Field(default_factory=dict, max_length=MAX_UPSTREAMS)
    """Servers of others that answer for models (docs/upstreams.md): JSON like
    `{"name": {"url": "https://host/v1", "key_env": "KEY", "models": {"served": {"name": "theirs"}}}}`.
    """
    quarantine_s: float = pydantic.Field(default=600.0, ge=0, le=86_400)
    """The seconds for which a request is refused after two worker processes ended in its first steps, with
    `request_quarantined`. With 0 every request is run again.
    """
    resume_s: float = pydantic.Field(default=60.0, ge=0, le=600)
    """The seconds for which a request whose worker was lost waits for a worker with the same weights, which goes on with
    it. The default is enough for a hang, which `headgate up` ends after 15 s, and a start. With 0 it fails at once, with
    `upstream_lost`.
    """
    overflow_after_s: float = pydantic.Field(default=5.0, gt=0, le=600)
    """The promised time to the first token. Beyond it, tenants that buy overflow are answered by upstreams of the model."""

    invoice_automatic: bool = False
    """Close every tenant's month 48 hours after its end. If it is false, `headgate invoice close` does."""

    drain_grace_s: float = pydantic.Field(default=5.0, ge=0)
    """How long a stopping gateway reports unready with its listener still open: time for a load balancer to notice."""
    drain_s: float = pydantic.Field(default=60.0, ge=0)
    """How long a stop waits for running requests before it ends them."""
    trace_ratio: float = pydantic.Field(default=0.01, ge=0, le=1)
    """The share of requests that are traced where no caller has decided."""
    trace_parent_from: tuple[Network, ...] = ()
    """Networks whose `traceparent` is continued, separated by commas."""
    request_log_rows: int = pydantic.Field(default=1_000_000, ge=1000)
    """The most rows of the request log. Beyond it the oldest are deleted, from the tenant that has the most; failed and
    slow requests go last. A row takes about 1 KB.
    """
    request_log_days: int = pydantic.Field(default=90, ge=1)
    """How long a row of the request log is kept at most."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """How much is logged."""

    trusted_networks: tuple[Network, ...] = ()
    """Proxies whose `X-Forwarded-For` is believed: they must set it themselves, not pass on a client's."""
    unlimited_networks: tuple[Network, ...] = LOOPBACK
    """Peers without a limit of connections per address, in addition to the trusted ones: proxies, load tools and jobs
    of this machine, which are many clients behind one address; jobs hosts.
    """
    max_connections: int = pydantic.Field(default=10_000, ge=1)
    """The most connections of all clients together. Further connections are closed."""
    max_connections_per_address: int = pydantic.Field(default=512, ge=1)
    """The most connections from one address that is neither trusted nor unlimited. A load tool has one address and one
    key, and some hundreds of requests at once. Other tenants do not pay for it, because running and waiting work is
    shared out by tenant.
    """
    max_connections_per_key: int = pydantic.Field(default=512, ge=1)
    """The most requests of one key that may run at one time. One more gets 429."""
    cors_origins: tuple[str, ...] = ()
    """Origins of browsers' pages that may call the API with a key, such as `https://app.example`, separated by commas.
    The console takes no part in it.
    """
    smtp_url: setting_forms.SmtpUrl | None = None
    """The SMTP server for mail of spend alerts. If it is unset, alerts are only stored and logged."""
    mail_from: str = "headgate@localhost"
    """The sender of mail."""
    webhook_allowed_networks: tuple[Network, ...] = ()
    """Networks of the operator's own that webhooks may reach. Otherwise webhooks reach public addresses alone."""
    retention_days: int = pydantic.Field(default=30, ge=0)
    """How long an archived tenant is kept before it may be deleted."""
    first_byte_s: float = pydantic.Field(default=5.0, gt=0)
    """A connection that sends nothing for this time is closed."""
    headers_s: float = pydantic.Field(default=10.0, gt=0)
    """The time within which a request's head must have come."""
    body_s: float = pydantic.Field(default=30.0, gt=0)
    """The time within which a body must have come, unless it keeps a rate that suits its size."""
    keepalive_s: float = pydantic.Field(default=75.0, gt=0)
    """How long an idle connection is kept open."""
    write_timeout_s: float = pydantic.Field(default=30.0, gt=0)
    """A client that reads nothing of its answer for this time is disconnected."""
    text_threads: int = pydantic.Field(default=2, ge=1)
    """Threads that read bodies, render templates and tokenize, off the loop."""

    json_body_bytes: int = pydantic.Field(default=4 * 2**20, ge=2**16, le=16 * 2**20)
    """The largest size of one JSON body. The default is 16 bytes for each token of a context of 262,144."""
    body_bytes_held: int = pydantic.Field(default=512 * 2**20, ge=64 * 2**20)
    """The most bytes of bodies of unfinished requests, over all tenants. One tenant may hold no more than is left."""
    body_bytes_per_minute: int = pydantic.Field(default=512 * 2**20, ge=16 * 2**20)
    """The most bytes of one tenant's bodies per minute."""

    link_ca: Path | None = None
    """A file with the authority by which gateways and workers know each other (PEM). With it, links to `tcp:` addresses of
    workers speak TLS, and both ends show a certificate (docs/several-hosts.md).
    """
    link_cert: Path | None = None
    """A file with this gateway's certificate for links to workers (PEM). It is read again when it changes."""
    link_key: Path | None = None
    """The file of that certificate's private key (PEM, without a password)."""
    link_plain: bool = False
    """Whether links to workers beyond this machine may go without TLS. Prompts and answers travel in the clear then, and
    whoever reaches a worker's port can use it.
    """

    _are_named = pydantic.field_validator(
        "home", "state_dir", "models_file", "tls_cert", "tls_key", "link_ca", "link_cert", "link_key", mode="before"
    )(setting_forms.named)

    @pydantic.field_validator("models", mode="before")
    @classmethod
    def _read_models(cls, value: Any) -> Any:
        return _read_json(value, '{"name": {"path": "/dir"}}')

    @pydantic.field_validator("upstreams", mode="before")
    @classmethod
    def _read_upstreams(cls, value: Any) -> Any:
        return _read_json(value, '{"name": {"url": "https://host/v1", "models": {}}}')

    @pydantic.field_validator(
        "trusted_networks", "unlimited_networks", "trace_parent_from", "webhook_allowed_networks", mode="before"
    )
    @classmethod
    def _read_networks(cls, value: Any) -> Any:
        return networks(value) if isinstance(value, str) else value

    @pydantic.field_validator("cors_origins", mode="before")
    @classmethod
    def _read_origins(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.split(",") if part.strip())
        if not all(_ORIGIN.fullmatch(origin) for origin in value):
            raise ValueError("must be origins like https://app.example or http://localhost:3000, and no wildcard")
        return value

    @pydantic.model_validator(mode="after")
    def _a_certificate_has_its_key(self) -> GatewaySettings:
        setting_forms.all_or_none(HEADGATE_TLS_CERT=self.tls_cert, HEADGATE_TLS_KEY=self.tls_key)
        setting_forms.of_links(self.link_ca, self.link_cert, self.link_key, is_plain=self.link_plain)
        return self

    @property
    def tls_files(self) -> Files | None:
        """The files of the base URL's certificate."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return Files(Setting("HEADGATE_TLS_CERT", self.tls_cert), Setting("HEADGATE_TLS_KEY", self.tls_key))

    @property
    def link_files(self) -> Files | None:
        """The files of the certificate for links to workers."""
        return link_files(self.link_ca, self.link_cert, self.link_key)

    @property
    def egress(self) -> Egress:
        return Egress(self.webhook_allowed_networks)

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.home / 'headgate.db'}"

    @property
    def journals_dir(self) -> Path:
        """The directory of all slots' journals."""
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
        """Reads a key file of the state directory. Raises `SettingsError`."""
        return refused_settings.key_file(self.home, name)


def load(environ: Mapping[str, str] | None = None) -> GatewaySettings:
    """Reads the environment. Raises `SettingsError`."""
    environ = setting_forms.given(os.environ if environ is None else environ)
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
    known = {PREFIX + field.upper() for field in GatewaySettings.model_fields}
    if (sentence := environment.unknown(given, known)) is not None:
        raise SettingsError(sentence)
    values = {name[len(PREFIX) :].lower(): given[name] for name in given if name in known}
    found = refused_settings.read(GatewaySettings, values, setting_forms.OF_ALL, environ)
    if isinstance(found, list):
        raise SettingsError(found[0].message, found)
    return found
