"""Pages of cost APIs: exact amounts, whole days, and what is no page."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from accounting.upstreams.cost_pulls import DayCost
from gateway.base.upstream_source import UpstreamCosts, UpstreamSource
from gateway.upstreams.wires import cost_pages
from gateway.upstreams.wires.cost_pages import AnthropicCosts, CostPage, OpenAICosts, Report
from gateway.upstreams.wires.values import Garbage, Upstream

DAY = 1_790_812_800
"""The first of October 2026."""
NEXT = DAY + 86_400
ALL = UpstreamCosts()


def result(value: str, currency: str = "usd", item: str = '"input"') -> str:
    return f'{{"amount": {{"value": {value}, "currency": "{currency}"}}, "line_item": {item}}}'


def openai_of(*results: str, start: Any = DAY, more: str = "") -> CostPage:
    body = f'{{"data": [{{"start_time": {start}, "end_time": null, "results": [{", ".join(results)}]}}]{more}}}'
    return OpenAICosts().page(body.encode(), ALL)


def openai(value: str, currency: str = "usd", item: str = '"input"', start: Any = DAY, more: str = "") -> CostPage:
    return openai_of(result(value, currency, item), start=start, more=more)


def anthropic(*results: dict[str, Any], costs: UpstreamCosts = ALL) -> CostPage:
    bucket = {"starting_at": "2026-10-01T00:00:00Z", "ending_at": "2026-10-02T00:00:00Z", "results": list(results)}
    return AnthropicCosts().page(json.dumps({"data": [bucket], "has_more": False}).encode(), costs)


def costs(*pages: CostPage) -> list[DayCost]:
    report = Report()
    for page in pages:
        report.add(page)
    return report.costs(DAY, NEXT)


@pytest.mark.parametrize(
    ("value", "micro_units"),
    [
        ("0.06", 60_000),
        ('"12.50"', 12_500_000),
        ("3", 3_000_000),
        ("1e-6", 1),
        ('"1E2"', 100_000_000),
        ("0.1000000000000000055511151231257827", 100_000),
        ("0.0000005", 0),  # half a micro-unit goes to the even one
        ("0.0000015", 2),
        ("0.00000050000000000000000000000001", 1),
        ("-0.25", -250_000),
        ("0", 0),
        ("999999999.999999", 999_999_999_999_999),
    ],
)
def test_an_amount_is_read_from_its_digits_and_rounded_once(value: str, micro_units: int) -> None:
    assert costs(openai(value)) == [DayCost(DAY, "input", "USD", micro_units)]


def test_the_lines_of_an_item_are_added_before_they_are_rounded() -> None:
    assert costs(openai_of(*[result("0.0000004")] * 5)) == [DayCost(DAY, "input", "USD", 2)]


@pytest.mark.parametrize(
    "value",
    [
        *("1e999", '"1e999"', "-1e999", '"NaN"', '"Infinity"', "NaN", '"1_000"', '" 1"', '"١"', '""', "null", "true"),
        *('"0x10"', '{"a": 1}', "[1]", "1e10", "-1e10", "9" * 400, f'"{"9" * 400}"', f"0.{'1' * 400}", '"1/3"'),
    ],
)
def test_an_amount_that_nobody_can_owe_is_refused(value: str) -> None:
    with pytest.raises(Garbage):
        costs(openai(value))


@pytest.mark.parametrize("second", [result("900000000"), result("-900000000", item='"b"'), result("9e8", "eur", '"b"')])
def test_amounts_that_are_too_large_together_are_refused(second: str) -> None:
    """SQLite adds up in 64 bits: ten thousand lines of a billion could not be read again, and lines are never deleted."""
    with pytest.raises(Garbage, match="too large"):
        costs(openai_of(result("900000000"), second))


def test_a_day_that_is_told_twice_is_refused_and_not_added_up() -> None:
    with pytest.raises(Garbage, match="told twice"):
        costs(openai("1"), openai("1", item='"output"'))
    with pytest.raises(Garbage, match="told twice"):
        costs(*[openai_of()] * 2)
    bucket = '{"start_time": 1790812800, "results": []}'
    with pytest.raises(Garbage, match="told twice"):
        costs(OpenAICosts().page(f'{{"data": [{bucket}, {bucket}]}}'.encode(), ALL))


def test_a_report_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [result("1", f"aa{letter}") for letter in "abcdefghi"]
    assert len(costs(openai_of(*many[:8]))) == 8
    with pytest.raises(Garbage, match="too many currencies"):
        costs(openai_of(*many))
    monkeypatch.setattr(cost_pages, "MAX_LINES", 8)
    assert len(costs(openai_of(*many[:8]))) == 8
    with pytest.raises(Garbage, match="too many lines"):
        costs(openai_of(*many[:8], result("1")))
    monkeypatch.setattr(cost_pages, "MAX_DAY_ITEMS", 7)
    assert len(costs(openai_of(*many[:7], many[0]))) == 7
    with pytest.raises(Garbage, match="too many line items"):
        costs(openai_of(*many[:8]))


@pytest.mark.parametrize("token", [lambda number: "p1", lambda number: f"p{number}"], ids=["circle", "endless"])
def test_pages_come_to_an_end(token: Callable[[int], str]) -> None:
    with pytest.raises(Garbage, match="do not come to an end"):
        costs(*(CostPage((), token(number)) for number in range(cost_pages.MAX_PAGES)))


@pytest.mark.parametrize("currency", ["", "dollars", "US$", "u1d"])
def test_what_is_no_currency_is_refused(currency: str) -> None:
    with pytest.raises(Garbage, match="currency"):
        openai("1", currency)


@pytest.mark.parametrize("start", ["1", "null", '"2026-10-01"', "true", "-86400", "1e3", str(2**60 * 86_400)])
def test_a_bucket_begins_with_a_day(start: str) -> None:
    with pytest.raises(Garbage):
        openai("1", start=start)


def test_a_day_that_was_not_asked_for_and_a_bucket_of_a_week_are_refused() -> None:
    with pytest.raises(Garbage, match="not asked for"):
        costs(openai("1", start=NEXT))
    week = {"start_time": DAY, "end_time": DAY + 7 * 86_400, "results": []}
    with pytest.raises(Garbage, match="not one day"):
        OpenAICosts().page(json.dumps({"data": [week]}).encode(), ALL)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"{}", b'{"data": {}}', b'{"data": [1]}', b"\xff", b"[" * 100_000),
        b'{"data": [{"start_time": 1790812800, "results": {}}]}',
        b'{"data": [{"start_time": 1790812800, "results": [{"amount": 1}]}]}',
        *(b'{"data": [], "has_more": true}', b'{"data": [], "has_more": true, "next_page": 7}'),
        *(b'{"data": [], "has_more": 1}', b'{"data": [], "next_page": "' + b"x" * 5000 + b'"}'),
    ],
)
@pytest.mark.parametrize("api", [OpenAICosts(), AnthropicCosts()])
def test_what_is_no_page_is_garbage(api: Any, body: bytes) -> None:
    if b"start_time" in body and isinstance(api, AnthropicCosts):
        body = body.replace(b'"start_time": 1790812800', b'"starting_at": "2026-10-01T00:00:00Z"')
    with pytest.raises(Garbage):
        api.page(body, ALL)


def test_a_page_names_the_next_one() -> None:
    assert openai("1").next_page == ""
    assert openai("1", more=', "has_more": false, "next_page": "p2"').next_page == ""
    assert openai("1", more=', "has_more": true, "next_page": "p2"').next_page == "p2"


def test_a_line_item_is_made_harmless() -> None:
    [line] = openai("1", item='"\\u0000a\\n\\u202eb' + "c" * 400 + '"').lines
    assert line.line_item.startswith("a  b")
    assert (len(line.line_item) <= 256, line.line_item.isprintable()) == (True, True)
    assert openai("1", item="null").lines[0].line_item == ""


def test_anthropic_tells_hundredths_and_workspaces_are_told_apart_here() -> None:
    ours = {"amount": "123.78912", "currency": "USD", "description": "Input", "workspace_id": "wrkspc_1"}
    others = [ours | {"workspace_id": None, "amount": "100"}, ours | {"workspace_id": "wrkspc_2", "amount": "1"}]
    assert costs(anthropic(ours)) == [DayCost(DAY, "Input", "USD", 1_237_891)]
    every = costs(anthropic(ours, *others))
    assert every == [DayCost(DAY, "Input", "USD", 2_247_891)]
    assert costs(anthropic(ours, *others, costs=UpstreamCosts(project="wrkspc_2")))[0].amount == 10_000
    assert costs(anthropic(ours, *others, costs=UpstreamCosts(project="default")))[0].amount == 1_000_000


def test_the_requests_name_days_pages_and_the_key_in_no_url() -> None:
    source = {"url": "https://api.example.com/v1", "models": {"m": {}}, "costs": {"project": "proj_1"}}
    upstream = Upstream("u", UpstreamSource.model_validate(source), "key", cost_credential="admin")
    asked = OpenAICosts().request(upstream, DAY, NEXT, "p=2&x")
    assert asked.url == (
        "https://api.example.com/v1/organization/costs?start_time=1790812800&end_time=1790899200&bucket_width=1d"
        "&limit=31&group_by=line_item&project_ids=proj_1&page=p%3D2%26x"
    )
    assert asked.headers["authorization"] == "Bearer admin"
    asked = AnthropicCosts().request(upstream, DAY, NEXT, "")
    assert asked.url == (
        "https://api.example.com/v1/organizations/cost_report?starting_at=2026-10-01T00%3A00%3A00Z"
        "&ending_at=2026-10-02T00%3A00%3A00Z&bucket_width=1d&limit=31&group_by%5B%5D=workspace_id&group_by%5B%5D=description"
    )
    assert (asked.headers["x-api-key"], asked.headers["anthropic-version"]) == ("admin", "2023-06-01")
    assert "admin" not in asked.url + repr(asked) + repr(upstream)
