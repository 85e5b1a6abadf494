from __future__ import annotations

import json
from dataclasses import replace

import pytest

from accounting.types import Limits
from gateway.limit_replies import duration, headers, refused
from gateway.limits import Holder, Verdict, Window

HOLDER = Holder("req_1", "proj_1", "key_1", Limits(), Limits(60, 200_000, 4))
NONE = Window()
ADMITTED = Verdict(
    1_789_999_940_000, 128, 1000, 0, 0, NONE, NONE, Window(1, 60_000), Window(170_633, 51_189), 1, 500, 1, 20_000
)  # fmt: skip


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"), (12, "12ms"), (999, "999ms"), (1000, "1s"), (1500, "1.5s"), (51_189, "51.189s"), (59_999, "59.999s"),
        (60_000, "1m0s"), (60_054, "1m0.054s"), (360_000, "6m0s"), (3_600_000, "1h0m0s"), (86_405_010, "24h0m5.01s"),
    ],
)  # fmt: skip
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
    holder = replace(HOLDER, key_limits=Limits(tokens_per_minute=1000))
    shown = headers(holder, replace(ADMITTED, key_tokens=Window(900, 700)))
    assert shown["x-ratelimit-remaining-tokens"] == "100"
    assert shown["x-ratelimit-reset-tokens"] == "700ms"
    assert shown["x-ratelimit-remaining-project-tokens"] == "29367"
    assert shown["x-ratelimit-limit-requests"] == "60"


def test_without_a_limit_nothing_is_said() -> None:
    assert headers(replace(HOLDER, tenant_limits=Limits()), ADMITTED) == {}


def test_a_refusal_names_level_dimension_limit_used_reserved_and_reset() -> None:
    error = refused(HOLDER, replace(ADMITTED, failing=5, wait_ms=45_190), "m-8b", 180_002)
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


def test_a_request_that_alone_exceeds_its_limit_is_told_not_to_retry() -> None:
    error = refused(HOLDER, replace(ADMITTED, failing=5, wait_ms=-1), "m-8b", 300_000)
    assert error.headers["x-should-retry"] == "false"
    assert "retry-after" not in error.headers


@pytest.mark.parametrize(
    ("failing", "level", "kind"),
    [
        (1, "key", "requests"), (2, "key", "tokens"), (3, "key", "concurrency"),
        (4, "tenant", "requests"), (5, "tenant", "tokens"), (6, "tenant", "concurrency"),
    ],
)  # fmt: skip
def test_each_of_the_six_limits_is_named(failing: int, level: str, kind: str) -> None:
    holder = replace(HOLDER, key_limits=Limits(11, 12, 13), tenant_limits=Limits(21, 22, 23))
    error = refused(holder, replace(ADMITTED, failing=failing, wait_ms=1000), "m", 1)
    assert error.headgate is not None
    assert (error.type, error.headgate["level"]) == (kind, level)
    number = {"requests": 1, "tokens": 2, "concurrency": 3}[kind] + (10 if level == "key" else 20)
    assert error.headgate["limit"] == number
