"""The settings of a jobs process: one frozen class, read once from the environment. The module knows names and ranges
only.

Times are explained in docs/design/jobs.md section 1; `test_time_scale` shortens all of them together, for tests.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pydantic

from accounting.events.egress import Egress, Network, networks
from accounting.values import environment
from workers.process import refused_settings, setting_forms
from workers.process.refused_settings import SettingsError as SettingsError

PREFIX = "HEADGATE_"


STOP_MARGIN_S = 5.0
"""The seconds after a drain in which the Celery worker has to end."""


class _Scaled:
    """Seconds that the time scale shortens. The class itself has them unscaled."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __get__(self, settings: JobsSettings | None, owner: type[JobsSettings]) -> float:
        return self._seconds * (1.0 if settings is None else settings.test_time_scale)


class JobsSettings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True, ignored_types=(_Scaled,)
    )

    home: Path
    """The state directory: secrets and files."""
    url: setting_forms.GatewayUrl
    """Base URL of the gateways; or `unix:///path`, a socket of theirs on this machine."""
    url_ca: Path | None = None
    """A file with the authorities by which the gateways' certificate is known (PEM), in place of the system's."""
    broker_url: setting_forms.BrokerUrl
    """Celery's broker: `redis://host:port/db` or `redis+socket:///path?virtual_host=0`."""
    database_url: setting_forms.DatabaseUrl | None = None
    """The URL of the gateways' database; unset: SQLite in the state directory."""
    jobs_concurrency: int = pydantic.Field(default=2, ge=1, le=256)
    """The most child processes of the Celery worker. They start when there is work, and end half a minute after it."""
    jobs_tenant_chunks: int = pydantic.Field(default=8, ge=1)
    """The most chunks of one tenant that may be claimed at once, over all jobs processes."""
    jobs_chunk_lines: int = pydantic.Field(default=64, ge=1, le=512)
    """The most lines that are claimed together."""
    jobs_process: str = "alone"
    """The name of the jobs process that the claims of its children belong to. The process draws it at its start."""
    jobs_pulse: Path | None = None
    """A file that is touched whenever a message is received."""
    ops_bind: setting_forms.Bind = ""
    """The address on which `/metrics` listens; empty: nowhere."""
    ops_fd: int | None = pydantic.Field(default=None, ge=0)
    """The file descriptor of a socket that listens already, used instead of an address."""
    heartbeat_fd: int | None = pydantic.Field(default=None, ge=0)
    """The file descriptor on which the supervisor hears each second that the process's loop turns."""
    webhook_allowed_networks: tuple[Network, ...] = ()
    """The operator's own networks that webhooks may go to. Without them they go only to public addresses."""
    test_time_scale: float = pydantic.Field(default=1.0, gt=0, le=1)
    """A factor for tests that shortens every time."""

    _are_named = pydantic.field_validator("home", "jobs_pulse", "url_ca", mode="before")(setting_forms.named)

    @pydantic.field_validator("url")
    @classmethod
    def _without_slash(cls, value: str) -> str:
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
    def counts_file(self) -> Path | None:
        """The file with the counts that the children share with their process."""
        return None if self.jobs_pulse is None else self.jobs_pulse.with_suffix(".counts")

    @property
    def owner_prefix(self) -> str:
        """The text that the claims of this process's children begin with."""
        return f"{socket.gethostname()}:{self.jobs_process}:"

    def secret(self, name: str) -> bytes:
        """Returns a key file of the state directory. Raises `SettingsError`."""
        return refused_settings.key_file(self.home, name)

    # Durations in seconds

    claim_s = _Scaled(60)
    renew_s = _Scaled(20)
    sweep_s = _Scaled(15)
    look_s = _Scaled(1)
    """Seconds between two checks of a runner whether it should stop."""
    chunk_s = _Scaled(120)
    """Seconds after which a runner gives the rest of its chunk back."""

    @property
    def drain_s(self) -> float:
        """The most seconds that a drain takes. A runner with nothing under way leaves at once, so tests need no shorter
        time."""
        return 25.0

    quiet_s = _Scaled(30)
    """Seconds after a cancel until the fences of chunks that are still claimed are raised."""
    heard_s = _Scaled(5)
    """Seconds after which every gateway knows of a change of a key or a tenant."""
    pause_s = _Scaled(60)
    """Seconds after which a paused batch tries again."""
    deaf_s = _Scaled(60)
    """Seconds after which the Celery worker is restarted if work is queued and it receives nothing."""
    webhook_s = _Scaled(5)
    """Seconds for one try, from the lookup of the name to the answer's status."""
    backoff_s = _Scaled(0.5)
    max_backoff_s = _Scaled(60)


SOFT_LIMIT_S, HARD_LIMIT_S, VISIBILITY_TIMEOUT_S = 240, 300, 600
"""A chunk that takes so long is given up; a child that shows no progress for so long is killed; a message that nobody
acknowledges for so long is sent again."""


def load(environ: Mapping[str, str] | None = None) -> JobsSettings:
    """Reads the settings. Raises `SettingsError`."""
    environ = setting_forms.given(os.environ if environ is None else environ)
    names = JobsSettings.model_fields
    known = {PREFIX + name.upper() for name in names}
    if (sentence := environment.unknown(environ, known)) is not None:
        raise SettingsError(sentence)
    values = {name: environ[PREFIX + name.upper()] for name in names if PREFIX + name.upper() in environ}
    found = refused_settings.read(JobsSettings, values, setting_forms.OF_ALL, environ)
    if isinstance(found, list):
        raise SettingsError(found[0].message, found)
    return found


def check() -> int:
    """Reads the settings of this process's environment, and says what is wrong with them: a sentence, and all as
    JSON."""
    try:
        load()
    except SettingsError as error:
        print(json.dumps([asdict(one) for one in error.problems]))
        print(error, file=sys.stderr)
        return os.EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(check())
