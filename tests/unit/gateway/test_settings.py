"""Settings: what is read, and which sentence stops a start."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from gateway.base.addresses import LOOPBACK
from gateway.base.settings import GatewaySettings, SettingsError, load

HOME = {"HEADGATE_HOME": "/srv/headgate"}


def test_defaults_follow_from_the_home() -> None:
    settings = load(HOME | {"HEADGATE_SLOT": "3", "PATH": "/bin"})
    assert settings.journal_dir == Path("/srv/headgate/state/gateway-3/journal")
    assert settings.ops_socket == Path("/srv/headgate/run/gateway-3.sock")
    assert settings.sql_url == "sqlite+aiosqlite:////srv/headgate/headgate.db"
    assert settings.trusted_networks == ()
    assert settings.unlimited_networks == LOOPBACK


def test_models_and_networks_are_read_from_text() -> None:
    settings = load(
        HOME
        | {
            "HEADGATE_MODELS": '{"a": {"path": "/m", "max_output_tokens": 5}}',
            "HEADGATE_TRUSTED_NETWORKS": "10.0.0.0/8, ::1/128",
        }
    )
    assert settings.models["a"].path == "/m"
    assert settings.models["a"].max_output_tokens == 5
    assert settings.trusted_networks[0] == ipaddress.ip_network("10.0.0.0/8")
    assert load(HOME | {"HEADGATE_TRUSTED_NETWORKS": ""}).trusted_networks == ()


def test_names_of_other_processes_are_none_of_ours_and_not_unknown() -> None:
    others = {"HEADGATE_MODEL": "x", "HEADGATE_ENGINE_DEVICE": "cpu", "HEADGATE_TEST_REDIS_URL": "y"}
    assert load(HOME | others).home == Path("/srv/headgate")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"HEADGATE_SLOTT": "1"}, "The environment variable HEADGATE_SLOTT is unknown."),
        ({"HEADGATE_SLOT": "one"}, "HEADGATE_SLOT"),
        ({"HEADGATE_SLOT": "-1"}, "HEADGATE_SLOT"),
        ({"HEADGATE_MODELS": "{"}, "HEADGATE_MODELS"),
        ({"HEADGATE_MODELS": '{"a": {"pfad": "x"}}'}, "HEADGATE_MODELS"),
        ({"HEADGATE_TRUSTED_NETWORKS": "10.0.0.0/99"}, "HEADGATE_TRUSTED_NETWORKS"),
        ({"HEADGATE_DRAIN_S": "-1"}, "HEADGATE_DRAIN_S"),
        ({"HEADGATE_TRACE_RATIO": "2"}, "HEADGATE_TRACE_RATIO"),
        ({"HEADGATE_LIMITER_TIMEOUT_S": "0"}, "HEADGATE_LIMITER_TIMEOUT_S"),
        ({"HEADGATE_LOG_LEVEL": "LOUD"}, "HEADGATE_LOG_LEVEL"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_with_the_name(more: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError) as found:
        load(HOME | more)
    assert words in str(found.value)
    assert "\n" not in str(found.value)


def test_the_home_is_needed() -> None:
    with pytest.raises(SettingsError, match="HEADGATE_HOME is not set"):
        load({})


def test_settings_do_not_change() -> None:
    settings = load(HOME)
    with pytest.raises(ValueError, match="frozen"):
        settings.slot = 2
    assert isinstance(settings, GatewaySettings)


def test_an_unreadable_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"Cannot read the key file .* on a further host, copy secrets/ from the first one"
    ):
        load({"HEADGATE_HOME": str(tmp_path)}).secret("pepper")
