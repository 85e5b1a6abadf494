"""The client's view of its limits: headers and 429 bodies, built from the limiter's own answer. The module is pure.

Formats are OpenAI's, and Anthropic's for its endpoints (api.md section 7). It knows limits and verdicts, and decides
nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from accounting.values import time_zones
from accounting.values.currencies import written
from gateway.base.errors import ApiError, too_many
from gateway.limiter.limits import Money, UsageSnapshot, Verdict, Window
from gateway.limiter.rules import COUNTED, BudgetUse, LimitSubject, Rule

MINUTE_MS, BUCKET_MS = 60_000, 1_000
WORDS = {
    "requests_per_minute": "requests per min (RPM)",
    "tokens_per_minute": "tokens per min (TPM)",
    "input_tokens_per_minute": "input tokens per min (TPM)",
    "output_tokens_per_minute": "output tokens per min (TPM)",
    "requests_per_day": "requests per day (RPD)",
    "batch_tokens_per_day": "batch tokens per day (TPD)",
    "concurrency": "concurrent requests",
}


ANTHROPIC = "/v1/messages"
"""Endpoints that begin with this have Anthropic's headers."""
_OPENAI_NAMES = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}
_ANTHROPIC_NAMES = {
    "requests_per_minute": "requests",
    "tokens_per_minute": "tokens",
    "input_tokens_per_minute": "input-tokens",
    "output_tokens_per_minute": "output-tokens",
}
_PROJECT_TOKENS = "project-tokens"
HEADERS = (
    *(
        f"x-ratelimit-{told}-{name}"
        for told in ("limit", "remaining", "reset")
        for name in (*_OPENAI_NAMES.values(), _PROJECT_TOKENS)
    ),
    *(
        f"anthropic-ratelimit-{name}-{told}"
        for name in _ANTHROPIC_NAMES.values()
        for told in ("limit", "remaining", "reset")
    ),
)
"""Every header that `headers` may return."""


def headers(holder: LimitSubject, verdict: Verdict, endpoint: str = "") -> dict[str, str]:
    """Returns the headers for requests and tokens of the tightest level in force, and for the tenant's own tokens."""
    if endpoint.startswith(ANTHROPIC):
        return _anthropic_headers(holder, verdict)
    tightest: dict[str, tuple[int, Rule, Window]] = {}
    for rule in holder.window_rules:
        if rule.shadow or rule.dimension not in _OPENAI_NAMES:
            continue
        window = verdict.windows[rule.window]
        left = _remaining(rule, window)
        is_project = rule.dimension == "tokens_per_minute" and rule.level in ("tenant", "model")
        for name in (_OPENAI_NAMES[rule.dimension], _PROJECT_TOKENS)[: 1 + is_project]:
            known = tightest.get(name)
            if known is None or (left, rule.limit) < (known[0], known[1].limit):
                tightest[name] = (left, rule, window)
    found: dict[str, str] = {}
    for name, (left, rule, window) in tightest.items():
        found[f"x-ratelimit-limit-{name}"] = str(rule.limit)
        found[f"x-ratelimit-remaining-{name}"] = str(left)
        found[f"x-ratelimit-reset-{name}"] = duration(window.empty_in_ms)
    return found


def _anthropic_headers(holder: LimitSubject, verdict: Verdict) -> dict[str, str]:
    """Returns the headers of each kind of limit, by the rule of which least is left. A reset is a moment (RFC 3339)."""
    found: dict[str, str] = {}
    for dimension, name in _ANTHROPIC_NAMES.items():
        rules = [rule for rule in holder.window_rules if rule.dimension == dimension and not rule.shadow]
        if not rules:
            continue
        rule = min(rules, key=lambda rule: (_remaining(rule, verdict.windows[rule.window]), rule.limit))
        window = verdict.windows[rule.window]
        resets_at = datetime.datetime.fromtimestamp(_seconds(verdict.now_ms + window.empty_in_ms), datetime.UTC)
        found |= {
            f"anthropic-ratelimit-{name}-limit": str(rule.limit),
            f"anthropic-ratelimit-{name}-remaining": str(_remaining(rule, window)),
            f"anthropic-ratelimit-{name}-reset": resets_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
    return found


def refused(
    holder: LimitSubject,
    verdict: Verdict,
    model: str,
    prompt_tokens: int,
    least_output: int,
    endpoint: str = "",
    currency: str = "",
) -> ApiError:
    """Returns the 429. `retry-after` is the time after which the same request fits at every level if no other request
    comes, except for a second at the end of a minute (`_told`). `currency` is the one that budgets are in.
    """
    match verdict.failing:
        case BudgetUse() as use:
            error = _over_budget(holder, verdict, use, currency)
        case Rule() as rule:
            error = _over_limit(holder, verdict, rule, model, prompt_tokens, least_output)
        case _:
            raise ValueError("nothing failed")
    error.headers = headers(holder, verdict, endpoint) | error.headers
    return error


def scope_of(use: BudgetUse) -> dict[str, Any]:
    """Describes a budget that stops or refuses a request: its scope, its id, and the time when it is full again."""
    budget = use.budget
    narrowed = {"model": budget.model, "tier": budget.tier}
    return {"scope": budget.scope, "resets_at": use.period.end_ms // 1000, "budget": budget.id} | {
        name: value for name, value in narrowed.items() if value is not None
    }


def _over_limit(
    holder: LimitSubject, verdict: Verdict, rule: Rule, model: str, prompt_tokens: int, least_output: int
) -> ApiError:
    unit = "running" if rule.dimension == "concurrency" else COUNTED[rule.dimension][0]
    window = verdict.windows[rule.window] if unit != "running" else Window(verdict.running[rule])
    requested = {"input": prompt_tokens, "output": least_output, "tokens": prompt_tokens + least_output}
    open_tokens = 0 if unit in ("requests", "running") else min(window.open, window.sum)
    never, wait_ms = verdict.wait_ms < 0, _told(verdict.wait_ms)
    advice = "This request alone exceeds the limit." if never else f"Please try again in {duration(wait_ms)}."
    return too_many(
        f"Rate limit reached for {model or 'requests'} in project {holder.tenant_id} on {WORDS[rule.dimension]}: "
        f"Limit {rule.limit}, Used {window.sum}, Requested {requested.get(unit, 1)}. {advice}",
        None if never else wait_ms,
        type={"requests": "requests", "running": "concurrency"}.get(unit, "tokens"),
        headgate={
            "level": rule.level,
            "dimension": rule.dimension,
            "limit": rule.limit,
            "used": window.sum - open_tokens,
            "reserved": open_tokens,
            "resets_at": None if unit == "running" else _seconds(verdict.now_ms + window.empty_in_ms),
        },
    )


def _told(wait_ms: int) -> int:
    """Returns the wait to send to the client. A window counts by buckets, so a minute takes up to a second more to
    pass. If SDKs get a wait of more than a minute, they use their own short waits instead and are refused until they give
    up. If they get a minute, they come back once more at worst.
    """
    return MINUTE_MS if MINUTE_MS < wait_ms <= MINUTE_MS + BUCKET_MS else wait_ms


def _over_budget(holder: LimitSubject, verdict: Verdict, use: BudgetUse, currency: str) -> ApiError:
    money = verdict.money.get(use.row, Money())
    limit = use.budget.limit_at(holder.opened_ms)
    amount = f": {written(limit, currency)} {currency}" if currency else ""
    whose = "this API key in project" if use.budget.key_id else "project"
    return too_many(
        f"You exceeded your current quota: hard budget of {whose} {holder.tenant_id}{amount}.",
        None,
        type="insufficient_quota",
        code="insufficient_quota",
        headgate={
            "level": use.budget.scope,
            "dimension": "budget_micro_units",
            **({"currency": currency} if currency else {}),
            "limit": limit,
            "used": money.used,
            "reserved": money.held,
            **scope_of(use),
        },
    )


def shown(holder: LimitSubject, peek: UsageSnapshot, models: Mapping[str, str], time_zone: str) -> list[dict[str, Any]]:
    """Returns each limit and budget row with the sum that counts against it, and in shadow mode the requests of the last
    7 days that it would have refused. `models` maps a place to its model.
    """
    return [
        *(_shown_window(rule, peek, models) for rule in holder.window_rules),
        *(_shown_running(rule, peek, models) for rule in holder.running_rules),
        *(_shown_budget(use, peek, time_zone) for use in holder.budgets),
    ]


def _shown_window(rule: Rule, peek: UsageSnapshot, models: Mapping[str, str]) -> dict[str, Any]:
    window = peek.windows[rule.window]
    is_tokens = COUNTED[rule.dimension][0] != "requests"
    reserved = min(window.open, window.sum) if is_tokens else 0
    return _of_rule(rule, peek, models) | {
        "used": window.sum - reserved,
        "reserved": reserved,
        "resets_at": _seconds(peek.now_ms + window.empty_in_ms),
    }


def _shown_running(rule: Rule, peek: UsageSnapshot, models: Mapping[str, str]) -> dict[str, Any]:
    return _of_rule(rule, peek, models) | {"used": peek.running[rule], "reserved": 0, "resets_at": None}


def _shown_budget(use: BudgetUse, peek: UsageSnapshot, time_zone: str) -> dict[str, Any]:
    money, budget = peek.money[use.row], use.budget
    resets_at = use.period.end_ms // 1000
    return {
        "level": budget.scope,
        "dimension": "budget_micro_units",
        "model": budget.model,
        "tier": budget.tier,
        "limit": budget.limit_at(peek.now_ms),
        "used": money.used,
        "reserved": money.held,
        "resets_at": resets_at,
        "resets_at_local": time_zones.shown(resets_at, time_zone),
        "budget": budget.id,
        "enforced": budget.hardness == "hard",
        "would_have_refused": peek.shadowed.get(use.shadow_name),
    }


def _of_rule(rule: Rule, peek: UsageSnapshot, models: Mapping[str, str]) -> dict[str, Any]:
    return {
        "level": rule.level,
        "dimension": rule.dimension,
        "model": models.get(rule.place),
        "tier": "batch" if rule.place.startswith("batch:") else "interactive",
        "limit": rule.limit,
        "enforced": not rule.shadow,
        "would_have_refused": peek.shadowed.get(rule.shadow_name),
    }


def duration(milliseconds: int) -> str:
    """Formats a duration as Go does: `12ms`, `51.189s`, `1m0s`, `1h0m0s`; `0s`."""
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest // 1000}.{rest % 1000:03d}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _remaining(rule: Rule, window: Window) -> int:
    return max(0, rule.limit - window.sum)


def _seconds(milliseconds: int) -> int:
    return -(-milliseconds // 1000)
