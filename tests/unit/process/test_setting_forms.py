"""Forms of settings: what is refused, that every process agrees, and what is masked in the sentence."""

from __future__ import annotations

import os

import pytest

from gateway.base.settings import GatewaySettings, SettingsError
from gateway.base.settings import load as load_gateway
from gateway.cli import config_check
from workers.engine.settings import WorkerSettings
from workers.engine.settings import load as load_worker
from workers.engine.values.errors import StartError
from workers.jobs.base.settings import JobsSettings
from workers.jobs.base.settings import SettingsError as JobsError
from workers.jobs.base.settings import load as load_jobs
from workers.process import masked, refused_settings, setting_forms

NEEDED = {
    "HEADGATE_HOME": "/srv",
    "HEADGATE_MODEL": "m",
    "HEADGATE_URL": "http://h",
    "HEADGATE_BROKER_URL": "memory://",
}
REFUSED = {
    "HEADGATE_BIND": ["nonsense", "127.0.0.1:99999", ":80", "h:x"],
    "HEADGATE_OPS_BIND": ["nonsense", "h:99999"],
    "HEADGATE_DATABASE_URL": ["mysql://u:pw@h/x", "sqlite://", "postgresql+psycopg://h:x/d", "x"],
    "HEADGATE_REDIS_URL": ["redis//h", "http://h", "redis://h:x", "redis://h:99999/0", "redis://h/abc", "unix://"],
    "HEADGATE_BROKER_URL": ["b", "http://h", "redis://h:x/1", "redis+socket://h"],
    "HEADGATE_SMTP_URL": ["mail", "smtp://", "http://h", "smtp://h:x"],
    "HEADGATE_URL": ["h", "ftp://h", "http://"],
    "HEADGATE_LOG_FORM": ["xml", ""],
    "OTEL_EXPORTER_OTLP_ENDPOINT": ["x:1", "grpc://h:4317", "http://h:x"],
    "HEADGATE_HOST": ["a b", "h/x"],
    "HEADGATE_PORT": ["99999", "-1", "x", "1.5", ""],
    "HEADGATE_GATEWAYS": ["-1", "0", "65", "x"],
    "HEADGATE_THREADS": ["0", "x"],
    "HEADGATE_API_KEY": [
        "hg_live_pw\n",
        "hg_live_pw\r",
        "hg_live pw",
        "hg_live_pw\x7f",
        "hg_live_pwü",
        "hg_live_pw\udcff",
    ],
}
TAKEN = {
    "HEADGATE_BIND": ["127.0.0.1:0", "[::1]:80", "localhost:8080", ""],
    "HEADGATE_DATABASE_URL": [
        "postgresql+psycopg://u:p%40:/w@h:5432/d?sslmode=require",
        "postgresql+psycopg://headgate@/headgate",
        "postgresql+psycopg://[::1]/d",
        "sqlite+aiosqlite:////x.db",
        "",
    ],
    "HEADGATE_REDIS_URL": ["redis://h", "rediss://:pw@h:6379/0", "unix:///run/redis.sock?db=3", ""],
    "HEADGATE_BROKER_URL": ["redis://", "redis+socket:///r.sock?virtual_host=1", "amqp://u:p@h:5672//", "memory://"],
    "HEADGATE_SMTP_URL": ["smtp://127.0.0.1:2525", "smtps://u:p@h", ""],
    "OTEL_EXPORTER_OTLP_ENDPOINT": ["http://127.0.0.1:4318", ""],
    "HEADGATE_LOG_FORM": ["text", "json"],
    "HEADGATE_HOST": ["0.0.0.0", "::", "localhost", ""],
    "HEADGATE_PORT": ["0", "65535"],
    "HEADGATE_API_KEY": ["hg_live_x", "sk-a.b/c=", ""],
}
READS = {
    "HEADGATE_LOG_FORM": (load_gateway, load_jobs, load_worker),
    "OTEL_EXPORTER_OTLP_ENDPOINT": (load_gateway, load_jobs),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("HEADGATE_", "OTEL_")) and "TEST" not in name:
            monkeypatch.delenv(name)
    for name, value in NEEDED.items():
        monkeypatch.setenv(name, value)


def _readers(name):
    field = name.removeprefix("HEADGATE_").lower()
    classes = ((GatewaySettings, load_gateway), (JobsSettings, load_jobs), (WorkerSettings, load_worker))
    return READS.get(name, tuple(load for kind, load in classes if field in kind.model_fields))


def _problems(name, value, monkeypatch):
    """What the command says, without the processes that it starts."""
    monkeypatch.setenv(name, value)
    return [one.message for one in refused_settings.refused(setting_forms.COMMANDS, setting_forms.given(os.environ))]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_what_is_refused_is_refused_by_everybody_with_one_sentence(name, value, monkeypatch):
    said = set(_problems(name, value, monkeypatch))
    readers = _readers(name)
    for load in readers:
        with pytest.raises((SettingsError, JobsError, StartError)) as found:
            load()
        if name != "HEADGATE_THREADS":  # the class says its bound in pydantic's words
            said.add(str(found.value))
    assert said or readers
    if name != "HEADGATE_THREADS":
        assert len(said) == 1, said
    sentence = said.pop()
    assert sentence.startswith(f"Cannot use the environment variable {name} = ")
    assert "\n" not in sentence
    assert "pw" not in sentence


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in TAKEN.items() for value in values])
def test_what_is_taken_is_taken_by_everybody(name, value, monkeypatch):
    assert _problems(name, value, monkeypatch) == []
    for load in _readers(name):
        load()


def test_an_empty_url_is_not_set_and_a_needed_one_is_missing(monkeypatch):
    monkeypatch.setenv("HEADGATE_REDIS_URL", "")
    assert load_gateway().redis_url == "redis://127.0.0.1:6379/0"
    monkeypatch.setenv("HEADGATE_BROKER_URL", "")
    with pytest.raises(JobsError, match="HEADGATE_BROKER_URL is not set"):
        load_jobs()


FIELDS = sorted(
    {
        (kind, field)
        for kind in (GatewaySettings, JobsSettings, WorkerSettings)
        for field, info in kind.model_fields.items()
        if any(word in str(info.annotation) for word in ("int", "float", "bool", "Literal"))
    },
    key=str,
)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_value_of_another_type_is_one_sentence_with_the_name(kind, field, monkeypatch):
    name = f"HEADGATE_{field.upper()}"
    monkeypatch.setenv(name, "soon")
    load = {GatewaySettings: load_gateway, JobsSettings: load_jobs, WorkerSettings: load_worker}[kind]
    with pytest.raises((SettingsError, JobsError, StartError)) as found:
        load()
    assert str(found.value).startswith(f"Cannot use the environment variable {name} = 'soon': ")
    assert "\n" not in str(found.value)
    (problem,) = found.value.problems
    assert (problem.setting, problem.source, problem.value) == (name, "environment", "soon")


def test_config_check_has_the_faults_of_all_processes(tmp_path, monkeypatch):
    for name, value in (
        ("HEADGATE_PORT", "99999"),
        ("HEADGATE_DRAIN_S", "x"),
        ("HEADGATE_JOBS_CONCURRENCY", "0"),
        ("HEADGATE_ENGINE_BLOCK_SIZE", "0"),
    ):
        monkeypatch.setenv(name, value)
    found = {one.setting: one.value for one in config_check.problems(None, tmp_path)}
    assert found == {
        "HEADGATE_PORT": "99999",
        "HEADGATE_DRAIN_S": "x",
        "HEADGATE_JOBS_CONCURRENCY": "0",
        "HEADGATE_ENGINE_BLOCK_SIZE": "0",
    }


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HEADGATE_REDIS_URL", "redis://:pw@h:1/0", "redis://:***@h:1/0"),
        ("HEADGATE_DATABASE_URL", "postgresql+psycopg://u:p@w/x@h/d", "postgresql+psycopg://u:***@h/d"),
        ("HEADGATE_DATABASE_URL", "postgresql://h/d?user=me&password=s", "postgresql://h/d?user=me&password=***"),
        ("HEADGATE_DATABASE_URL", "postgresql:u:pw@h/d", "***@h/d"),
        ("HEADGATE_URL", "http://127.0.0.1:8080/", "http://127.0.0.1:8080/"),
        ("HEADGATE_API_KEY", "hg_admin_x", "***"),
        ("HEADGATE_ENGINE_TOKEN_GAP_TARGET_MS", "50", "50"),
        ("HEADGATE_ENGINE_MAX_BATCH_TOKENS", "512", "512"),
        ("HEADGATE_MAX_CONNECTIONS_PER_KEY", "512", "512"),
        ("HEADGATE_ENGINE_SHARED_CACHE_SECRET", "/etc/k", "/etc/k"),
        ("HEADGATE_UPSTREAMS", '{"a": {"key": "sk-1", "url": "http://h"}}', '{"a": {"key": "***", "url": "http://h"}}'),
        ("HEADGATE_UPSTREAMS", '{"a": {"key_env": "NAME"}}', '{"a": {"key_env": "NAME"}}'),
        ("webhook_secret", "x", "***"),
    ],
)
def test_a_secret_is_masked_and_the_rest_is_readable(name, value, shown):
    assert masked.setting(name, value) == shown
