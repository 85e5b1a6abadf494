"""A WebSocket of `/v1/responses` remembers the last response that was not stored, so that the next can go on from it.

Messages and events are values. Only the newest response is kept, in memory, and for as long as the connection.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.base import errors

CREATE = "response.create"
NEVER = ("stream", "stream_options", "background")
"""Fields of HTTP: a message over a WebSocket does not have them."""
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


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

    def body_of(self, message: Any) -> dict[str, Any]:
        """Returns the body of `POST /v1/responses` that a message stands for. Raises `ApiError` 400."""
        if not isinstance(message, dict) or message.get("type") != CREATE:
            raise errors.invalid(f"A message must be an object of the type {CREATE}.", "type")
        for name in NEVER:
            if message.get(name) is not None:
                raise errors.invalid(f"Over a WebSocket there is no {name}.", name, "unsupported_parameter")
        if message.get("generate") is False:
            raise errors.invalid("Every message generates a response.", "generate", "unsupported_parameter")
        body = {name: value for name, value in message.items() if name not in ("type", "generate", *NEVER)}
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
            return event
        if self._previous_id is not None:
            response = response | {"previous_response_id": self._previous_id}
            event = event | {"response": response}
        if event.get("type") in _TERMINAL:
            if event["type"] == "response.failed":
                self.failed()
            elif not response.get("store"):
                self._kept_id = response["id"]
                self._kept = msgspec.json.encode([*self._asked, *response["output"]])
        return event

    def over(self) -> None:
        """Ends the turn: what it asked is needed no more, and the client may be silent for long."""
        self._asked = []

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


def _items(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return list(given) if isinstance(given, list) else []
