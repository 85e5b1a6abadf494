"""Spans of time in addresses, and sums of usage for charts."""

from __future__ import annotations

import pytest

from gateway.console import spans
from gateway.console.spans import Span, span_of
from gateway.console.usage_sums import Item, Table, item_of

DAY = 86_400
NOW = 1_795_462_463  # 2026-11-23T19:34:23Z
TODAY = NOW - NOW % DAY


def test_without_a_start_a_span_ends_with_the_bucket_of_now():
    assert span_of("", "", "", NOW) == Span("day", TODAY - 29 * DAY, TODAY + DAY)
    assert len(span_of("hour", "", "", NOW).starts) == 24
    assert span_of("minute", "", "", NOW).end == NOW - NOW % 60 + 60


def test_a_click_on_a_day_is_its_24_hours():
    start = spans.written(TODAY)
    assert span_of("hour", start, spans.written(TODAY + DAY), NOW) == Span("hour", TODAY, TODAY + DAY)
    assert len(span_of("hour", "2026-11-20", "", NOW).starts) == 24


def test_whole_buckets_are_shown():
    assert span_of("hour", "2026-11-20T10:30", "2026-11-20T11:10", NOW) == span_of(
        "hour", "2026-11-20T10:00", "2026-11-20T12:00", NOW
    )


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("x", ""),
        ("2026-13-01", ""),
        ("2026-11-20", "2026-11-19"),
        ("2026-01-01", "2026-11-01"),
        ("9999-01-01", ""),
        ("1969-01-01", ""),
        ("2026-11-20T10:00;", ""),
        ("٢٠٢٦-11-20", ""),
    ],
)
def test_a_time_that_cannot_be_is_refused_with_a_sentence(start, end):
    with pytest.raises(ValueError, match=r"\.$"):
        span_of("day", start, end, NOW)


def test_a_start_in_the_future_is_an_empty_bucket_and_no_error():
    assert len(span_of("day", "2030-01-01", "", NOW).starts) == 1


def test_line_items_are_read_from_the_right():
    assert item_of("a, b, cache_read, batch") == Item("a, b", "cached", "batch")
    assert item_of("m, output") == Item("m", "output", "default")
    assert item_of("m, residency_pinned") == Item("m", "kept KV", "default")


def bucket(start: int, *results: dict) -> dict:
    return {"start_time": start, "results": list(results)}


def used(model: str, output: int, currency: str = "usd") -> dict:
    counts = {"input_cached_tokens": 1, "input_cache_write_tokens": 2, "input_uncached_tokens": 3}
    return {"model": model, "currency": currency, "output_tokens": output, "num_model_requests": 1, **counts}


def cost(item: str, value: float, currency: str = "usd") -> dict:
    return {"line_item": item, "amount": {"value": value, "currency": currency}}


def test_amounts_of_the_api_are_whole_micro_units():
    sums = Table("")
    values = (0.000001, 0.1, 1_234_567.000003, 2_345.678901)
    sums.add_costs([bucket(0, *(cost("m, output", value) for value in values))], lambda item: True)
    assert sums.by("group")[""].amount("USD") == 1 + 100_000 + 1_234_567_000_003 + 2_345_678_901


def test_requests_and_tokens_stand_with_the_currency_of_their_charges_and_add_up():
    sums = Table("model")
    sums.add_costs([bucket(0, cost("m, output", 3.0, "jpy"), cost("m, output", 2.0))], lambda item: True)
    sums.add_usage([bucket(0, used("m", 5), used("m", 7, "jpy"), used("free", 1, "eur")), bucket(60, used("m", 11))])
    shown = {row["currency"]: (row["requests"], row["output"], row["cost"]) for row in sums.total.rows}
    assert shown == {"EUR": (1, 1, None), "JPY": (1, 7, 3_000_000), "USD": (2, 16, 2_000_000)}
    assert [(row["currency"], row["output"]) for row in sums.by("time")[60].rows] == [("USD", 11)]
    assert (sums.total.counts["requests"], sums.total.counts["output"]) == (4, 24)
    assert [row["currency"] for row in Table("").total.rows] == [""], "an empty page has one row of zeros"


def test_the_largest_groups_have_parts_of_their_own_and_the_rest_is_one():
    sums = Table("model")
    sums.add_usage([bucket(0, *(used(f"m{n}", 10 * n) for n in range(7))), bucket(60, used("m6", 5))])
    names, bars = sums.parts([0, 60, 120], "tokens", "USD")
    assert names == ["m6", "m5", "m4", "m3", "other"]
    assert bars[0]["other"] == sum(10 * n + 6 for n in range(3))
    assert bars[1] == {"m6": 11}
    assert bars[2] == {}


def test_without_a_group_bars_are_divided_by_class():
    sums = Table("")
    sums.add_usage([bucket(0, used("m", 4))])
    sums.add_costs([bucket(0, cost("m, output", 2.0), cost("m, residency_cache", 1.0))], lambda item: True)
    names, [bar] = sums.parts([0], "tokens", "USD")
    assert (list(names), bar["written"]) == (["cached", "written", "uncached", "output"], 2)
    names, [bar] = sums.parts([0], "cost", "USD")
    assert (names[-1], bar["output"], bar["kept KV"]) == ("kept KV", 2_000_000, 1_000_000)


def test_costs_are_grouped_and_filtered_by_their_line_items():
    sums = Table("model")
    items = [cost("a, output", 1.0), cost("a, output, batch", 2.0), cost("b, output", 4.0)]
    sums.add_costs([bucket(0, *items)], lambda item: item.tier == "default")
    assert {name: one.amount("USD") for name, one in sums.by("group").items()} == {"a": 1_000_000, "b": 4_000_000}
