"""The text of credentials: made, checked and hashed without a database (security.md section 6). The module is pure
except for `secrets`.

hg_live_<10 id>_<43 secret>_<6 CRC32>      hg_test_..., hg_admin_...      hg_batch_<batch>_<HMAC>
hg_run_<response>_<HMAC>
"""

from __future__ import annotations

import hmac
import secrets
import string
import zlib
from hashlib import sha256
from typing import Literal

import msgspec

Kind = Literal["live", "test", "admin"]
KINDS: tuple[Kind, ...] = ("live", "test", "admin")

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
ID_LENGTH, SECRET_LENGTH, CRC_LENGTH = 10, 43, 6
"""43 characters of base62 are 256 bits."""


PEPPER_BYTES = 32
"""Bytes of one pepper. Behind the newest there may be older ones, until `headgate secrets drop-old-peppers`."""


class ParsedKey(msgspec.Struct, frozen=True):
    """An API key whose checksum is right. Only the database knows whether it exists."""

    kind: Kind
    public_id: str


def generate(kind: Kind, public_id: str | None = None) -> str:
    """Makes the text of a key. `public_id` names the key that gets a new secret; None makes a new key."""
    body = f"hg_{kind}_{public_id or _random(ID_LENGTH)}_{_random(SECRET_LENGTH)}"
    return f"{body}_{_checksum(body)}"


def parse(value: str) -> ParsedKey | None:
    """Returns None for a text that is no API key. A typing error or a scanner's guess is found here, before any
    database call."""
    parts = value.split("_")
    if len(parts) != 5 or parts[0] != "hg" or not value.isascii():
        return None
    kind = next((kind for kind in KINDS if kind == parts[1]), None)
    lengths = tuple(len(part) for part in parts[2:])
    if kind is None or lengths != (ID_LENGTH, SECRET_LENGTH, CRC_LENGTH):
        return None
    if _checksum(value[: -CRC_LENGTH - 1]) != parts[4]:
        return None
    return ParsedKey(kind, parts[2])


def keyed_hash(pepper: bytes, value: str) -> bytes:
    """Returns the hash that is stored, under the newest pepper. It is useless without the pepper, and the pepper is
    never in the database."""
    return _hash(pepper[:PEPPER_BYTES], value)


def verify(pepper: bytes, value: str, stored: bytes | None) -> bool:
    """Compares in constant time, with every pepper that is still known: after a rotation the older ones stand after the
    newest. An unknown key (`stored` is None) costs the same comparisons as a known one."""
    found = False
    for start in range(0, max(len(pepper), 1), PEPPER_BYTES):
        hashed = _hash(pepper[start : start + PEPPER_BYTES], value)
        found |= hmac.compare_digest(hashed, stored or bytes(sha256().digest_size))
    return found


def _hash(pepper: bytes, value: str) -> bytes:
    return hmac.digest(pepper, value.encode(), sha256)


def batch_credential(pepper: bytes, batch_id: str) -> str:
    """Returns the credential of a batch. It is computed by the job runner and by the gateway, and never stored."""
    return f"hg_batch_{batch_id.removeprefix('batch_')}_{_mac(pepper, 'batch', batch_id)}"


def parse_batch(pepper: bytes, value: str) -> str | None:
    """Returns the batch id if the credential is genuine, else None."""
    return _parse(pepper, value, "batch", "batch_")


def run_credential(pepper: bytes, response_id: str) -> str:
    """Returns the credential by which a jobs process asks for the run of a response in the background."""
    return f"hg_run_{response_id.removeprefix('resp_')}_{_mac(pepper, 'run', response_id)}"


def parse_run(pepper: bytes, value: str) -> str | None:
    """Returns the response id if the credential is genuine, else None."""
    return _parse(pepper, value, "run", "resp_")


def _parse(pepper: bytes, value: str, kind: str, id_prefix: str) -> str | None:
    head, _, mac = value.rpartition("_")
    if not value.isascii() or not head.startswith(f"hg_{kind}_"):
        return None
    object_id = id_prefix + head.removeprefix(f"hg_{kind}_")
    return object_id if hmac.compare_digest(_mac(pepper, kind, object_id), mac) else None


def _mac(pepper: bytes, kind: str, object_id: str) -> str:
    # The kind keeps this apart from the keyed hash of an API key, which uses the same pepper.
    return hmac.digest(pepper[:PEPPER_BYTES], f"{kind}\0{object_id}".encode(), sha256).hex()


def _random(length: int) -> str:
    return "".join(secrets.choice(BASE62) for _ in range(length))


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = []
    for _ in range(CRC_LENGTH):
        number, digit = divmod(number, 62)
        digits.append(BASE62[digit])
    return "".join(reversed(digits))
