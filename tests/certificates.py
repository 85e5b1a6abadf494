"""Certificates for tests: an authority, what it signs, and what is wrong on purpose. Keys are of P-256, which takes no time."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """One that signs; `ca` is what others know it by."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(f"tests {name}")
        cert = _builder(self._name, self._name, self._key.public_key(), 365).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.ca = directory / f"authority-{name}.pem"
        self.ca.write_bytes(_pem(cert.sign(self._key, hashes.SHA256())))

    def sign(
        self, name: str, *hosts: str, use: x509.ObjectIdentifier = SERVER, days: float = 90, password: str = ""
    ) -> Pair:
        """Writes a certificate for hosts. One with negative `days` has ended so long ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        built = _builder(_name(name), self._name, key.public_key(), days).add_extension(
            x509.ExtendedKeyUsage([use]), critical=False
        )
        if hosts:
            built = built.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        pair = Pair(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        pair.cert.write_bytes(_pem(built.sign(self._key, hashes.SHA256())))
        write_key(pair.key, key, password)
        return pair


def write_key(path: Path, key: ec.EllipticCurvePrivateKey, password: str = "") -> None:
    how = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    path.chmod(0o600)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    ends = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - dt.timedelta(days=abs(days) + 1))
        .not_valid_after(ends)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)
