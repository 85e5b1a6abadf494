"""Mail goes to no server whose certificate nobody vouches for."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.base.mail import Mailer, MailFailed


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a key and a certificate of 127.0.0.1 that it signed itself."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    path = tmp_path / "server.pem"
    path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password) + built.public_bytes(pem))
    return path


class Post:
    """An SMTP server that takes everything, and begins TLS at once or when it is asked."""

    def __init__(self, certificate: Path) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate)
        self.commands: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 post\r\n")
        while line := await reader.readline():
            verb = line[:4].upper().strip()
            self.commands.append(verb)
            if verb == b"STAR":
                writer.write(b"220 go\r\n")
                await writer.start_tls(self.context)
            elif verb == b"EHLO":
                writer.write(b"250-post\r\n250 STARTTLS\r\n")
            elif verb == b"QUIT":
                writer.write(b"221 bye\r\n")
            elif verb == b"DATA":
                writer.write(b"354 go\r\n")
                await reader.readuntil(b"\r\n.\r\n")
                writer.write(b"250 ok\r\n")
            else:
                writer.write(b"250 ok\r\n")


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("scheme", ["smtp", "smtps"])
async def test_mail_is_sent_to_a_server_with_a_certificate_that_is_trusted(
    certificate: Path, scheme: str, is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Post(certificate)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    tls = post.context if scheme == "smtps" else None
    server = await asyncio.start_server(post.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    sending = Mailer(f"{scheme}://127.0.0.1:{port}", "a@example.org").send(["b@example.org"], "subject", "text")
    if is_trusted:
        await sending
    else:
        with pytest.raises(MailFailed, match="SSLCertVerificationError"):
            await sending
    assert (b"DATA" in post.commands) == is_trusted
    server.close()
