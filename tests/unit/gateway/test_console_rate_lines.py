"""Rates as lines of text: what is written is read back, and what cannot be read is named by its line."""

from __future__ import annotations

import pytest

from gateway.console import rate_lines

ONE = {"model": 'a, "b"', "tier": "batch", "cache_read": 250_000, "cache_write": 0, "uncached": 1, "output": 10**12}


def test_what_is_written_is_read_back():
    rates = [ONE, {**ONE, "model": "m", "tier": "interactive"}]
    assert rate_lines.read_rates(rate_lines.rates_text(rates)) == rates
    kept = [{"model": "m", "cache": 5, "pinned": 1_500_000}]
    assert rate_lines.read_residency(rate_lines.residency_text(kept)) == kept
    assert rate_lines.rates_text([{**ONE, "model": "m"}]) == "m,batch,0.25,0.00,0.000001,1000000.00\n"


def test_spaces_and_empty_lines_are_allowed():
    assert rate_lines.read_rates("\n m , batch, 1, 2.5 ,0, 0 \r\n\n")[0]["cache_write"] == 2_500_000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("m,batch,1,2,3", "Line 1 has 5 values"),
        ("m,batch,1,2,3,4\nm,batch,1,2,3,x", "Line 2: 'x' is not an amount"),
        ("m,batch,1,2,3,-4", "Line 1: a rate must not be below 0"),
        ("m,batch,1,2,3,0.0000001", "more than 6 decimals"),
        ('"m,batch,1,2,3,4', "Line 1 cannot be read"),
        ("m,batch,1,2,3,2000", "may mean two things"),
        ("\n" * 2_001, "at most 2000 lines"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        rate_lines.read_rates(text)


def test_changes_name_each_rate_that_differs():
    before = [{**ONE, "model": "m"}, {**ONE, "model": "gone"}]
    after = [{**ONE, "model": "m", "output": 2 * 10**12, "cache_write": 7}]
    found = {
        (one["model"], one["token_class"]): (one["before"], one["after"], one["change"])
        for one in rate_lines.changes(before, after)
    }
    assert found.pop(("m", "output")) == (10**12, 2 * 10**12, 1.0)
    assert found.pop(("m", "cache_write")) == (0, 7, None)
    assert found.pop(("gone", "output")) == (10**12, None, None)
    assert {model for model, _ in found} == {"gone"}
