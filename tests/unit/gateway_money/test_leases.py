from __future__ import annotations

import pytest

from accounting.values.budget_types import Budget, Period
from accounting.values.types import Rates
from gateway.base.redis_link import LimiterUnavailable
from gateway.limiter.limits import Fresh, Ladder, LeaseGrant, Limiter, ReservationEnded, Verdict
from gateway.limiter.open_reservations import OpenReservation
from gateway.limiter.rules import BudgetUse, LimitSubject
from gateway.metering.leases import RETRY_S, Extension, Lease, LeaseLost, ladder

RATES = Rates(0, 0, 0, output=3_000_001)
HOLDER = LimitSubject("req_1", "t", "k")
BUDGET = Budget(id="budget_1", tenant_id="t", period="day", limit_micro_units=9)
STOP = BudgetUse(BUDGET, Period(0, 86_400_000))


class ScriptedLimiter:
    """Answers `extend` from a list, and keeps what it was asked."""

    def __init__(self, *answers: LeaseGrant | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[int, int, int]] = []

    async def extend(self, _: LimitSubject, seq: int, rungs: Ladder, now_ms: int, counted: int = -1) -> LeaseGrant:
        assert now_ms > 0
        self.asked.append((seq, rungs[0][0], counted))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def lease(limiter: ScriptedLimiter, bound: int = 128, max_output: int = 1000) -> Lease:
    verdict = Verdict(0, bound, 10, None, 0)
    return Lease(limiter, HOLDER, RATES, max_output, verdict)


def test_a_ladder_goes_down_by_powers_of_two_with_costs_rounded_up() -> None:
    assert [tokens for tokens, _ in ladder(1000, RATES)] == [128, 64, 32, 16, 8, 4, 2, 1]
    assert ladder(100, RATES)[:2] == ((100, 301), (64, 193))
    assert ladder(1, RATES) == ((1, 4),)
    assert ladder(0, RATES) == ()


async def test_an_extension_is_asked_for_at_low_water_only() -> None:
    limiter = ScriptedLimiter(LeaseGrant(256, 0, 20))
    held = lease(limiter)
    assert await held.extend(63) is None
    assert await held.extend(64, 500) == Extension(1, 256)
    assert limiter.asked == [(1, 128, 500)]
    assert (held.bound, held.seq, held.reserved) == (256, 1, 20)
    assert await held.extend(65) is None


async def test_no_more_is_asked_for_than_the_request_may_produce() -> None:
    limiter = ScriptedLimiter(LeaseGrant(150, 0, 20))
    held = lease(limiter, max_output=150)
    await held.extend(100)
    assert limiter.asked == [(1, 22, -1)]
    assert await held.extend(150) is None


async def test_a_paced_lease_is_told_to_the_worker_and_asked_again_after_the_wait() -> None:
    limiter = ScriptedLimiter(LeaseGrant(128, 30, 10), LeaseGrant(129, 0, 11))
    held = lease(limiter)
    assert await held.extend(128) == Extension(1, 128, wait_ms=30)
    assert await held.extend(128) is None
    held._not_before = 0.0
    assert await held.extend(128) == Extension(2, 129)


async def test_an_unreachable_limiter_parks_the_stream_then_loses_the_lease() -> None:
    limiter = ScriptedLimiter(*[LimiterUnavailable("down")] * 2)
    held = lease(limiter)
    assert await held.extend(100) is None
    assert held._not_before > 0
    assert RETRY_S < 1
    assert held._failing_since is not None
    held._not_before, held._failing_since = 0.0, held._failing_since - 15.0
    with pytest.raises(LeaseLost):
        await held.extend(100)
    # The same number again: the reply, not the grant, may have been lost.
    assert [seq for seq, _, _ in limiter.asked] == [1, 1]


async def test_a_request_that_the_limiter_has_ended_has_lost_its_lease() -> None:
    with pytest.raises(LeaseLost):
        await lease(ScriptedLimiter(ReservationEnded("req_1"))).extend(100)


async def test_a_lease_that_no_budget_can_extend_is_the_last_one() -> None:
    limiter = ScriptedLimiter(LeaseGrant(130, 0, 12), LeaseGrant(130, 0, 12, STOP))
    held = lease(limiter)
    assert await held.extend(128) == Extension(1, 130)
    assert await held.extend(128) == Extension(2, 130, last=True)
    assert held.stop == STOP
    assert await held.extend(130) is None
    assert len(limiter.asked) == 2


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_stop_by_a_budget_that_is_not_read_yet_is_asked_again_after_a_second(is_known, monkeypatch) -> None:
    """It was asked again at once, thousands of times until the budgets were read anew."""
    who = LimitSubject("req_1", "t", "k", budgets=(STOP,) if is_known else ())
    limiter = Limiter(None, 0, None, caught_up=None)
    limiter.fresh = Fresh(5, {"t": ()})
    limiter.open_reservations.held["req_1"] = OpenReservation(who, 1, 10, 0, 0)

    async def run(*_) -> list:
        return ["ok", 10, 0, 0, STOP.row]

    monkeypatch.setattr(limiter, "_run", run)
    held = Lease(limiter, who, RATES, 100, Verdict(0, 10, 0, None, 0))
    extension = Extension(1, 10, last=True) if is_known else Extension(1, 10, wait_ms=1000)
    assert await held.extend(10) == extension
    assert await held.extend(10) is None
