"""One table from error to status, code and headers, in OpenAI's shape (api.md 1.3). HTTP statuses are defined here
alone.

Raise `ApiError` (by the helpers below) anywhere before the first byte of a reply; after it an error is an event
(`sse.py`). No key, object id, file path, version or traceback ever enters a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from accounting.values.types import TenantStatus


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


@dataclass(eq=False)
class ApiError(Exception):
    """An error with everything the client will see."""

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    headgate: dict[str, Any] | None = None
    too_many_tokens: tuple[int | str, int] | None = None
    """The tokens of a prompt beyond the context, and the most that it may have, where they are known."""

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"

    def body(self) -> bytes:
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.headgate is not None:
            error["headgate"] = self.headgate
        return msgspec.json.encode({"error": error})


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def unauthorized() -> ApiError:
    """The 401 body is constant: it does not tell missing from wrong, revoked or expired."""
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def access_ended() -> ApiError:
    """The key was revoked or disabled while the request ran."""
    return ApiError(401, "The access of this API key was taken away while the request ran.", code="invalid_api_key")


def forbidden(code: str, message: str) -> ApiError:
    return ApiError(403, message, code=code)


def tenant_closed(status: TenantStatus) -> ApiError | None:
    """Returns how requests of a tenant are refused that is suspended or archived; None for an active one."""
    if status == "suspended":
        return forbidden("tenant_suspended", "This project is suspended.")
    if status == "archived":
        return forbidden("project_archived", "This project is archived.")
    return None


def price_unknown() -> ApiError:
    """The status is not 503, because a repeat cannot help until somebody has changed the prices."""
    return forbidden("price_unknown", "This model has no price for your project: ask the operator for one.")


def not_found(message: str = "Not found.", code: str | None = None) -> ApiError:
    return ApiError(404, message, code=code)


def unknown_url(asked: str) -> ApiError:
    """`asked` is the method and the path, safe to show."""
    return not_found(
        f"Unknown request URL: {asked}. Headgate offers /v1/chat/completions, /v1/completions, /v1/models, /v1/files, "
        "/v1/batches and what else GET /openapi.json lists.",
        "unknown_url",
    )


def method_not_allowed(asked: str, allowed: Iterable[str]) -> ApiError:
    methods = ", ".join(sorted(allowed))
    return ApiError(
        405, f"{asked} is not offered: use {methods}.", code="method_not_allowed", headers={"allow": methods}
    )


def model_not_found() -> ApiError:
    """The asked name is not echoed: it is the client's text."""
    return ApiError(
        404, "The model does not exist or you do not have access to it.", code="model_not_found", param="model"
    )


def conflict(message: str, code: str = "conflict") -> ApiError:
    return ApiError(409, message, code=code, headers={"x-should-retry": "false"})


def too_large(message: str = "Request body too large.") -> ApiError:
    return ApiError(413, message, code="request_too_large")


def timeout(message: str) -> ApiError:
    return ApiError(408, message, code="request_timeout", headers={"connection": "close"})


def too_many(
    message: str,
    retry_after_ms: int | None,
    code: str = "rate_limit_exceeded",
    type: str = "requests",
    headgate: dict[str, Any] | None = None,
) -> ApiError:
    """Returns a 429. If `retry_after_ms` is None, a repeat cannot help."""
    return ApiError(429, message, type, code=code, headers=retry_headers(retry_after_ms), headgate=headgate)


def unavailable(code: str, message: str, retry_after_ms: int | None = 1000) -> ApiError:
    """Returns a 503. If `retry_after_ms` is None, a repeat cannot help."""
    return ApiError(503, message, type="server_error", code=code, headers=retry_headers(retry_after_ms))


def overloaded(retry_after_ms: int) -> ApiError:
    return unavailable("overloaded", "The model is overloaded.", retry_after_ms)


def no_worker(message: str = "No worker serves this model now.") -> ApiError:
    return unavailable("no_worker", message)


def disk_full() -> ApiError:
    return unavailable("disk_full", "The server's disk is full: nothing new is let in until it has room.", 2000)


def database_unavailable(message: str) -> ApiError:
    return unavailable("database_unavailable", message)


def internal() -> ApiError:
    return ApiError(
        500, "The server had an error while processing your request.", type="server_error", code="internal_error"
    )


def retry_headers(retry_after_ms: int | None) -> dict[str, str]:
    """Returns `retry-after` in whole seconds, rounded up, and `retry-after-ms`; above 120 s SDKs must not retry."""
    if retry_after_ms is None:
        return {"x-should-retry": "false"}
    milliseconds = max(1, retry_after_ms)
    headers = {"retry-after": str(-(-milliseconds // 1000)), "retry-after-ms": str(milliseconds)}
    if milliseconds > 120_000:
        headers["x-should-retry"] = "false"
    return headers
