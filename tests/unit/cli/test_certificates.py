"""`headgate certificates`: what it makes is what gateways and workers know each other by."""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path

import pytest
from certificates import Authority
from click.testing import CliRunner, Result

from gateway.base.home import Home
from gateway.cli.doctor_checks import certificates
from gateway.cli.finding import Installation
from gateway.cli.main import main
from workers.process.tls.certificates import (
    Certificate,
    Files,
    Setting,
    dialling_context,
    https_context,
    listening_context,
)


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["certificates", *words])


def files(directory: Path, name: str) -> Files:
    cert, key, ca = directory / f"{name}.pem", directory / f"{name}.key", directory / "ca.pem"
    return Files(Setting("CERT", cert), Setting("KEY", key), Setting("CA", ca))


def shake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Returns both ends after a handshake in memory. Raises what one of them raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    return ends


def test_gateway_and_worker_know_each_other_by_what_it_makes(tmp_path: Path) -> None:
    pki = tmp_path / "pki"
    made = run(str(pki), "--gateway", "--worker", "10.0.0.5", "--worker", "gpu2.internal", "--json")
    assert [Path(one["certificate"]).name for one in json.loads(made.stdout)] == [
        "gateway.pem",
        "worker-10.0.0.5.pem",
        "worker-gpu2.internal.pem",
    ]
    gateway = Certificate(files(pki, "gateway"), dialling_context)
    for host in ("10.0.0.5", "gpu2.internal"):
        worker = Certificate(files(pki, f"worker-{host}"), listening_context)
        client, server = shake(worker.newest, gateway.newest, host)
        assert client.version() == server.version() == "TLSv1.3"
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake(worker.newest, gateway.newest, "10.0.0.6")


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    assert run(str(tmp_path / "pki"), "--gateway").exit_code == 0
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "pki").iterdir()}
    assert modes == {"ca.key": "0o600", "ca.pem": "0o644", "gateway.key": "0o600", "gateway.pem": "0o644"}


def test_a_listener_has_all_its_names_in_one_certificate(tmp_path: Path) -> None:
    assert run(str(tmp_path), "--listener", "llm.internal", "--listener", "127.0.0.1").exit_code == 0
    server = Certificate(files(tmp_path, "listener"), https_context).newest
    for host in ("llm.internal", "127.0.0.1"):
        shake(server, ssl.create_default_context(cafile=tmp_path / "ca.pem"), host)


def test_what_is_there_is_replaced_only_when_that_is_said(tmp_path: Path) -> None:
    assert run(str(tmp_path), "--gateway").exit_code == 0
    before, authority = (tmp_path / "gateway.pem").read_bytes(), (tmp_path / "ca.pem").read_bytes()
    again = run(str(tmp_path), "--gateway")
    assert again.exit_code == 1
    assert "--renew" in again.stderr
    assert (tmp_path / "gateway.pem").read_bytes() == before
    assert run(str(tmp_path), "--gateway", "--renew").exit_code == 0
    assert (tmp_path / "gateway.pem").read_bytes() != before
    assert (tmp_path / "ca.pem").read_bytes() == authority


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Say for whom"),
        (("--worker", "a b"), "neither an IP address nor a host name"),
        (("--worker", "../x"), "neither"),
    ],
)
def test_what_it_cannot_make_is_one_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    answer = run(str(tmp_path / "pki"), *words)
    assert answer.exit_code != 0
    assert said in answer.stderr
    assert not (tmp_path / "pki").exists()


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    assert run(str(tmp_path), "--gateway").exit_code == 0
    os.unlink(tmp_path / "ca.key")
    answer = run(str(tmp_path), "--worker", "10.0.0.5")
    assert "belong together" in answer.stderr


@pytest.mark.parametrize(("days", "state"), [(90, "ok"), (3, "warning"), (-1, "failing")])
def test_doctor_says_when_a_certificate_ends(tmp_path: Path, days: int, state: str) -> None:
    pair = Authority(tmp_path).sign("listener", "127.0.0.1", days=days)
    environ = {"HEADGATE_TLS_CERT": str(pair.cert), "HEADGATE_TLS_KEY": str(pair.key)}
    [found] = certificates(Installation(Home(tmp_path), environ))
    assert (found.name, found.state) == ("certificate of the base URL", state)


def test_doctor_says_what_is_wrong_with_the_files_for_links(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("worker", "127.0.0.1")
    pair.key.chmod(0o644)
    names = {"CERT": pair.cert, "KEY": pair.key, "CA": authority.ca}
    environ = {f"HEADGATE_LINK_{name}": str(path) for name, path in names.items()}
    [found] = certificates(Installation(Home(tmp_path), environ))
    assert found.state == "failing"
    assert "may be read by every user" in found.says
