"""Money laws over every usage and rate in range."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.prices import pricing
from accounting.values.budget_types import MAX_AMOUNT
from accounting.values.errors import InvalidError
from accounting.values.types import TOKEN_CLASSES, Rates, Usage

counts = st.integers(0, 2_000_000)
rates = st.builds(Rates, *(st.integers(0, 10**9) for _ in TOKEN_CLASSES))
usages = st.builds(Usage, *(counts for _ in TOKEN_CLASSES))


def exact(usage: Usage, rate: Rates) -> dict[str, Fraction]:
    return {n: Fraction(getattr(usage, n) * getattr(rate, n), 1_000_000) for n in TOKEN_CLASSES}


@given(usages, rates)
def test_class_amounts_add_up_to_the_total_and_each_is_within_one_unit_of_exact(usage, rate):
    charge = pricing.charge(usage, rate)
    wanted = exact(usage, rate)
    assert charge.total == round(sum(wanted.values(), Fraction()))  # Fraction rounds half to even
    assert sum(getattr(charge, name) for name in TOKEN_CLASSES) == charge.total
    for name, amount in wanted.items():
        assert abs(getattr(charge, name) - amount) < 1


@given(usages, rates, st.data())
def test_a_charge_never_exceeds_its_reservation_however_output_is_leased(usage, rate, data):
    """The prompt may turn out cached or not; the output is leased in pieces, of which the last is not used up."""
    leases, left = [], usage.output
    while left > 0:
        size = data.draw(st.integers(1, max(1, usage.output)))
        leases.append(size)
        left -= size
        if len(leases) == 4:
            leases.append(max(left, 0))
            break
    reserved = pricing.prompt_reservation(usage.prompt, rate) + sum(pricing.lease_cost(n, rate) for n in leases)
    assert pricing.charge(usage, rate).total <= reserved


@given(usages, usages, rates)
def test_more_tokens_never_cost_less(usage, more, rate):
    both = Usage(*(getattr(usage, n) + getattr(more, n) for n in TOKEN_CLASSES))
    assert pricing.charge(both, rate).total >= pricing.charge(usage, rate).total


@given(st.builds(Usage, *(st.integers(0, MAX_AMOUNT) for _ in TOKEN_CLASSES)), rates)
def test_a_sum_of_requests_has_the_price_of_one_and_no_bound(usage, rate):
    made = pricing.sum_charge(usage, rate)
    assert made.total == round(sum(exact(usage, rate).values(), Fraction()))
    if made.total <= MAX_AMOUNT:
        assert pricing.charge(usage, rate) == made
    else:
        with pytest.raises(InvalidError, match="must not exceed"):
            pricing.charge(usage, rate)
