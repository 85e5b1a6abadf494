"""A WebSocket of `/v1/responses` remembers the last response that was not stored, so that the next can go on from it.

Messages and events are values. Only the newest response is kept, in memory, and for as long as the connection.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.base import errors

CREATE = "response.create"
IMPLIED = {"stream": True, "background": False}
"""The values that hold for every message, which it may give, as the SDK of OpenAI's agents does, but not change."""
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class Connection:
    """One turn at a time: `body_of` a message, then `seen` for each of its events, or `failed`, and then `over`."""

    def __init__(self) -> None:
        self._kept_id: str | None = None
        self._kept = b""
        """The items of the kept response as JSON. As objects they take many times as much, and the client may be silent for
        long.
        """
        self._asked: list[Any] = []
        """The items of the turn that runs, those before it included."""
        self._previous_id: str | None = None
        """The previous response of the turn that runs, if this connection knew it."""
        self._stream_id: str | None = None
        """The client's name for the turn that runs, if it gave one: several conversations may share a connection."""

    def body_of(self, message: Any) -> dict[str, Any]:
        """Returns the body of `POST /v1/responses` that a message stands for. Raises `ApiError` 400."""
        self._stream_id = _stream_id_of(message)
        if not isinstance(message, dict) or message.get("type") != CREATE:
            raise errors.invalid(f"A message must be an object of the type {CREATE}.", "type")
        for name, value in IMPLIED.items():
            if message.get(name) not in (None, value):
                only = f"Over a WebSocket '{name}' is {str(value).lower()}."
                raise errors.invalid(only, name, "unsupported_parameter")
        if message.get("generate") is False:
            raise errors.invalid("Every message generates a response.", "generate", "unsupported_parameter")
        left_out = ("type", "generate", "stream_id", *IMPLIED)
        body = {name: value for name, value in message.items() if name not in left_out}
        self._asked, self._previous_id = _items(body.get("input")), None
        previous_id = body.get("previous_response_id")
        if previous_id is not None and previous_id == self._kept_id:
            del body["previous_response_id"]
            self._previous_id = self._kept_id
            self._asked = [*msgspec.json.decode(self._kept), *self._asked]
            body["input"] = self._asked
        return body | {"stream": True}

    def seen(self, event: dict[str, Any]) -> dict[str, Any]:
        """Returns the event as the client is to see it, and remembers the response that it ends."""
        response = event.get("response")
        if not isinstance(response, dict):
            return self.named(event)
        if self._previous_id is not None:
            response = response | {"previous_response_id": self._previous_id}
            event = event | {"response": response}
        if event.get("type") in _TERMINAL:
            if event["type"] == "response.failed":
                self.failed()
            elif not response.get("store"):
                self._kept_id = response["id"]
                self._kept = msgspec.json.encode([*self._asked, *response["output"]])
        return self.named(event)

    def named(self, event: dict[str, Any]) -> dict[str, Any]:
        """Returns an event of the turn with the `stream_id` of its message, by which the client knows the turn."""
        return event if self._stream_id is None else event | {"stream_id": self._stream_id}

    def over(self) -> None:
        """Ends the turn: what it asked is needed no more, and the client may be silent for long."""
        self._asked, self._stream_id = [], None

    def failed(self) -> None:
        """A turn that fails takes the response that it went on from with it."""
        if self._previous_id is not None:
            self.forget()

    @property
    def num_kept_bytes(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Forgets the kept response. What would go on from it is refused as unknown."""
        self._kept_id, self._kept = None, b""


def _stream_id_of(message: Any) -> str | None:
    given = message.get("stream_id") if isinstance(message, dict) else None
    if given is None or (isinstance(given, str) and _STREAM_ID.fullmatch(given)):
        return given
    raise errors.invalid(
        "A stream_id has 1 to 256 ASCII letters, digits, underscores, hyphens and periods.", "stream_id"
    )


def _items(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given) if isinstance(given, list) else []
