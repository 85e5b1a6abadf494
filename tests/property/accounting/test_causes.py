"""Parts of a difference always add up to it, and exchanging the periods negates every one of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from accounting.comparison import causes
from accounting.comparison.causes import FACTORS, Line, Period
from accounting.values.types import Rates, Usage

counts = st.one_of(st.integers(0, 3), st.integers(0, 10**12))
rates = st.builds(Rates, *(st.one_of(st.integers(0, 3), st.integers(0, 10**12)) for _ in range(4)))
lines = st.builds(
    Line,
    model=st.sampled_from("abc"),
    tier=st.sampled_from(["interactive", "batch"]),
    num_requests=st.one_of(st.integers(0, 3), st.integers(0, 10**9)),
    usage=st.builds(Usage, *(counts for _ in range(4))),
    charge=st.integers(-10, 2**53),
    rates=rates,
)
periods = st.builds(
    Period,
    seconds=st.integers(1, 366 * 1440).map(lambda minutes: 60 * minutes),
    lines=st.lists(lines, max_size=5).map(tuple),
    residency=st.dictionaries(st.sampled_from("abx"), st.integers(0, 10**9), max_size=2),
    corrections=st.integers(-(10**9), 0),
)


@given(periods, periods)
@settings(max_examples=150, deadline=None)
def test_the_parts_add_up_and_turn_with_the_periods(before, after):
    found, turned = causes.change(before, after), causes.change(after, before)
    assert (found.before, found.after) == (before.charge, after.charge) == (turned.after, turned.before)
    amounts = {part.cause: part.amount for part in found.parts}
    assert sorted(amounts) == sorted(causes.CAUSES)
    assert sum(amounts.values()) == after.charge - before.charge
    assert {part.cause: -part.amount for part in turned.parts} == amounts
    assert [part.cause for part in turned.parts] == [part.cause for part in found.parts]
    for one in found.models:
        assert sum(part.amount for part in one.parts) == one.after - one.before
    in_models = sum(one.after - one.before for one in found.models)
    assert in_models + amounts["corrections"] == after.charge - before.charge


@given(periods)
@settings(max_examples=40, deadline=None)
def test_equal_periods_have_no_cause(period):
    found = causes.change(period, period)
    assert (found.first_cause, {part.amount for part in found.parts}) == (None, {0})


@given(periods, st.integers(2, 50))
@settings(max_examples=60, deadline=None)
def test_what_does_not_change_has_no_part(period, factor):
    """So many times as many requests of the same kind: only their number changed."""
    more = Period(
        seconds=period.seconds,
        lines=tuple([_times(line, factor) for line in period.lines]),
        residency=period.residency,
        corrections=period.corrections,
    )
    amounts = {part.cause: part.amount for part in causes.change(period, more).parts}
    others = {*FACTORS, "residency", "corrections"} - {"volume"}
    # What is rounded is a model's parts together: a unit may go to another of them.
    assert all(abs(amounts[cause]) <= len(period.models) for cause in others - {"residency", "corrections"})
    assert (amounts["residency"], amounts["corrections"]) == (0, 0)


def _times(line: Line, factor: int) -> Line:
    usage = Usage(*(factor * getattr(line.usage, name) for name in Usage.__struct_fields__))
    return Line(
        model=line.model,
        tier=line.tier,
        num_requests=factor * line.num_requests,
        usage=usage,
        charge=factor * line.charge,
        rates=line.rates,
    )
