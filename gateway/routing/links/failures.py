"""Turns a worker's failures into errors that a client may see. A worker's own words stay in our log."""

from __future__ import annotations

import logging

from gateway.base import errors
from workers.protocol.messages import Failed

logger = logging.getLogger(__name__)


def upstream_lost() -> errors.ApiError:
    return errors.unavailable("upstream_lost", "The worker that ran this request was lost.")


def lost_too_often() -> errors.ApiError:
    """Returns the error of a request under which several workers were lost: it may be what ends them."""
    return errors.unavailable("upstream_lost", "Several workers were lost while they ran this request.", None)


def quarantined() -> errors.ApiError:
    return errors.ApiError(
        500,
        "Workers ended while they ran this request, so it is not run for some minutes.",
        type="server_error",
        code="request_quarantined",
        headers=errors.retry_headers(None),
    )


def of_failed(failed: Failed, num_prompt: int) -> errors.ApiError:
    logger.warning("attempt_failed", extra={"code": failed.code, "why": failed.message})
    match failed.code:
        case "too_long":
            return errors.invalid(
                f"The prompt of {num_prompt} tokens does not fit the model's context.", None, "context_length_exceeded"
            )
        case "grammar":
            return errors.invalid("The output format cannot be enforced.", None, "unsupported_schema")
        case "overloaded":
            return errors.overloaded(failed.retry_after_ms or 1000)
        case "disk_full":
            return errors.disk_full()
        case "draining" | "wrong_root":
            return upstream_lost()
        case "no_lease" | "internal":
            return errors.internal()
