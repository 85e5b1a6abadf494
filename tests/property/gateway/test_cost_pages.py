"""Whatever the cost API of a provider sends is a page, or it is garbage: no other error ends the reading."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from gateway.base.upstream_source import UpstreamCosts, UpstreamSource
from gateway.upstreams.wires.cost_pages import MAX_AMOUNT, AnthropicCosts, OpenAICosts, Report
from gateway.upstreams.wires.values import MILLION, Garbage, Upstream

DAY, NEXT = 1_790_812_800, 1_790_899_200
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
AMOUNT = st.fixed_dictionaries({}, optional={"value": JUNK | st.decimals().map(str), "currency": JUNK | st.just("usd")})
LINE = st.fixed_dictionaries(
    {"amount": AMOUNT | st.decimals().map(str) | JUNK},
    optional=dict.fromkeys(("line_item", "description", "workspace_id"), JUNK) | {"currency": JUNK | st.just("USD")},
)
TIME = st.sampled_from([DAY, NEXT, "2026-10-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31"]) | JUNK
BUCKET = st.fixed_dictionaries(
    {"results": st.lists(LINE, max_size=3) | JUNK},
    optional=dict.fromkeys(("start_time", "end_time", "starting_at", "ending_at"), TIME),
)
PAGE = st.fixed_dictionaries(
    {"data": st.lists(BUCKET, max_size=3) | JUNK},
    optional={"has_more": st.booleans() | JUNK, "next_page": st.text(st.characters(), max_size=8) | JUNK},
)
SOURCE = {"url": "https://api.example.com/v1", "models": {"m": {}}, "costs": {}}
ASKING = Upstream("u", UpstreamSource.model_validate(SOURCE), "key", cost_credential="admin")


@pytest.mark.parametrize("api", [OpenAICosts(), AnthropicCosts()])
@pytest.mark.parametrize("num_pages", [80, pytest.param(400, marks=pytest.mark.slow)])
def test_whatever_a_provider_sends_is_a_page_or_garbage(api: Any, num_pages: int) -> None:
    @hypothesis.settings(max_examples=num_pages, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(page=PAGE | JUNK)
    def check(page: Any) -> None:
        read(api, page)

    check()


def read(api: Any, page: Any) -> None:
    report = Report()
    try:
        found = api.page(json.dumps(page).encode(), UpstreamCosts())
        report.add(found)
        for cost in report.costs(DAY, NEXT):
            assert (cost.day, cost.line_item.isprintable(), len(cost.currency)) == (DAY, True, 3)
            assert abs(cost.amount) <= MAX_AMOUNT * MILLION
        assert api.request(ASKING, DAY, NEXT, found.next_page).url.isascii()
    except Garbage:
        pass
