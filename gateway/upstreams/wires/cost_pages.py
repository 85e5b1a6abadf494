"""The cost APIs of providers: the request for a page of days, and the lines of a page. The module is pure.

Amounts are read from their digits, never through a float: the sum of a day's line is exact and is rounded once, to the
micro-unit.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec

from accounting.upstreams.cost_pulls import DayCost
from accounting.values.periods import DAY_S, LAST_SECOND
from gateway.base.upstream_source import Kind, UpstreamCosts
from gateway.upstreams.wires.anthropic import VERSION
from gateway.upstreams.wires.values import MILLION, Garbage, Outgoing, Upstream
from gateway.upstreams.wires.wire import NOT_JSON, objects_of, text_of

PAGE_DAYS = 31
"""The most days of one page, which is what Anthropic allows; OpenAI allows more."""
MAX_AMOUNT = 10**9
"""The most of a currency that one line may have, and all lines of a day together, credits counted as charges: SQLite adds
up in 64 bits."""
MAX_PAGES, MAX_LINES, MAX_CURRENCIES = 64, 50_000, 8
"""The most of one report."""
MAX_DAY_ITEMS = 2_000
"""The most line items of a day, in all currencies together."""
MAX_LINE_ITEM = 256
MAX_PAGE_TOKEN = 2048
_AMOUNT = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,100})?([eE][+-]?[0-9]{1,2})?", re.ASCII)
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)
_DECODER = msgspec.json.Decoder(float_hook=str)
"""Decodes numbers with a point or an exponent as their text."""


@dataclass(frozen=True, slots=True)
class CostLine:
    day: int
    line_item: str
    currency: str
    amount: Fraction
    """An amount of the currency itself."""


@dataclass(frozen=True, slots=True)
class CostPage:
    lines: Sequence[CostLine]
    next_page: str
    """The token of the next page; empty if this is the last one."""
    days: Sequence[int] = ()
    """The days that the page tells of, also those without a line."""


class CostApi(Protocol):
    def request(self, upstream: Upstream, since: int, until: int, page: str) -> Outgoing:
        """Returns the GET of a page of the days from `since` up to and without `until`."""
        ...

    def page(self, data: bytes, costs: UpstreamCosts) -> CostPage:
        """Reads a page. Raises `Garbage`."""
        ...


class OpenAICosts:
    """`GET /organization/costs`: amounts as numbers, or as their text."""

    def request(self, upstream: Upstream, since: int, until: int, page: str) -> Outgoing:
        costs = _costs_of(upstream)
        query = [("start_time", str(since)), ("end_time", str(until)), *_BY_DAY, ("group_by", "line_item")]
        if costs.project:
            query.append(("project_ids", costs.project))
        headers = {"accept": "application/json", "authorization": f"Bearer {upstream.cost_credential}"}
        return Outgoing(_url(upstream, "/organization/costs", query, page), headers, b"")

    def page(self, data: bytes, costs: UpstreamCosts) -> CostPage:
        body, lines, days = _decoded(data), list[CostLine](), list[int]()
        for bucket in objects_of(body.get("data"), "data"):
            days.append(day := _whole_day(bucket.get("start_time"), bucket.get("end_time")))
            for result in objects_of(bucket.get("results"), "results"):
                amount = result.get("amount")
                if not isinstance(amount, dict):
                    raise Garbage("an amount is not an object")
                item = text_of(result.get("line_item"), "line_item")
                lines.append(_line(day, item, amount.get("currency"), amount.get("value")))
        return CostPage(lines, _next_page(body), days)


class AnthropicCosts:
    """`GET /organizations/cost_report`: amounts as texts, in the hundredth part of the currency. It cannot be asked for one
    workspace, so the lines of others are left out here."""

    def request(self, upstream: Upstream, since: int, until: int, page: str) -> Outgoing:
        query = [("starting_at", _rfc3339(since)), ("ending_at", _rfc3339(until)), *_BY_DAY]
        query += [("group_by[]", name) for name in ("workspace_id", "description")]
        version = upstream.source.api_version or VERSION
        headers = {"accept": "application/json", "x-api-key": upstream.cost_credential, "anthropic-version": version}
        return Outgoing(_url(upstream, "/organizations/cost_report", query, page), headers, b"")

    def page(self, data: bytes, costs: UpstreamCosts) -> CostPage:
        body, lines, days = _decoded(data), list[CostLine](), list[int]()
        for bucket in objects_of(body.get("data"), "data"):
            days.append(day := _whole_day(_seconds(bucket.get("starting_at")), _seconds(bucket.get("ending_at"))))
            for result in objects_of(bucket.get("results"), "results"):
                workspace = text_of(result.get("workspace_id"), "workspace_id") or "default"
                if costs.project in ("", workspace):
                    item = text_of(result.get("description"), "description")
                    line = _line(day, item, result.get("currency"), result.get("amount"), unit=100)
                    lines.append(line)
        return CostPage(lines, _next_page(body), days)


_BY_DAY = (("bucket_width", "1d"), ("limit", str(PAGE_DAYS)))
_APIS: dict[Kind, CostApi] = {"openai": OpenAICosts(), "anthropic": AnthropicCosts()}


def api_of(kind: Kind) -> CostApi:
    return _APIS[kind]


class Report:
    """The pages of one reading, put together."""

    def __init__(self) -> None:
        self._lines: list[CostLine] = []
        self._days: set[int] = set()
        self._tokens = {""}

    def add(self, page: CostPage) -> None:
        """Raises `Garbage` for pages that do not come to an end, and for a day that is told twice: its lines would be added
        up as if they were others."""
        self._lines += page.lines
        if len(self._lines) > MAX_LINES:
            raise Garbage("there are too many lines")
        for day in page.days:
            if day in self._days:
                raise Garbage("a day is told twice")
            self._days.add(day)
        if page.next_page:
            if page.next_page in self._tokens or len(self._tokens) >= MAX_PAGES:
                raise Garbage("the pages do not come to an end")
            self._tokens.add(page.next_page)

    def costs(self, since: int, until: int) -> list[DayCost]:
        """Adds up the lines of each day, and rounds each sum once. Raises `Garbage` for a day that was not asked for, and
        for what is too much to be a bill."""
        exact: defaultdict[tuple[int, str, str], Fraction] = defaultdict(Fraction)
        for line in self._lines:
            if not since <= line.day < until:
                raise Garbage("a day that was not asked for")
            exact[line.day, line.line_item, line.currency] += line.amount
        amounts, num_items = defaultdict[int, Fraction](Fraction), Counter(day for day, _, _ in exact)
        for (day, _, _), amount in exact.items():
            amounts[day] += abs(amount)
        if any(amount > MAX_AMOUNT for amount in amounts.values()):
            raise Garbage("the amounts of a day are too large")
        if any(number > MAX_DAY_ITEMS for number in num_items.values()):
            raise Garbage("a day has too many line items")
        if len({currency for _, _, currency in exact}) > MAX_CURRENCIES:
            raise Garbage("there are too many currencies")
        return [DayCost(*key, round(amount * MILLION)) for key, amount in sorted(exact.items())]


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        value = _DECODER.decode(data)
    except NOT_JSON:
        raise Garbage("the page is not JSON") from None
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        raise Garbage("the page has no data")
    return value


def _line(day: int, item: str, currency: Any, value: Any, unit: int = 1) -> CostLine:
    code = text_of(currency, "currency").upper()
    if not _CURRENCY.fullmatch(code):
        raise Garbage("a currency is none")
    return CostLine(day, _harmless(item), code, _amount(value) / unit)


def _amount(value: Any) -> Fraction:
    """Reads an amount from its digits. Raises `Garbage`: also for NaN, infinity and what nobody can owe."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Garbage("an amount is not a number")
    text = str(value) if isinstance(value, str) or abs(value) < 2**64 else ""
    if not _AMOUNT.fullmatch(text):
        raise Garbage("an amount is not a number")
    found = Fraction(text)
    if abs(found) > 100 * MAX_AMOUNT:
        raise Garbage("an amount is too large")
    return found


def _whole_day(start: Any, end: Any) -> int:
    """Returns the first second of a bucket that is one day of UTC. Raises `Garbage`."""
    if isinstance(start, bool) or not isinstance(start, int) or start % DAY_S or not 0 <= start <= LAST_SECOND:
        raise Garbage("a bucket does not begin with a day")
    if end is not None and end != start + DAY_S:
        raise Garbage("a bucket is not one day")
    return start


def _seconds(value: Any) -> int | None:
    if value is None:
        return None
    try:
        found = datetime.fromisoformat(text_of(value, "time"))
        return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise Garbage("a time is none") from None


def _rfc3339(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _next_page(body: dict[str, Any]) -> str:
    token = text_of(body.get("next_page"), "next_page")
    if not isinstance(body.get("has_more", False), bool) or len(token) > MAX_PAGE_TOKEN:
        raise Garbage("the page does not say whether there are more")
    if not body.get("has_more"):
        return ""
    if not token:
        raise Garbage("there are more pages, but no token of the next one")
    return token


def _harmless(item: str) -> str:
    """Returns a line item that every database takes and every screen shows."""
    return "".join(one if one.isprintable() else " " for one in item[:MAX_LINE_ITEM]).strip()


def _costs_of(upstream: Upstream) -> UpstreamCosts:
    assert upstream.source.costs is not None
    return upstream.source.costs


def _url(upstream: Upstream, path: str, query: Sequence[tuple[str, str]], page: str) -> str:
    base = _costs_of(upstream).url or upstream.source.url
    return f"{base}{path}?{urlencode([*query, *([('page', page)] if page else [])])}"
