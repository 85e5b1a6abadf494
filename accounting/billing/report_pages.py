"""The `page` parameter of reports. It is opaque to the client, bound to its query, and useless elsewhere.

It holds no secret and gives no access, so a checksum over the query is enough: a value that was altered, or that comes
from another query or another tenant, does not match. A client may make one itself, so the reader checks its range.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from hashlib import sha256

from accounting.values.errors import InvalidError

_CHECK_BYTES = 12


def write(query: bytes, end: int, first: int) -> str:
    """Makes a page parameter. `end` fixes the end of the range where the query had none; `first` is the first bucket of
    the next reply."""
    numbers = end.to_bytes(8, "big") + first.to_bytes(8, "big")
    return base64.urlsafe_b64encode(numbers + _check(query, numbers)).decode()


def read(query: bytes, page: str) -> tuple[int, int]:
    """Returns (end, first) as they were written for this very query. Raises InvalidError."""
    try:
        raw = base64.b64decode(page, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidError("page is not one that this query returned.", "page") from None
    numbers = raw[:16]
    if len(raw) != 16 + _CHECK_BYTES or not hmac.compare_digest(_check(query, numbers), raw[16:]):
        raise InvalidError("page is not one that this query returned.", "page")
    return int.from_bytes(numbers[:8], "big"), int.from_bytes(numbers[8:], "big")


def _check(query: bytes, numbers: bytes) -> bytes:
    return sha256(len(query).to_bytes(4, "big") + query + numbers).digest()[:_CHECK_BYTES]
