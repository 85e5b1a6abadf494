"""Sums by the value of a label: what has no value of its own is one sum, in the answer and in the chart."""

from __future__ import annotations

from typing import Any

from accounting.requests.label_usage import LabelSum
from gateway.console import spans
from gateway.console.screens.money import usage_labels
from gateway.schema import label_usage

DAY_S = 86_400


def test_the_sum_beyond_the_bound_of_values_is_none_of_the_largest() -> None:
    counts = {"num_requests": 1, "prompt_tokens": 1, "cached_tokens": 0, "output_tokens": 1, "charge": 9}
    found = [LabelSum(value=value, tenant_id="proj_a", currency="USD", **counts) for value in ("", "maria", "jo")]
    assert label_usage.largest(found) == ["maria", "jo"]


def test_a_bar_has_all_that_a_client_named_like_the_rest() -> None:
    def day(value: str | None, charge: int) -> dict[str, Any]:
        return {"start_time": 0, "value": value, "currency": "USD", "charge_micro_units": charge}

    found = {"data": [{"currency": "USD"}], "days": [day(None, 30), day(usage_labels.BEYOND, 10), day("maria", 60)]}
    bars = usage_labels._bars(found, spans.Span("day", 0, DAY_S))
    assert bars is not None
    assert list(bars.names) == ["maria", usage_labels.BEYOND]
    maria, others = bars.bars[0].parts
    assert maria.height == 1.5 * others.height
