"""Certificates are judged in one sentence at the start, and follow their files afterwards."""

from __future__ import annotations

import errno
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import Authority, write_key
from cryptography.hazmat.primitives.asymmetric import ec

from workers.process.tls.certificates import Certificate, CertificateError, Files, Setting, host_name, https_context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority: Authority) -> Files:
    pair = authority.sign("listener", "127.0.0.1", "*.example.org", "llm.example.org")
    return Files(Setting("HEADGATE_TLS_CERT", pair.cert), Setting("HEADGATE_TLS_KEY", pair.key))


def fault(files: Files) -> str:
    with pytest.raises(CertificateError) as refused:
        Certificate(files, https_context)
    return str(refused.value)


def other_key(path: Path) -> None:
    write_key(path, ec.generate_private_key(ec.SECP256R1()))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: f.cert.path.unlink(), "HEADGATE_TLS_CERT = {cert} cannot be read: No such file or directory."),
        (lambda f: f.key.path.unlink(), "HEADGATE_TLS_KEY = {key} cannot be read: No such file or directory."),
        (lambda f: f.cert.path.write_text("-----BEGIN"), "HEADGATE_TLS_CERT = {cert} has no certificate in PEM form."),
        (lambda f: f.key.path.write_text("none"), "HEADGATE_TLS_KEY = {key} has no private key in PEM form."),
        (lambda f: other_key(f.key.path), "HEADGATE_TLS_KEY = {key} does not belong to HEADGATE_TLS_CERT = {cert}"),
        (lambda f: f.key.path.chmod(0o644), "HEADGATE_TLS_KEY = {key} may be read by every user of this machine"),
    ],
    ids=["no certificate", "no key", "a broken certificate", "a broken key", "another key", "an open key"],
)
def test_files_that_cannot_be_used_are_one_sentence(files: Files, spoil: Callable[[Files], object], said: str) -> None:
    spoil(files)
    assert fault(files).startswith(said.format(cert=files.cert.path, key=files.key.path))


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(files: Files, authority: Authority) -> None:
    authority.sign("listener", "127.0.0.1", password="secret")
    write_key(files.key.path, ec.generate_private_key(ec.SECP256R1()), "secret")
    assert "is encrypted, and nobody is there to type its password" in fault(files)


def test_an_authority_that_is_none_is_named(files: Files, tmp_path: Path) -> None:
    empty = tmp_path / "ca.pem"
    empty.write_text("")
    said = fault(replace(files, ca=Setting("HEADGATE_LINK_CA", empty)))
    assert said == f"HEADGATE_LINK_CA = {empty} has no certificate in PEM form."


def test_it_ends_when_the_first_of_its_chain_does(files: Files, authority: Authority) -> None:
    assert not Certificate(files, https_context).ends_soon
    soon = authority.sign("soon", "127.0.0.1", days=6)
    files.cert.path.write_bytes(files.cert.path.read_bytes() + soon.cert.read_bytes())
    certificate = Certificate(files, https_context)
    assert certificate.ends_soon
    assert not certificate.has_ended


def test_it_is_read_again_only_when_a_file_has_changed(files: Files, authority: Authority) -> None:
    certificate = Certificate(files, https_context)
    before = certificate.newest
    certificate.look()
    assert certificate.newest is before
    authority.sign("listener", "127.0.0.1")
    certificate.look()
    assert certificate.newest is not before


def test_a_pair_that_is_half_written_is_read_once_it_is_whole(files: Files, authority: Authority) -> None:
    certificate = Certificate(files, https_context)
    before, new = certificate.newest, authority.sign("new", "127.0.0.1")
    files.cert.path.write_bytes(new.cert.read_bytes())
    certificate.look()
    assert "does not belong to" in certificate.fault
    assert certificate.newest is before
    files.key.path.write_bytes(new.key.read_bytes())
    certificate.look()
    assert not certificate.fault
    assert certificate.newest is not before


@pytest.mark.parametrize("what", ["read_bytes", "stat"])
def test_a_renewed_pair_is_used_although_it_could_not_be_read_for_a_moment(
    what: str, files: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(files, https_context)
    before = certificate.newest
    authority.sign("listener", "127.0.0.1")

    def fail(_: Path, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as moment:
        moment.setattr(Path, what, fail)
        for _ in range(3):
            certificate.look()
        assert "cannot be read: Too many open files." in fault(files)
    assert certificate.fault.endswith("cannot be read: Too many open files.")
    assert certificate.newest is before
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    certificate.look()
    assert not certificate.fault
    assert certificate.newest is not before


def test_a_fault_ends_when_the_files_of_before_are_there_again(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = Certificate(files, https_context)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as moment:
        moment.setattr(os, "stat", fail)
        certificate.look()
    assert certificate.fault
    certificate.look()
    assert not certificate.fault


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "llm.example.org"), ("llm.example.org", "llm.example.org")],
)
def test_the_host_that_is_shown_is_one_that_the_certificate_is_for(files: Files, host: str, shown: str) -> None:
    assert host_name(files, host) == shown


def test_a_listener_takes_no_version_before_1_2(files: Files) -> None:
    assert Certificate(files, https_context).context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(("days", "said"), [(-1, "has ended at"), (9, "is not valid before")])
def test_a_new_certificate_that_is_not_valid_now_replaces_none_that_is(
    days: float, said: str, files: Files, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(files, https_context)
    before, now = certificate.newest, time.time()
    monkeypatch.setattr(time, "time", lambda: now - 5 * 86_400 * (days > 0))  # the new one begins a day before now
    authority.sign("listener", "127.0.0.1", days=days)
    certificate.begins_at -= 30 * 86_400
    certificate.look()
    assert f"{files.cert} {said}" in certificate.fault
    assert certificate.fault.endswith("UTC.")
    assert certificate.newest is before
    monkeypatch.setattr(time, "time", lambda: now - 1.5 * 86_400 if days < 0 else now)
    certificate.look()
    assert not certificate.fault
    assert certificate.newest is not before


def test_one_that_is_valid_no_more_is_replaced_by_whatever_comes(files: Files, authority: Authority) -> None:
    certificate = Certificate(files, https_context)
    certificate.ends_at = time.time() - 1
    authority.sign("listener", "127.0.0.1", days=-1)
    certificate.look()
    assert not certificate.fault
    assert certificate.has_ended
