"""What a jobs process is told: one frozen class, read once from the environment. Knows names and ranges only.

Times are explained in docs/design/jobs.md section 1; `test_time_scale` shortens all of them together, for tests.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import pydantic
import pydantic_settings

from accounting.events.egress import Egress, Network, networks
from accounting.values import environment

PREFIX = "HEADGATE_"


class SettingsError(Exception):
    """One sentence for the operator."""


class JobsSettings(pydantic_settings.BaseSettings):
    model_config = pydantic_settings.SettingsConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    home: Path
    """The state directory: secrets and files."""
    url: str
    """Base URL of the gateways."""
    broker_url: str
    """Celery's broker: `redis://host:port/db` or `redis+socket:///path?virtual_host=0`."""
    database_url: str | None = None
    """As the gateways'; unset: SQLite in the state directory."""
    jobs_concurrency: int = pydantic.Field(default=2, ge=1, le=256)
    """Children of the Celery worker."""
    jobs_tenant_chunks: int = pydantic.Field(default=8, ge=1)
    """Chunks of one tenant that may be claimed at once, over all jobs processes."""
    jobs_chunk_lines: int = pydantic.Field(default=64, ge=1, le=512)
    """Lines that are claimed together at most."""
    jobs_process: str = "alone"
    """Names the jobs process that the claims of its children belong to; it draws it at its start."""
    jobs_pulse: Path | None = None
    """A file that is touched whenever a ring was heard."""
    ops_bind: str = pydantic.Field(default="", pattern=r"^(.+:\d+|)$")
    """Where `/metrics` listens; empty: nowhere."""
    ops_fd: int | None = pydantic.Field(default=None, ge=0)
    """A socket that listens already, in its place."""
    webhook_allowed_networks: Annotated[tuple[Network, ...], pydantic_settings.NoDecode] = ()
    """Networks of the operator's own that webhooks may go to; else they go to public addresses alone."""
    test_time_scale: float = pydantic.Field(default=1.0, gt=0, le=1)
    """For tests: shortens every time."""

    @pydantic.field_validator("home", "jobs_pulse", mode="before")
    @classmethod
    def _is_named(cls, value: Any) -> Any:
        """An empty path would be the directory one happens to be in."""
        if value == "":
            raise ValueError("must not be empty")
        return value

    @pydantic.field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if urlsplit(value).scheme not in ("http", "https"):
            raise ValueError("must begin with http:// or https://")
        return value.rstrip("/")

    @pydantic.field_validator("webhook_allowed_networks", mode="before")
    @classmethod
    def _read_networks(cls, value: Any) -> Any:
        return networks(value) if isinstance(value, str) else value

    @property
    def egress(self) -> Egress:
        return Egress(self.webhook_allowed_networks)

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.home / 'headgate.db'}"

    @property
    def files_dir(self) -> Path:
        return self.home / "files"

    @property
    def owner_prefix(self) -> str:
        """What the claims of this process's children begin with."""
        return f"{socket.gethostname()}:{self.jobs_process}:"

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

    # Durations in seconds

    @property
    def claim_s(self) -> float:
        return 60 * self.test_time_scale

    @property
    def renew_s(self) -> float:
        return 20 * self.test_time_scale

    @property
    def sweep_s(self) -> float:
        return 15 * self.test_time_scale

    @property
    def look_s(self) -> float:
        """How often a runner looks whether it should stop."""
        return 1 * self.test_time_scale

    @property
    def chunk_s(self) -> float:
        """A runner that is not done by then gives the rest of its chunk back."""
        return 120 * self.test_time_scale

    @property
    def drain_s(self) -> float:
        """An upper bound only: whoever has nothing under way leaves at once, so tests need it no shorter."""
        return 25.0

    @property
    def quiet_s(self) -> float:
        """After a cancel: when the fences of chunks that are still claimed are raised."""
        return 30 * self.test_time_scale

    @property
    def pause_s(self) -> float:
        """A paused batch tries again after this."""
        return 60 * self.test_time_scale

    @property
    def deaf_s(self) -> float:
        """Work is queued and nothing was consumed for so long: the Celery worker is restarted."""
        return 60 * self.test_time_scale

    @property
    def webhook_s(self) -> float:
        """One try, from the lookup of the name to the answer's status."""
        return 5 * self.test_time_scale

    @property
    def backoff_s(self) -> float:
        return 0.5 * self.test_time_scale

    @property
    def max_backoff_s(self) -> float:
        return 60 * self.test_time_scale


SOFT_LIMIT_S, HARD_LIMIT_S, VISIBILITY_TIMEOUT_S = 240, 300, 600


def load(environ: Mapping[str, str] | None = None) -> JobsSettings:
    """Raises `SettingsError`."""
    environ = os.environ if environ is None else environ
    names = JobsSettings.model_fields
    known = {PREFIX + name.upper() for name in names}
    if (sentence := environment.unknown(environ, known)) is not None:
        raise SettingsError(sentence)
    values = {name: environ[PREFIX + name.upper()] for name in names if PREFIX + name.upper() in environ}
    try:
        return JobsSettings.model_validate(values)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        name = PREFIX + str(fault["loc"][0]).upper()
        if fault["type"] == "missing":
            raise SettingsError(f"The environment variable {name} is not set.") from None
        message = fault["msg"]
        if fault["type"] == "string_pattern_mismatch":
            message = "docs/configuration.md says how it is written"
        raise SettingsError(f"Cannot use the environment variable {name}: {message}.") from None
