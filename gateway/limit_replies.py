"""What a client is told about its limits: `x-ratelimit-*` headers and 429 bodies, from the limiter's own answer. Pure.

Formats are OpenAI's (api.md section 7). Knows limits and verdicts; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.errors import ApiError, retry_headers
from gateway.limits import Holder, Verdict, Window


@dataclass(frozen=True)
class _Level:
    """One limit with what counts against it."""

    name: Literal["key", "tenant"]
    limit: int | None
    window: Window

    @property
    def remaining(self) -> int:
        return max(0, (self.limit or 0) - self.window.sum)


def headers(holder: Holder, verdict: Verdict) -> dict[str, str]:
    """Requests and tokens of the tightest level in force, and the tenant's own tokens."""
    key, tenant = holder.key_limits, holder.tenant_limits
    requests = [
        _Level("key", key.requests_per_minute, verdict.key_requests),
        _Level("tenant", tenant.requests_per_minute, verdict.tenant_requests),
    ]
    tokens = [
        _Level("key", key.tokens_per_minute, verdict.key_tokens),
        _Level("tenant", tenant.tokens_per_minute, verdict.tenant_tokens),
    ]
    return (
        _headers("requests", requests)
        | _headers("tokens", tokens)
        | _headers("project-tokens", tokens[1:])
    )


def refused(holder: Holder, verdict: Verdict, model: str, requested_tokens: int) -> ApiError:
    """The 429. `retry-after` is the time after which the same request fits at every level, if nobody else comes."""
    level: Literal["key", "tenant"] = "key" if verdict.failing <= 3 else "tenant"
    limits = holder.key_limits if level == "key" else holder.tenant_limits
    requests, tokens, running, open_tokens = (
        (verdict.key_requests, verdict.key_tokens, verdict.key_running, verdict.key_open_tokens)
        if level == "key"
        else (
            verdict.tenant_requests,
            verdict.tenant_tokens,
            verdict.tenant_running,
            verdict.tenant_open_tokens,
        )
    )
    kind = ("requests", "tokens", "concurrency")[(verdict.failing - 1) % 3]
    limit, window, reserved, requested, dimension, words = {
        "requests": (limits.requests_per_minute, requests, 0, 1, "requests_per_minute", "requests per min (RPM)"),
        "tokens": (
            limits.tokens_per_minute, tokens, min(open_tokens, tokens.sum), requested_tokens,
            "tokens_per_minute", "tokens per min (TPM)",
        ),
        "concurrency": (limits.concurrency, Window(running), 0, 1, "concurrency", "concurrent requests"),
    }[kind]  # fmt: skip
    never = verdict.wait_ms < 0
    advice = (
        "This request alone exceeds the limit."
        if never
        else f"Please try again in {duration(verdict.wait_ms)}."
    )
    return ApiError(
        429,
        f"Rate limit reached for {model} in project {holder.tenant_id} on {words}: "
        f"Limit {limit}, Used {window.sum}, Requested {requested}. {advice}",
        type=kind,
        code="rate_limit_exceeded",
        headers=headers(holder, verdict) | retry_headers(None if never else verdict.wait_ms),
        headgate={
            "level": level,
            "dimension": dimension,
            "limit": limit,
            "used": window.sum - reserved,
            "reserved": reserved,
            "resets_at": None
            if kind == "concurrency"
            else _seconds(verdict.now_ms + window.empty_in_ms),
        },
    )


def duration(milliseconds: int) -> str:
    """As Go writes it: `12ms`, `51.189s`, `1m0s`, `1h0m0s`; `0s`."""
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest // 1000}.{rest % 1000:03d}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _headers(name: str, levels: list[_Level]) -> dict[str, str]:
    in_force = [level for level in levels if level.limit is not None]
    if not in_force:
        return {}
    tightest = min(in_force, key=lambda level: (level.remaining, level.limit))
    return {
        f"x-ratelimit-limit-{name}": str(tightest.limit),
        f"x-ratelimit-remaining-{name}": str(tightest.remaining),
        f"x-ratelimit-reset-{name}": duration(tightest.window.empty_in_ms),
    }


def _seconds(milliseconds: int) -> int:
    return -(-milliseconds // 1000)
