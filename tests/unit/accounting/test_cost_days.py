"""The judgement of a provider's day, and which days a pull reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.upstreams.cost_days import NAMES, ComparedDay, DayFacts, judge, sums
from accounting.upstreams.cost_pulls import Pull, first_day_to_read
from accounting.values.periods import DAY_S

DAY = 20_000 * DAY_S
LONG_AFTER = DAY + 10 * DAY_S


def facts(billed: int, expected: int, num_calls: int = 10, num_lines: int = 2) -> DayFacts:
    return DayFacts(DAY, billed=billed, expected=expected, num_calls=num_calls, num_lines=num_lines)


@pytest.mark.parametrize(
    ("known", "read_at", "account", "matched"),
    [
        (facts(500, 500), LONG_AFTER, "", 500),
        (facts(500, 500), DAY, "", 500),
        (facts(512, 500), LONG_AFTER, "rounding", 500),
        (facts(488, 500), LONG_AFTER, "rounding", 488),
        (facts(513, 500), LONG_AFTER, "over", 500),
        (facts(487, 500), LONG_AFTER, "under", 487),
        (facts(0, 500), LONG_AFTER, "unbilled", 0),
        (facts(5, 0, num_calls=0), LONG_AFTER, "unknown", 0),
        (facts(5000, 0, num_calls=3), LONG_AFTER, "over", 0),
        (facts(0, 500), DAY + DAY_S - 1, "open", 0),
        (facts(0, 500), DAY + DAY_S, "late", 0),
        (facts(900, 500), DAY + 4 * DAY_S - 1, "late", 500),
        (facts(900, 500), DAY + 4 * DAY_S, "over", 500),
    ],
)
def test_a_difference_has_the_name_of_its_reason(known: DayFacts, read_at: int, account: str, matched: int) -> None:
    found = judge(known, read_at)
    assert (found.account, found.matched) == (account, matched)


AMOUNTS = st.integers(0, 10**15)


@given(AMOUNTS, AMOUNTS, st.integers(0, 5), st.integers(0, 5), st.integers(DAY, LONG_AFTER))
def test_every_micro_unit_of_both_sides_is_matched_or_named(
    billed: int, expected: int, num_calls: int, num_lines: int, read_at: int
) -> None:
    known = facts(billed, expected, num_calls, num_lines)
    found = judge(known, read_at)
    assert found.account in NAMES
    assert (found.account == "") == (billed == expected)
    day = ComparedDay(known, found.matched, found.account)
    of_all = sums([day])
    named = sum(of_all.drift.values())
    assert billed == found.matched + max(0, named)
    assert expected == found.matched + max(0, -named)


TODAY = 21_000 * DAY_S


@pytest.mark.parametrize(
    ("known", "first_call", "first"),
    [
        (Pull("u"), None, TODAY - DAY_S),
        (Pull("u"), TODAY, TODAY - DAY_S),
        (Pull("u"), TODAY - 3 * DAY_S, TODAY - 3 * DAY_S),
        (Pull("u"), TODAY - 300 * DAY_S, TODAY - 31 * DAY_S),
        (Pull("u", 1, TODAY * 1000 + 5, TODAY - 100 * DAY_S), None, TODAY - 31 * DAY_S),
        (Pull("u", 1, TODAY * 1000, TODAY - 2 * DAY_S), None, TODAY - 2 * DAY_S),
        (Pull("u", 1, (TODAY - 60 * DAY_S) * 1000, TODAY - 900 * DAY_S), None, TODAY - 91 * DAY_S),
    ],
)
def test_no_day_is_left_out_however_long_pulls_have_failed(known: Pull, first_call: int | None, first: int) -> None:
    assert first_day_to_read(known, TODAY, first_call) == first
