"""The meaning of a failed attempt at an upstream: for the next attempt, for the breaker, and for the tenant. The module
is pure.

A tenant sees sentences of ours alone. What the upstream says may hold its address or our credential.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from gateway.base import errors

Blame = Literal["client", "model", "no_model", "address", "credential", "rate"]
"""The one to blame: a client's fault is never tried again, any other may be tried elsewhere. What is a model's fault (it
fails, or the upstream does not know it) says nothing of the upstream's other models."""
LONGEST_WAIT_S = 120.0
TOO_LONG = ("context_length_exceeded", "context length", "maximum context", "too long", "too many tokens")
FLAGGED = ("moderation", "input was flagged", "content_filter", "content_policy")
NO_ACCESS = ("model_not_found", "access to model")


@dataclass(frozen=True)
class Fault:
    """The reason why an attempt failed. `reason` is a fixed word for metrics and logs."""

    reason: str
    blame: Blame = "model"
    wait_s: float = 0.0
    error: errors.ApiError | None = None
    """The client's error, if the client is to blame."""

    @property
    def may_retry(self) -> bool:
        return self.blame != "client"


def unavailable(wait_s: float = 1.0) -> errors.ApiError:
    """Says that no upstream could answer."""
    wait_ms = int(1000 * min(LONGEST_WAIT_S, max(1.0, wait_s)))
    return errors.unavailable("upstream_unavailable", "This model's provider cannot answer now.", wait_ms)


def client_error(fault: Fault) -> errors.ApiError:
    """Returns what the tenant sees once no attempt is left."""
    if fault.error is not None:
        return fault.error
    return unavailable(fault.wait_s)


def of_status(status: int, headers: Mapping[str, str], body: bytes) -> Fault:
    """Reads the answer of an upstream that did not begin to answer."""
    if 300 <= status < 400:
        return Fault("redirect")
    said = _said(body)
    if status == 404 or (status == 403 and any(mark in said for mark in NO_ACCESS)):
        return Fault("unknown_model", "no_model")
    if status == 403 and any(mark in said for mark in FLAGGED):
        return Fault("refused", "client", error=_filtered())
    if status in (401, 402, 403):
        return Fault("credential", "credential")
    if status == 429:
        return Fault("rate_limited", "rate", retry_after_s(headers))
    if status in (400, 413, 422):
        return Fault("refused", "client", error=_refusal(said))
    if status in (503, 529):
        return Fault("overloaded", "model", retry_after_s(headers))
    return Fault("server_error" if status >= 500 else "status")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Returns the seconds that an upstream asks to wait; 1 if it says nothing that can be read."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            value = float(headers.get(name, "")) / unit
        except ValueError:
            continue
        if 0 <= value < 1e9:
            return value
    return 1.0


def _refusal(said: str) -> errors.ApiError:
    if any(mark in said for mark in TOO_LONG):
        return errors.invalid("The prompt does not fit the model's context.", None, "context_length_exceeded")
    if "content" in said and ("filter" in said or "policy" in said):
        return _filtered()
    return errors.invalid("The model's provider does not accept this request.", None, "upstream_refused")


def _filtered() -> errors.ApiError:
    return errors.invalid("The model's provider refuses this content.", None, "content_filter")


def _said(body: bytes) -> str:
    """Returns code and message of an error body in lower case, to be searched and never to be shown."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    error = value.get("error", value) if isinstance(value, dict) else {}
    if not isinstance(error, dict):
        return str(error)[:1000].lower()
    return " ".join(str(error.get(name, ""))[:1000] for name in ("code", "type", "message")).lower()
