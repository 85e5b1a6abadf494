"""The split of a difference of charges: against the definition of the Shapley value, and case by case."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import factorial

import pytest

from accounting.comparison import causes
from accounting.comparison.causes import FACTORS, Line, Period
from accounting.prices.pricing import PER_MILLION
from accounting.values.types import Rates, Usage

RATES = Rates(100_000, 1_250_000, 1_000_000, 4_000_000)
DEAR = Rates(800_000, 9_000_000, 8_000_000, 30_000_000)
DAY = 86_400


def line(num=10, usage=Usage(500, 200, 300, 400), rates=RATES, model="m", tier="interactive", more=0) -> Line:  # noqa: B008 - frozen
    exact = sum(getattr(usage, name) * getattr(rates, name) for name in usage.__struct_fields__)
    charge = exact // PER_MILLION + more
    return Line(model=model, tier=tier, num_requests=num, usage=usage, charge=charge, rates=rates)


def period(*lines: Line, seconds=30 * DAY, **more) -> Period:
    return Period(seconds=seconds, lines=lines, **more)


def amounts(before: Period, after: Period) -> dict[str, int]:
    return {part.cause: part.amount for part in causes.change(before, after).parts}


MIXED = (
    period(
        line(100, Usage(5_000, 2_000, 3_000, 4_000)),
        line(20, Usage(0, 0, 900, 5_000), tier="batch"),
        line(30, Usage(50, 0, 77, 900), DEAR, "old"),
        line(7, Usage(1, 2, 3, 4), DEAR, "both"),
    ),
    period(
        line(80, Usage(500, 7_000, 9_000, 4_100)),
        line(13, Usage(500, 7_000, 9_000, 4_100), DEAR),
        line(300, Usage(0, 9_000, 0, 1_000), DEAR, "new", "batch"),
        line(9, Usage(10, 20, 30, 4), DEAR, "both"),
        line(11, Usage(10, 0, 30, 40), RATES, "both", "batch"),
        seconds=31 * DAY,
    ),
)
CASES = [
    MIXED,
    (period(), MIXED[1]),
    (MIXED[0], period(seconds=7 * DAY)),
    (period(line()), period(line(usage=Usage(0, 0, 0, 9)))),
]


def naive(before: Period, after: Period) -> dict[str, Fraction]:
    """The definition, with the whole charge as one function of all factors."""
    worlds = [_values(before, after), _values(after, before)]

    def cost(chosen: frozenset[str]) -> Fraction:
        def at(factor):
            return worlds[factor in chosen]

        total = Fraction(0)
        for group in worlds[0]["prompt_length"]:
            read, write = at("cache")["cache"][group]
            rates = at("price")["price"][group]
            prompt = read * rates[0] + write * rates[1] + (1 - read - write) * rates[2]
            each = at("prompt_length")["prompt_length"][group] * prompt
            each += at("output_length")["output_length"][group] * rates[3]
            share = at("model_mix")["model_mix"][group[0]] * at("tier_mix")["tier_mix"][group]
            total += at("period_length")["period_length"] * at("volume")["volume"] * share * each
        return total / PER_MILLION

    num = len(FACTORS)
    costs = {frozenset(some): None for size in range(num + 1) for some in combinations(FACTORS, size)}
    costs = {some: cost(some) for some in costs}
    return {
        factor: sum(
            Fraction(factorial(len(some)) * factorial(num - len(some) - 1), factorial(num))
            * (costs[some | {factor}] - costs[some])
            for some in costs
            if factor not in some
        )
        for factor in FACTORS
    }


def _values(own: Period, other: Period) -> dict:
    """The factors of a period; what it does not say is the other one's."""
    groups = {(one.model, one.tier) for one in (*own.lines, *other.lines)}
    found: dict = {"period_length": Fraction(own.seconds), "volume": Fraction(_num(own), own.seconds)}
    for factor in FACTORS[2:]:
        found[factor] = {}
    for group in groups:
        mix = own if _num(own) else other
        model = group[0]
        found["model_mix"][model] = Fraction(_num(mix, model), _num(mix))
        tiers = own if _num(own, model) else other
        found["tier_mix"][group] = Fraction(_num(tiers, *group), _num(tiers, model))
        lines = [one for one in (own if _num(own, *group) else other).lines if (one.model, one.tier) == group]
        num = sum(one.num_requests for one in lines)
        counts = [sum(getattr(one.usage, name) for one in lines) for name in Usage.__struct_fields__]
        prompt = sum(counts[:3])
        found["prompt_length"][group] = Fraction(prompt, num)
        found["output_length"][group] = Fraction(counts[3], num)
        cached = (Fraction(counts[0], prompt), Fraction(counts[1], prompt)) if prompt else None
        if cached is None:
            rest = [one for one in other.lines if (one.model, one.tier) == group]
            prompt = sum(one.usage.prompt for one in rest)
            cached = tuple(
                Fraction(sum(getattr(o.usage, n) for o in rest), prompt) for n in Usage.__struct_fields__[:2]
            )
        found["cache"][group] = cached
        found["price"][group] = [
            Fraction(sum(getattr(o.usage, n) * getattr(o.rates, n) for o in lines), count)
            if count
            else Fraction(sum(o.num_requests * getattr(o.rates, n) for o in lines), num)
            for n, count in zip(Usage.__struct_fields__, counts, strict=True)
        ]
    return found


def _num(own: Period, model: str | None = None, tier: str | None = None) -> int:
    return sum(one.num_requests for one in own.lines if model in (None, one.model) and tier in (None, one.tier))


@pytest.mark.parametrize(("before", "after"), CASES)
def test_each_part_is_the_shapley_value_rounded_by_less_than_one_per_model(before, after):
    expected, found = naive(before, after), amounts(before, after)
    assert sum(expected.values()) != 0
    for factor in FACTORS:
        assert abs(found[factor] - expected[factor]) < len(before.models | after.models), factor


def test_two_factors_share_what_they_do_together():
    """Twice the requests at three times the output: alone they add 1 and 2, together 2 more, one for each."""
    one = period(line(10, Usage(0, 0, 0, 1_000_000)))
    other = period(line(20, Usage(0, 0, 0, 6_000_000)))
    found = causes.change(one, other)
    assert (found.before, found.after) == (4_000_000, 24_000_000)
    assert {part.cause: part.amount for part in found.parts if part.amount} == {
        "output_length": 12_000_000,
        "volume": 8_000_000,
    }
    assert found.first_cause == "output_length"


def test_a_new_model_is_mix_and_a_first_period_without_requests_is_volume():
    old, new = line(10, Usage(0, 0, 0, 100_000)), line(10, Usage(0, 0, 0, 100_000), DEAR, "new")
    found = amounts(period(old), period(line(5, Usage(0, 0, 0, 50_000)), _half(new)))
    assert {cause for cause, amount in found.items() if amount} == {"model_mix"}
    found = amounts(period(), period(old, new))
    assert {cause for cause, amount in found.items() if amount} == {"volume"}
    found = amounts(period(old, new), period())
    assert {cause for cause, amount in found.items() if amount} == {"volume"}


def _half(one: Line) -> Line:
    usage = Usage(*(getattr(one.usage, name) // 2 for name in Usage.__struct_fields__))
    return line(one.num_requests // 2, usage, one.rates, one.model, one.tier)


def test_a_longer_period_with_the_same_traffic_has_one_cause():
    week, month = period(line(7), seconds=7 * DAY), period(line(28, Usage(2_000, 800, 1_200, 1_600)), seconds=28 * DAY)
    assert {cause for cause, amount in amounts(week, month).items() if amount} == {"period_length"}


def test_a_change_of_list_in_the_middle_is_a_price_between_the_two():
    one = period(line(10, Usage(0, 0, 0, 2_000)))
    other = period(line(5, Usage(0, 0, 0, 1_000)), line(5, Usage(0, 0, 0, 1_000), DEAR))
    found = {cause: amount for cause, amount in amounts(one, other).items() if amount}
    assert found == {"price": 26_000}


def test_what_rates_do_not_say_has_its_own_parts():
    one = period(line(), residency={"m": 5}, corrections=-7)
    other = period(line(more=3), residency={"m": 25, "kept only": 100}, corrections=-57)
    found = causes.change(one, other)
    assert {part.cause: part.amount for part in found.parts if part.amount} == {
        "residency": 120,
        "corrections": -50,
        "rounding": 3,
    }
    assert [one.model for one in found.models] == ["kept only", "m"]
    assert found.after - found.before == 73


def test_sums_without_requests_are_in_no_factor():
    gone = line(0, Usage(), more=0)
    assert amounts(period(gone), period(line())) == amounts(period(), period(line()))
    odd = line(0, Usage(1, 1, 1, 1), more=11)
    found = causes.change(period(), period(odd))
    assert (found.after, found.first_cause) == (odd.charge, "rounding")


def test_a_fall_is_explained_by_what_lowered_it():
    found = causes.change(period(line()), period(line(5, Usage(250, 100, 150, 200)), residency={"m": 500}))
    assert (found.after - found.before, found.first_cause) == (-600, "volume")
    assert (found.parts[0].amount, found.parts[-1]) == (-1_100, causes.Part("residency", 500))


@pytest.mark.parametrize("parts", [["1/2", "1/2"], ["1/3", "1/3", "1/3"], ["-1/2", "1/2"], ["5/2", "-1/2", "0"], ["0"]])
def test_rounding_keeps_the_sum_and_negates_with_its_parts(parts):
    exact = [Fraction(part) for part in parts]
    rounded = causes._rounded(exact)
    assert sum(rounded) == sum(exact)
    assert all(abs(a - b) < 1 for a, b in zip(rounded, exact, strict=True))
    assert causes._rounded([-part for part in exact]) == [-amount for amount in rounded]
