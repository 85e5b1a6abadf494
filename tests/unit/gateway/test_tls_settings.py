"""Settings of TLS that do not fit each other are refused by name, in gateways and in workers."""

from __future__ import annotations

import pytest

from gateway.base.settings import SettingsError
from gateway.base.settings import load as load_gateway
from workers.engine.settings import load as load_worker
from workers.engine.values.errors import StartError

LINKS = {"HEADGATE_LINK_CA": "/ca", "HEADGATE_LINK_CERT": "/cert", "HEADGATE_LINK_KEY": "/key"}


def of_gateway(**more: str) -> str:
    with pytest.raises(SettingsError) as refused:
        load_gateway({"HEADGATE_HOME": "/h", **more})
    return str(refused.value)


def of_worker(monkeypatch: pytest.MonkeyPatch, **more: str) -> str:
    for name, value in {"HEADGATE_MODEL": "m", **more}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartError) as refused:
        load_worker()
    return str(refused.value)


def test_a_certificate_needs_its_key() -> None:
    said = "HEADGATE_TLS_CERT and HEADGATE_TLS_KEY need each other."
    assert of_gateway(HEADGATE_TLS_CERT="/cert") == of_gateway(HEADGATE_TLS_KEY="/key") == said


@pytest.mark.parametrize("missing", LINKS)
def test_links_need_all_three_files(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: value for name, value in LINKS.items() if name != missing}
    said = "HEADGATE_LINK_CA and HEADGATE_LINK_CERT and HEADGATE_LINK_KEY need each other."
    assert of_gateway(**given) == said
    assert of_worker(monkeypatch, **given) == said


def test_links_with_certificates_are_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**LINKS, "HEADGATE_LINK_PLAIN": "1"}
    assert "HEADGATE_LINK_PLAIN has no meaning" in of_gateway(**given)
    assert "HEADGATE_LINK_PLAIN has no meaning" in of_worker(monkeypatch, **given)


def test_a_worker_beyond_this_machine_without_certificates_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    said = of_worker(monkeypatch, HEADGATE_WORKER_ADDRESS="tcp:10.0.0.5:7000")
    assert said.startswith("HEADGATE_WORKER_ADDRESS = tcp:10.0.0.5:7000: a link beyond this machine needs TLS.")
    assert "HEADGATE_LINK_PLAIN=1 on both" in said


@pytest.mark.parametrize(
    "more",
    [
        {"HEADGATE_LINK_PLAIN": "1"},
        LINKS,
        {"HEADGATE_WORKER_ADDRESS": "tcp:127.0.0.1:7000"},
        {"HEADGATE_WORKER_ADDRESS": "unix:/run/w.sock"},
    ],
    ids=["plain", "certificates", "loopback", "a socket"],
)
def test_a_worker_starts_with(more: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HEADGATE_MODEL": "m", "HEADGATE_WORKER_ADDRESS": "tcp:10.0.0.5:7000", **more}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = load_worker()
    assert (told.link_files is not None) == (more is LINKS)
