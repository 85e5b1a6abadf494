from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from accounting.values.budget_types import Budget
from accounting.values.types import Limits, Principal
from gateway.limiter.limit_replies import duration, headers, refused
from gateway.limiter.limits import Money, Verdict, Window
from gateway.limiter.rules import LimitSubject


def holder(tenant: Limits, key: Limits | None = None, *budgets: Budget) -> LimitSubject:
    principal = Principal(
        "tenant",
        "proj_1",
        "key_1",
        frozenset(),
        tenant_limits=tenant,
        key_limits=key or Limits(),
        model_limits=(("m-8b", Limits()),),
        budgets=budgets,
    )
    return LimitSubject.of("req_1", principal, "m-8b", "interactive", now_ms=NOW_MS)


NOW_MS = 1_789_999_940_000
HOLDER = holder(Limits(60, 200_000, 4))
WINDOWS = {
    "t:requests:1": Window(1, 60_000),
    "t:tokens:1": Window(170_633, 51_189, 20_000),
    "key_1:requests:1": Window(),
    "key_1:tokens:1": Window(900, 700),
}
ADMITTED = Verdict(NOW_MS, 128, 1000, None, 0, WINDOWS)


def failing(who: LimitSubject, level: str, dimension: str, wait_ms: int = 1000) -> Verdict:
    [rule] = [rule for rule in who.rules if (rule.level, rule.dimension) == (level, dimension)]
    running = dict.fromkeys(who.running_rules, 5)
    return replace(ADMITTED, failing=rule, wait_ms=wait_ms, running=running)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (12, "12ms"),
        (999, "999ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (51_189, "51.189s"),
        (59_999, "59.999s"),
        (60_000, "1m0s"),
        (60_054, "1m0.054s"),
        (360_000, "6m0s"),
        (3_600_000, "1h0m0s"),
        (86_405_010, "24h0m5.01s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text


def test_headers_tell_the_limit_what_is_left_and_when_it_is_full_again() -> None:
    assert headers(HOLDER, ADMITTED) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "200000",
        "x-ratelimit-remaining-tokens": "29367",
        "x-ratelimit-reset-tokens": "51.189s",
        "x-ratelimit-limit-project-tokens": "200000",
        "x-ratelimit-remaining-project-tokens": "29367",
        "x-ratelimit-reset-project-tokens": "51.189s",
    }


def test_the_tightest_level_is_shown_and_the_tenants_own_beside_it() -> None:
    who = holder(Limits(60, 200_000, 4), Limits(tokens_per_minute=1000))
    shown = headers(who, ADMITTED)
    assert shown["x-ratelimit-remaining-tokens"] == "100"
    assert shown["x-ratelimit-reset-tokens"] == "700ms"
    assert shown["x-ratelimit-remaining-project-tokens"] == "29367"
    assert shown["x-ratelimit-limit-requests"] == "60"


def test_without_a_limit_nothing_is_said() -> None:
    assert headers(holder(Limits()), ADMITTED) == {}


def test_a_refusal_names_level_dimension_limit_used_reserved_and_reset() -> None:
    verdict = failing(HOLDER, "tenant", "tokens_per_minute", 45_190)
    error = refused(HOLDER, verdict, "m-8b", 180_000, 2)
    body = json.loads(error.body())["error"]
    assert error.status == 429
    assert body["type"] == "tokens"
    assert body["code"] == "rate_limit_exceeded"
    assert body["message"] == (
        "Rate limit reached for m-8b in project proj_1 on tokens per min (TPM): "
        "Limit 200000, Used 170633, Requested 180002. Please try again in 45.19s."
    )
    assert body["headgate"] == {
        "level": "tenant",
        "dimension": "tokens_per_minute",
        "limit": 200_000,
        "used": 150_633,
        "reserved": 20_000,
        "resets_at": 1_789_999_992,
    }
    assert error.headers["retry-after"] == "46"
    assert error.headers["retry-after-ms"] == "45190"
    assert error.headers["x-ratelimit-remaining-requests"] == "59"
    assert "x-should-retry" not in error.headers


def test_a_refusal_of_what_has_no_model_names_requests() -> None:
    error = refused(HOLDER, failing(HOLDER, "tenant", "requests_per_minute"), "", 0, 0)
    assert error.message.startswith("Rate limit reached for requests in project proj_1 on requests per min (RPM): ")


def test_a_request_that_alone_exceeds_its_limit_is_told_not_to_retry() -> None:
    verdict = failing(HOLDER, "tenant", "tokens_per_minute", -1)
    error = refused(HOLDER, verdict, "m-8b", 300_000, 0)
    assert error.headers["x-should-retry"] == "false"
    assert "retry-after" not in error.headers


@pytest.mark.parametrize("level", ["key", "tenant"])
@pytest.mark.parametrize(
    ("dimension", "kind", "limit"),
    [("requests_per_minute", "requests", 1), ("tokens_per_minute", "tokens", 2), ("concurrency", "concurrency", 3)],
)
def test_each_limit_is_named(level: str, dimension: str, kind: str, limit: int) -> None:
    who = holder(Limits(21, 22, 23), Limits(11, 12, 13))
    error = refused(who, failing(who, level, dimension), "m", 1, 1)
    assert error.headgate is not None
    assert (error.type, error.headgate["level"]) == (kind, level)
    assert error.headgate["limit"] == limit + (10 if level == "key" else 20)


def test_a_budget_refuses_for_good_and_names_what_is_used_and_held() -> None:
    budget = Budget(id="budget_1", tenant_id="proj_1", key_id="key_1", period="hour", limit_micro_units=500)
    who = holder(Limits(), None, budget)
    [use] = who.budgets
    verdict = replace(ADMITTED, failing=use, wait_ms=-1, money={use.row: Money(300, 190)})
    error = refused(who, verdict, "m-8b", 10, 1)
    assert (error.status, error.type, error.code) == (429, "insufficient_quota", "insufficient_quota")
    assert error.headers == {"x-should-retry": "false"}
    assert error.headgate == {
        "level": "key",
        "dimension": "budget_micro_units",
        "limit": 500,
        "used": 300,
        "reserved": 190,
        "scope": "key",
        "resets_at": 1_790_002_800,
        "budget": "budget_1",
    }


def test_an_endpoint_of_anthropics_api_has_its_headers() -> None:
    told = headers(HOLDER, ADMITTED, "/v1/messages")
    assert told == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2026-09-21T14:13:20Z",
        "anthropic-ratelimit-tokens-limit": "200000",
        "anthropic-ratelimit-tokens-remaining": "29367",
        "anthropic-ratelimit-tokens-reset": "2026-09-21T14:13:12Z",
    }
    error = refused(HOLDER, failing(HOLDER, "tenant", "tokens_per_minute"), "m-8b", 5, 1, "/v1/messages")
    assert error.headers["anthropic-ratelimit-tokens-limit"] == "200000"
    assert error.headers["retry-after-ms"] == "1000"
    assert not any(name.startswith("x-ratelimit") for name in error.headers)
