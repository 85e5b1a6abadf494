"""An authority of a small installation, in a directory: its key and certificate, and what it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.base.home import HomeError

CA_DAYS = 3650
BEFORE = dt.timedelta(hours=1)
"""Certificates begin so long ago, because clocks differ."""


@dataclass(frozen=True, slots=True)
class Made:
    """The files of a certificate that was made."""

    cert: Path
    key: Path
    purpose: str
    ends_at: dt.datetime


def make(
    directory: Path, *, gateway: bool, workers: Sequence[str], listeners: Sequence[str], days: int, renews: bool
) -> list[Made]:
    """Makes the authority unless it is there, and certificates: files of others are never replaced unless `renews`. Raises
    `HomeError`.
    """
    wanted: list[tuple[str, str, Sequence[str], x509.ObjectIdentifier]] = []
    if gateway:
        wanted.append(("gateway", "links of gateways", (), ExtendedKeyUsageOID.CLIENT_AUTH))
    for host in workers:
        name = f"worker-{_file_name(host)}"
        wanted.append((name, f"links to the worker at {host}", (host,), ExtendedKeyUsageOID.SERVER_AUTH))
    if listeners:
        purpose = f"the base URL at {', '.join(listeners)}"
        wanted.append(("listener", purpose, listeners, ExtendedKeyUsageOID.SERVER_AUTH))
    there = [directory / f"{name}.pem" for name, *_ in wanted if (directory / f"{name}.pem").exists()]
    if there and not renews:
        raise HomeError(f"{there[0]} is there already: add --renew to replace it.")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _Authority.of(directory)
        return [authority.sign(directory / name, purpose, hosts, use, days) for name, purpose, hosts, use in wanted]
    except OSError as error:
        raise HomeError(f"{error.filename or directory} cannot be used: {error.strerror}.") from None


class _Authority:
    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._cert = cert
        self._key = key

    @classmethod
    def of(cls, directory: Path) -> _Authority:
        """Reads the authority, or makes it. Raises `HomeError`."""
        cert_path, key_path = directory / "ca.pem", directory / "ca.key"
        if cert_path.exists() != key_path.exists():
            raise HomeError(f"{cert_path} and {key_path} belong together, and one of them is missing.")
        if not cert_path.exists():
            return cls._made(cert_path, key_path)
        try:
            cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        except (ValueError, TypeError):
            raise HomeError(f"{cert_path} and {key_path} are no authority that this command has made.") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise HomeError(f"{key_path} does not belong to {cert_path}.")
        return cls(cert, key)

    @classmethod
    def _made(cls, cert_path: Path, key_path: Path) -> _Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Headgate authority {os.urandom(4).hex()}")
        built = (
            _builder(name, name, key.public_key(), CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
        )
        cert = built.sign(key, hashes.SHA256())
        _write(key_path, _key_pem(key), 0o600)
        _write(cert_path, cert.public_bytes(serialization.Encoding.PEM), 0o644)
        return cls(cert, key)

    def sign(self, path: Path, purpose: str, hosts: Sequence[str], use: x509.ObjectIdentifier, days: int) -> Made:
        """Writes a certificate and its key. The key comes first: a process that looks between the two keeps the pair of
        before.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        built = (
            _builder(_name(path.name[:64]), self._cert.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(issuer, critical=False)
        )
        if hosts:
            built = built.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        cert = built.sign(self._key, hashes.SHA256())
        made = Made(
            path.with_name(f"{path.name}.pem"), path.with_name(f"{path.name}.key"), purpose, cert.not_valid_after_utc
        )
        _write(made.key, _key_pem(key), 0o600)
        _write(made.cert, cert.public_bytes(serialization.Encoding.PEM), 0o644)
        return made


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEFORE)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    """Raises `HomeError` for what is neither an address nor a name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if not all(label and label.isascii() and label.replace("-", "").isalnum() for label in labels):
        raise HomeError(f"{host!r} is neither an IP address nor a host name.")
    return x509.DNSName(host)


def _file_name(host: str) -> str:
    _host(host)
    return host.replace("*", "_").replace(":", "-")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file whole: who reads it sees the one before or this one."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    beside.replace(path)
