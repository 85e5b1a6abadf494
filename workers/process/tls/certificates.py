"""Certificates of a process: read, judged, and read again when their files change.

A file that cannot be used changes nothing: what was read before is kept, and the log says why. Handshakes that have begun,
and connections, never notice a change.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILES_EVERY_S = 10.0
"""The time between two looks whether the files have changed."""
ENDS_SOON_S = 7 * 86_400.0
"""The time before its end from which a certificate is warned of."""
OTHERS = 0o007
_KEY_REASONS = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"}


class CertificateError(Exception):
    """A certificate, its key or its authority cannot be used. The message is one sentence for the operator."""


class _NeedsPassword(Exception):
    """The key is encrypted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A file and the setting that names it."""

    name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.name} = {self.path}"

    def read(self) -> bytes:
        """Raises `CertificateError`."""
        return self._do(self.path.read_bytes)

    def mode(self) -> int:
        """Returns who may do what with the file. Raises `CertificateError`."""
        return self._do(self.path.stat).st_mode

    def _do(self, what: Callable[[], T]) -> T:
        try:
            return what()
        except OSError as error:
            raise CertificateError(f"{self} cannot be read: {error.strerror}.") from None


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one certificate."""

    cert: Setting
    """The certificate, and after it those between it and its authority."""
    key: Setting
    ca: Setting | None = None
    """The authorities by which the other side is known. If it is None, the other side shows no certificate."""

    @property
    def all(self) -> tuple[Setting, ...]:
        return (self.cert, self.key) if self.ca is None else (self.cert, self.key, self.ca)


def link_files(ca: Path | None, cert: Path | None, key: Path | None) -> Files | None:
    """Returns the files for links between gateways and workers, or None if links have none."""
    if ca is None or cert is None or key is None:
        return None
    return Files(
        Setting("HEADGATE_LINK_CERT", cert), Setting("HEADGATE_LINK_KEY", key), Setting("HEADGATE_LINK_CA", ca)
    )


Make = Callable[[Files], ssl.SSLContext]


def https_context(files: Files) -> ssl.SSLContext:
    """Returns the context of a listener for clients of HTTP, without its certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def listening_context(files: Files) -> ssl.SSLContext:
    """Returns the context of a listener whose clients show a certificate, too."""
    return _mutual(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def dialling_context(files: Files) -> ssl.SSLContext:
    """Returns the context of who dials such a listener. The name of the listener's host is checked."""
    return _mutual(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


def _mutual(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # both ends are ours
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the authority may be one below another
    if context.protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each link shows its certificate
    return context


class Certificate:
    """A certificate that follows its files."""

    def __init__(self, files: Files, make: Make) -> None:
        """Reads the files. Raises `CertificateError`."""
        self.files = files
        self.fault = ""
        """Why the files of this moment cannot be used. What was read before is kept."""
        self._make = make
        self._seen = self._stamps()
        self.newest, self.begins_at, self.ends_at = self._read()
        self.context = self.newest
        """The context for a listener: its handshakes use the newest files."""
        if self.context.protocol == ssl.PROTOCOL_TLS_SERVER:
            self.context.sni_callback = self._use_newest

    @property
    def has_ended(self) -> bool:
        return self.ends_at < time.time()

    @property
    def has_begun(self) -> bool:
        """Whether the moment from which it is valid is past."""
        return self.begins_at <= time.time()

    @property
    def ends_soon(self) -> bool:
        """Whether it ends within a week, or has ended."""
        return self.ends_at - time.time() < ENDS_SOON_S

    def look(self) -> None:
        """Reads the files again if they have changed since they could be used, which may have failed for a moment. A
        certificate that is not valid now replaces none that is.
        """
        stamps = self._stamps()
        if stamps == self._seen and not self.fault:
            return
        try:
            found = self._read()
            if self.has_begun and not self.has_ended:
                _refuse_invalid(self.files.cert, *found[1:])
            self.newest, self.begins_at, self.ends_at = found
        except CertificateError as error:
            self._keep(str(error))
        else:
            self._seen = stamps
            self.fault = ""
            said = {"event": "certificate_read", "file": str(self.files.cert.path), "ends_at": int(self.ends_at)}
            logger.info("a new certificate is used", extra=said)

    def _keep(self, fault: str) -> None:
        """Notes why the files cannot be used. The log has each reason once, however often the files are looked at."""
        if fault != self.fault:
            self.fault = fault
            said = {"event": "certificate_unusable", "why": fault}
            logger.error("the certificate of before is kept: %s", fault, extra=said)

    def _use_newest(self, handshake: Any, name: str | None, context: ssl.SSLContext) -> None:
        if self.newest is not context:
            handshake.context = self.newest

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(setting.path) for setting in self.files.all]

    def _read(self) -> tuple[ssl.SSLContext, float, float]:
        """Returns a context, and the times from and until which every certificate of the chain is valid. Raises
        `CertificateError`.
        """
        cert, key, ca = self.files.cert, self.files.key, self.files.ca
        begins_at, ends_at = _validity(cert)
        _refuse_readable(key)
        context = self._make(self.files)
        try:
            context.load_cert_chain(cert.path, key.path, password=_refuse_password)
        except _NeedsPassword:
            raise CertificateError(
                f"{key} is encrypted, and nobody is there to type its password: write it once more without one"
                " (`openssl pkey -in OLD -out NEW`)."
            ) from None
        except ssl.SSLError as error:
            raise CertificateError(_why_not(error, cert, key)) from None
        except OSError as error:
            raise CertificateError(f"{key} cannot be read: {error.strerror}.") from None
        if ca is not None:
            ca.read()
            try:
                context.load_verify_locations(ca.path)
            except (ssl.SSLError, OSError):
                raise CertificateError(f"{ca} has no certificate in PEM form.") from None
        return context, begins_at, ends_at


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError as error:
        return (error.errno or -1,)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _validity(cert: Setting) -> tuple[float, float]:
    """Returns the latest begin and the earliest end in a chain. Raises `CertificateError`."""
    from cryptography import x509  # it takes long to load, and only who has a certificate needs it

    try:
        chain = x509.load_pem_x509_certificates(cert.read())
    except ValueError:
        raise CertificateError(f"{cert} has no certificate in PEM form.") from None
    begins_at = max(one.not_valid_before_utc.timestamp() for one in chain)
    return begins_at, min(one.not_valid_after_utc.timestamp() for one in chain)


def _refuse_invalid(cert: Setting, begins_at: float, ends_at: float) -> None:
    """Raises `CertificateError` if a certificate is not valid now."""
    now = time.time()
    if begins_at > now:
        raise CertificateError(f"{cert} is not valid before {moment(begins_at)}.")
    if ends_at < now:
        raise CertificateError(f"{cert} has ended at {moment(ends_at)}.")


def moment(at: float) -> str:
    """Returns a moment as people read it, in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"


def _refuse_readable(key: Setting) -> None:
    """Refuses a key that every user of the machine may read. Raises `CertificateError`."""
    key.read()
    if key.mode() & OTHERS:
        raise CertificateError(
            f"{key} may be read by every user of this machine: type chmod 600 {key.path}, or mount it with the mode 0440."
        )


def _refuse_password() -> str:
    raise _NeedsPassword


def _why_not(error: ssl.SSLError, cert: Setting, key: Setting) -> str:
    if error.reason in _KEY_REASONS:
        return f"{key} does not belong to {cert}: the certificate is of another key."
    if error.reason is None or error.reason in ("NO_START_LINE", "BAD_BASE64_DECODE", "UNSUPPORTED"):
        return f"{key} has no private key in PEM form."
    return f"{cert} cannot be used with {key}: {error.reason.replace('_', ' ').lower()}."


def host_name(files: Files, host: str) -> str:
    """Returns the host by which clients reach a listener: the given one if the certificate is for it, otherwise the first
    name that the certificate is for. Raises `CertificateError`.
    """
    from cryptography import x509

    try:
        leaf = x509.load_pem_x509_certificates(files.cert.read())[0]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except ValueError:
        raise CertificateError(f"{files.cert} has no certificate in PEM form.") from None
    except x509.ExtensionNotFound:
        return host
    every = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    usable = [name for name in every if not name.startswith("*")]
    return host if host in every or not usable else usable[0]
