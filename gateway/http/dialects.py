"""The words of a refusal: those of the API that a request speaks: OpenAI's, or Anthropic's on the paths of Messages.

`/v1/models` exists in both APIs; a request for it speaks Anthropic's if it carries `anthropic-version`, which that API
demands of every request and OpenAI's does not know.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gateway.base.errors import ApiError
from gateway.telemetry.keys import RECORD

MESSAGES = "/v1/messages"
MODELS = "/v1/models"
VERSION = "anthropic-version"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_SPENT = {"error_code": "enforced_spend_limit_reached"}
"""The `details` that Anthropic's API gives a 429 that no wait can mend."""


def speaks_anthropic(request: web.BaseRequest) -> bool:
    path = request.path
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return True
    return VERSION in request.headers and (path == MODELS or path.startswith(f"{MODELS}/"))


def refusal(request: web.BaseRequest, error: ApiError) -> web.Response:
    """Returns the answer that tells of an error. A request whose head could not be read has no record, and hears of
    it in OpenAI's shape.
    """
    record = request.get(RECORD)
    if record is None or not speaks_anthropic(request):
        body = error.body()
    else:
        body = msgspec.json.encode(anthropic_error(error, record.request_id))
    return web.Response(status=error.status, body=body, content_type="application/json", headers=error.headers)


def _message(error: ApiError) -> str:
    """Returns the sentence of an error. Clients shorten a conversation where it begins as Anthropic's own does."""
    if error.code != "context_length_exceeded":
        return error.message
    if error.too_many_tokens is None:
        return f"prompt is too long: {error.message}"
    found, most = error.too_many_tokens
    return f"prompt is too long: {found} tokens > {most} maximum"


def anthropic_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns the error in Anthropic's shape, for a body or an event. `param`, `code` and `headgate` are additions."""
    told: dict[str, Any] = {
        "type": _TYPES.get(error.status, "invalid_request_error"),
        "message": _message(error),
        "param": error.param,
        "code": error.code,
    }
    if error.code == "insufficient_quota":
        told["details"] = _SPENT
    if error.headgate is not None:
        told["headgate"] = error.headgate
    return {"type": "error", "error": told, "request_id": request_id}
