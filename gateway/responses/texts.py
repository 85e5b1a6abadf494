"""Texts of responses under a tenant's data key: what is stored here, and what a client keeps for us. The module is
pure.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any, Literal

import msgspec

from accounting.database import sealing

Place = Literal["request", "body", "events"]

_CLIENTS = b"encrypted content"


class ResponseTexts:
    def __init__(self, data_key: bytes | None) -> None:
        """Takes the tenant's data key, or None: nothing can be read then."""
        self._key = data_key

    def pack(self, response_id: str, place: Place, data: bytes) -> bytes:
        """Returns JSON in the form in which it is stored."""
        assert self._key is not None
        return sealing.seal(self._key, zlib.compress(data, 1), _place(response_id, place))

    def unpack(self, response_id: str, place: Place, stored: bytes) -> bytes:
        assert self._key is not None
        return zlib.decompress(sealing.unseal(self._key, stored, _place(response_id, place)))

    def decoded(self, response_id: str, place: Place, stored: bytes) -> Any:
        return msgspec.json.decode(self.unpack(response_id, place, stored))

    def seal(self, text: str) -> str:
        """Returns the encrypted content that a client keeps and sends back."""
        assert self._key is not None
        return base64.urlsafe_b64encode(sealing.seal(self._key, text.encode(), _CLIENTS)).decode()

    def unseal(self, content: str) -> str:
        """Returns the text of an encrypted content. Raises ValueError if it was not sealed here for this tenant."""
        if self._key is None:
            raise ValueError("there is no key")
        try:
            return sealing.unseal(self._key, base64.b64decode(content, b"-_", validate=True), _CLIENTS).decode()
        except (binascii.Error, sealing.SealBroken):
            raise ValueError("this is not one of our encrypted contents") from None


def _place(response_id: str, place: Place) -> bytes:
    return f"{place} of {response_id}".encode()
