from __future__ import annotations

import pytest

from accounting.prices import pricing
from accounting.values.errors import InvalidError
from accounting.values.types import Charge, Rates, Usage


@pytest.mark.parametrize(
    ("micro_micro", "rounded"),
    [(0, 0), (499_999, 0), (500_000, 0), (500_001, 1), (1_500_000, 2), (2_500_000, 2), (2_500_001, 3)],
)
def test_the_one_rounding_is_half_to_even(micro_micro, rounded):
    charge = pricing.charge(Usage(output=1), Rates(0, 0, 0, micro_micro))
    assert charge == Charge(rounded, 0, 0, 0, rounded)


def test_classes_are_split_by_largest_remainder():
    # exact: 0.4 + 0.4 + 0.4 + 0.8 = 2.0 micro-units
    charge = pricing.charge(Usage(1, 1, 1, 1), Rates(400_000, 400_000, 400_000, 800_000))
    assert charge == Charge(2, 1, 0, 0, 1)


def test_whole_amounts_are_charged_exactly():
    charge = pricing.charge(Usage(1_000_000, 2_000_000, 0, 3_000_000), Rates(1, 10, 100, 1000))
    assert charge == Charge(3021, 1, 20, 0, 3000)


def test_a_prompt_is_reserved_at_its_highest_rate_and_a_lease_rounded_up():
    rates = Rates(cache_read=1, cache_write=3, uncached=2, output=5)
    assert pricing.prompt_reservation(1, rates) == 1
    assert pricing.prompt_reservation(1_000_000, rates) == 3
    assert pricing.lease_cost(200_001, rates) == 2
    assert pricing.lease_cost(0, rates) == pricing.prompt_reservation(0, rates) == 0


@pytest.mark.parametrize(
    ("usage", "rates"),
    [
        (Usage(output=-1), Rates(0, 0, 0, 1)),
        (Usage(output=1), Rates(0, 0, 0, -1)),
        (Usage(output=1), Rates(0, 0, 0, 10**12 + 1)),
        (Usage(output=2**53), Rates(0, 0, 0, 0)),
        (Usage(output=2**53 - 1), Rates(0, 0, 0, 10**12)),
    ],
)
def test_what_is_out_of_range_is_refused(usage, rates):
    with pytest.raises(InvalidError):
        pricing.charge(usage, rates)
