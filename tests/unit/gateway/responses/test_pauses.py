"""When a response in the background is tried again."""

from __future__ import annotations

import pytest

from gateway.base import errors
from gateway.responses.background import MAX_LOST, MAX_PAUSE_S, MAX_WAIT_S, pause_after
from gateway.routing.links import failures


@pytest.mark.parametrize("error", [errors.no_worker(), errors.ApiError(429, "Too many.", code="rate_limit_exceeded")])
def test_a_response_that_is_refused_waits_for_an_hour_and_not_for_ten_tries(error: errors.ApiError) -> None:
    age_s, num_tries = 0.0, 0
    while (pause := pause_after(error, age_s, 0)) is not None:
        assert 1 <= pause.wait_ms / 1000 <= MAX_PAUSE_S
        age_s += pause.wait_ms / 1000
        num_tries += 1
    assert MAX_WAIT_S < age_s <= MAX_WAIT_S + MAX_PAUSE_S
    assert num_tries < 120


def test_a_response_that_loses_its_worker_ten_times_fails_the_eleventh_time() -> None:
    lost = failures.upstream_lost()
    assert all(pause_after(lost, 10, number) is not None for number in range(MAX_LOST))
    assert pause_after(lost, 10, MAX_LOST) is None
    assert pause_after(errors.no_worker(), 10, MAX_LOST) is not None


def test_a_worker_that_says_when_to_come_again_is_believed() -> None:
    later = errors.ApiError(429, "Later.", code="rate_limit_exceeded", headers={"retry-after-ms": "90000"})
    pause = pause_after(later, 0, 0)
    assert pause is not None
    assert pause.wait_ms == 90_000


def test_a_refusal_that_will_not_change_is_an_end() -> None:
    assert pause_after(errors.ApiError(400, "No."), 0, 0) is None
    assert pause_after(errors.ApiError(429, "No.", headers={"x-should-retry": "false"}), 0, 0) is None
