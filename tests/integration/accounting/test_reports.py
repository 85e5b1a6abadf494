from __future__ import annotations

import msgspec
import pytest
from money import NOON_MS, RATES, posting

from accounting.billing import report_pages, reports
from accounting.billing.reports import ReportQuery
from accounting.prices import pricing
from accounting.requests import request_postings
from accounting.values.errors import InvalidError
from accounting.values.types import OPERATOR_TENANT, Usage

NOON = NOON_MS // 1000
DAY, HOUR = 86_400, 3_600
MIDNIGHT = NOON - 12 * HOUR


@pytest.fixture
async def posted(conn):
    """Requests around noon: two tenants, two models, both tiers, one of them on the next day."""
    starts = {
        "req_1": (0, {}),
        "req_2": (59, {"model": "n"}),
        "req_3": (60, {"tenant_id": "proj_b", "key_id": "key_b"}),
        "req_4": (HOUR, {"tier": "batch"}),
        "req_5": (DAY, {}),
        "req_6": (-30, {}),
    }
    await request_postings.post(
        conn,
        0,
        1,
        [
            posting(name, Usage(10, 20, 30, 40), opened_at_ms=NOON_MS + second * 1000, **changes)
            for name, (second, changes) in starts.items()
        ],
    )
    return conn


def totals(report) -> list[tuple[int, int]]:
    """(start, requests) of each bucket, relative to noon."""
    return [(b.start_time - NOON, sum(r.num_requests for r in b.results)) for b in report.buckets]


async def usage(conn, start: int, end: int | None = None, now: int = NOON + 2 * DAY, **options):
    return await reports.usage(conn, ReportQuery(start_time=start, end_time=end, **options), now)


async def test_days_are_aligned_to_utc_and_empty_ones_are_sent(posted):
    report = await usage(posted, MIDNIGHT - DAY, MIDNIGHT + 3 * DAY)
    assert totals(report) == [(-36 * HOUR, 0), (-12 * HOUR, 5), (12 * HOUR, 1), (36 * HOUR, 0)]
    assert report.next_page is None
    whole = report.buckets[1].results[0]
    assert (whole.usage, whole.num_requests) == (Usage(50, 100, 150, 200), 5)
    assert (whole.tenant_id, whole.key_id, whole.model, whole.batch, whole.service_tier) == (None,) * 5


async def test_the_first_bucket_begins_before_the_range_but_counts_from_its_minute(posted):
    report = await usage(posted, NOON + 59, NOON + DAY, width="1d")
    assert totals(report) == [(-12 * HOUR, 4), (12 * HOUR, 0)]
    assert report.buckets[0].start_time == MIDNIGHT
    later = await usage(posted, NOON + 60, NOON + HOUR, width="1h")
    assert totals(later) == [(0, 1)]


async def test_the_last_bucket_counts_up_to_the_end_which_is_excluded(posted):
    report = await usage(posted, MIDNIGHT, NOON + 60, width="1h")
    assert totals(report)[-2:] == [(-HOUR, 1), (0, 2)]
    assert totals(await usage(posted, MIDNIGHT, NOON + HOUR, width="1h", limit=50))[-1] == (0, 3)


async def test_without_an_end_the_running_minute_is_in(posted):
    report = await usage(posted, NOON - 60, now=NOON + 61, width="1m")
    assert totals(report) == [(-60, 1), (0, 2), (60, 1)]


async def test_without_an_end_the_very_second_is_in_even_if_it_begins_a_minute(posted):
    assert totals(await usage(posted, NOON, now=NOON, width="1m")) == [(0, 2)]
    assert totals(await usage(posted, NOON, now=NOON, width="1d")) == [(-12 * HOUR, 2)]


async def test_every_width_adds_up_to_the_same_tokens(posted):
    sums = []
    for width, limit in (("1m", 1440), ("1h", 48), ("1d", 2)):
        report = await usage(posted, NOON - DAY // 2, NOON + DAY // 2, width=width, limit=limit)
        assert report.next_page is None
        sums.append(sum(r.usage.total for b in report.buckets for r in b.results))
    assert sums == [500, 500, 500]


async def test_pages_follow_each_other_without_gap_or_overlap(posted):
    query = {"start": NOON - 90, "end": NOON + HOUR + 60, "width": "1m", "limit": 7}
    whole = await usage(posted, **{**query, "limit": 1440})
    pieces, page, rounds = [], None, 0
    while True:
        # `now` moves on between the pages; the range does not.
        report = await usage(posted, **query, page=page, now=NOON + 2 * DAY + rounds)
        pieces += totals(report)
        page, rounds = report.next_page, rounds + 1
        if page is None:
            break
    assert pieces == totals(whole)
    assert rounds == 9


async def test_a_page_keeps_the_end_that_was_now_when_the_first_was_read(posted):
    first = await usage(posted, NOON - HOUR, width="1h", limit=1, now=NOON + 30)
    second = await usage(posted, NOON - HOUR, width="1h", limit=1, now=NOON + 9 * HOUR, page=first.next_page)
    assert totals(second) == [(0, 2)]
    assert second.next_page is None


@pytest.mark.parametrize("first", [0, 2**63])
async def test_a_page_that_a_client_made_itself_is_refused_outside_of_its_range(posted, first):
    """The checksum over a query is no secret."""
    query = ReportQuery(start_time=NOON - HOUR, end_time=NOON + HOUR, width="1h")
    page = report_pages.write(reports._fingerprint(query), NOON + HOUR, first)
    with pytest.raises(InvalidError, match="page is not one"):
        await usage(posted, NOON - HOUR, NOON + HOUR, width="1h", page=page)


async def test_a_page_of_another_query_or_altered_is_refused(posted):
    page = (await usage(posted, MIDNIGHT, NOON + DAY, limit=1)).next_page
    flipped = ("A" if page[5] != "A" else "B").join((page[:5], page[6:]))
    for wrong, options in (
        (page, {"tenant_ids": ("proj_b",)}),
        (page, {"group_by": ("model",)}),
        (flipped, {}),
        ("", {}),
        ("é", {}),
    ):
        with pytest.raises(InvalidError) as refused:
            await usage(posted, MIDNIGHT, NOON + DAY, limit=1, page=wrong, **options)
        assert refused.value.param == "page"


@pytest.mark.parametrize(
    ("group", "field", "expected"),
    [
        ("project_id", "tenant_id", {"proj_a": 4, "proj_b": 1}),
        ("api_key_id", "key_id", {"key_a": 4, "key_b": 1}),
        ("model", "model", {"m": 4, "n": 1}),
        ("batch", "batch", {True: 1, False: 4}),
        ("service_tier", "service_tier", {"batch": 1, "interactive": 4}),
    ],
)
async def test_groups_split_a_bucket(posted, group, field, expected):
    report = await usage(posted, MIDNIGHT, MIDNIGHT + DAY, group_by=(group,))
    assert {getattr(r, field): r.num_requests for r in report.buckets[0].results} == expected


async def test_groups_combine(posted):
    report = await usage(posted, MIDNIGHT, MIDNIGHT + DAY, group_by=("project_id", "model", "batch", "service_tier"))
    found = {(r.tenant_id, r.model, r.batch, r.service_tier): r.num_requests for r in report.buckets[0].results}
    assert found == {
        ("proj_a", "m", False, "interactive"): 2,
        ("proj_a", "m", True, "batch"): 1,
        ("proj_a", "n", False, "interactive"): 1,
        ("proj_b", "m", False, "interactive"): 1,
    }


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"tenant_ids": ("proj_b",)}, 1),
        ({"tenant_ids": ()}, 0),
        ({"key_ids": ("key_a",)}, 4),
        ({"models": ("n", "x")}, 1),
        ({"batch": True}, 1),
        ({"batch": False}, 4),
        ({"tenant_ids": ("proj_a",), "models": ("m",), "batch": False}, 2),
    ],
)
async def test_filters_leave_the_rest_out(posted, filters, expected):
    report = await usage(posted, MIDNIGHT, MIDNIGHT + DAY, **filters)
    assert totals(report) == [(-12 * HOUR, expected)]


async def costs(conn, start: int, end: int, **options):
    return await reports.costs(conn, ReportQuery(start_time=start, end_time=end, **options), NOON + 9 * DAY)


ONE = pricing.charge(Usage(10, 20, 30, 40), RATES)


async def test_costs_are_the_sum_of_the_rounded_charges(posted):
    report = await costs(posted, MIDNIGHT, MIDNIGHT + 2 * DAY)
    assert [[r.amount for r in b.results] for b in report.buckets] == [[5 * ONE.total], [ONE.total]]
    (result,) = report.buckets[0].results
    assert (result.currency, result.line_item, result.quantity) == ("USD", None, None)


async def test_line_items_split_model_class_and_tier_and_add_up(posted):
    report = await costs(posted, MIDNIGHT, MIDNIGHT + DAY, group_by=("line_item",))
    items = {r.line_item: (r.amount, r.quantity) for r in report.buckets[0].results}
    assert items["m, output"] == (3 * ONE.output, 120)
    assert items["m, cache_read, batch"] == (ONE.cache_read, 10)
    assert items["n, uncached"] == (ONE.uncached, 30)
    assert len(items) == 12
    assert sum(amount for amount, _ in items.values()) == 5 * ONE.total


async def test_line_items_filter_with_and_without_grouping(posted):
    wanted = ("m, output", "m, output, batch")
    grouped = await costs(posted, MIDNIGHT, MIDNIGHT + DAY, group_by=("line_item",), line_items=wanted)
    assert [r.line_item for r in grouped.buckets[0].results] == list(wanted)[::-1]
    merged = await costs(posted, MIDNIGHT, MIDNIGHT + DAY, line_items=wanted)
    assert [(r.amount, r.line_item) for r in merged.buckets[0].results] == [(4 * ONE.output, None)]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"width": "1h", "limit": 169}, "limit"),
        ({"limit": 181}, "limit"),
        ({"limit": 0}, "limit"),
        ({"group_by": ("model",)}, "group_by"),
        ({"start": 5, "end": 5}, "start_time"),
        ({"start": -1}, "start_time"),
        ({"end": 2**62}, "start_time"),
    ],
)
async def test_what_cannot_be_reported_is_refused(conn, options, param):
    asked = {"start": MIDNIGHT, "end": NOON, **options}
    with pytest.raises(InvalidError) as refused:
        await costs(conn, **asked)
    assert refused.value.param == param


@pytest.mark.parametrize(("width", "default", "most"), [("1m", 60, 1440), ("1h", 24, 168), ("1d", 7, 31)])
async def test_pages_have_the_documented_sizes(conn, width, default, most):
    report = await usage(conn, 0, NOON, width=width)
    assert len(report.buckets) == default
    assert len((await usage(conn, 0, NOON, width=width, limit=most)).buckets) == most
    with pytest.raises(InvalidError):
        await usage(conn, 0, NOON, width=width, limit=most + 1)


async def every_page(report, conn, **options) -> tuple[list[tuple[int, list]], int]:
    """The buckets of all pages, as (start, results), and the number of pages."""
    buckets, page, number = [], None, 0
    while number == 0 or page is not None:
        query = ReportQuery(start_time=MIDNIGHT, end_time=NOON + 2 * DAY, page=page, **options)
        found = await report(conn, query, NOON + 9 * DAY)
        buckets += [(bucket.start_time, list(bucket.results)) for bucket in found.buckets]
        page, number = found.next_page, number + 1
    return buckets, number


@pytest.mark.parametrize(
    ("report", "group", "most"),
    [
        (reports.usage, ("project_id", "model"), 2),
        (reports.costs, ("project_id", "api_key_id"), 1),
        (reports.costs, ("project_id", "line_item"), 8),
    ],
)
async def test_a_page_ends_before_the_bucket_that_has_no_room_in_it(posted, monkeypatch, report, group, most):
    asked = {"group_by": group, "width": "1m", "limit": 1440}
    whole, num_whole_pages = await every_page(report, posted, **asked)
    monkeypatch.setattr(reports, "MAX_RESULTS", most, raising=False)
    pieces, num_pages = await every_page(report, posted, **asked)
    assert pieces == whole
    assert num_pages > num_whole_pages
    query = ReportQuery(start_time=MIDNIGHT, end_time=NOON + 2 * DAY, **asked)
    first = await report(posted, query, NOON + 9 * DAY)
    assert 0 < sum(len(bucket.results) for bucket in first.buckets) <= most


@pytest.mark.parametrize("report", [reports.usage, reports.costs])
async def test_a_bucket_with_more_results_than_a_page_is_refused(posted, monkeypatch, report):
    monkeypatch.setattr(reports, "MAX_RESULTS", 1, raising=False)
    query = ReportQuery(start_time=MIDNIGHT, end_time=NOON + DAY, group_by=("project_id",))
    with pytest.raises(InvalidError, match="more than 1 sums") as refused:
        await report(posted, query, NOON + DAY)
    assert refused.value.param == "group_by"
    alone = await report(posted, msgspec.structs.replace(query, tenant_ids=("proj_a",)), NOON + DAY)
    assert [len(bucket.results) for bucket in alone.buckets] == [1, 0]


async def test_a_first_bucket_of_many_line_items_is_no_more_than_its_sums(posted, monkeypatch):
    """Each sum could be one of four line items, and most of them are not."""
    asked = ReportQuery(start_time=MIDNIGHT, end_time=NOON + DAY, group_by=("project_id", "line_item"))
    whole = await reports.costs(posted, asked, NOON + DAY)
    monkeypatch.setattr(reports, "MAX_RESULTS", 4)
    first = await reports.costs(posted, asked, NOON + DAY)
    assert first.buckets[0].results == whole.buckets[0].results
    assert len({(one.tenant_id, one.line_item) for one in first.buckets[0].results}) > 1


async def test_what_filled_public_prefixes_counts_only_for_who_asks_for_it(posted):
    fill = posting("req_7", Usage(0, 7, 0, 0), opened_at_ms=NOON_MS, tenant_id=OPERATOR_TENANT, key_id="")
    await request_postings.post(posted, 0, 2, [fill])
    span = {"start": MIDNIGHT, "end": MIDNIGHT + DAY}
    assert totals(await usage(posted, **span)) == [(-12 * HOUR, 5)]
    by_tenant = await costs(posted, **span, group_by=("project_id",))
    assert {r.tenant_id for r in by_tenant.buckets[0].results} == {"proj_a", "proj_b"}
    named = await usage(posted, **span, tenant_ids=(OPERATOR_TENANT,), group_by=("project_id",))
    assert [(r.tenant_id, r.usage.total) for r in named.buckets[0].results] == [(OPERATOR_TENANT, 7)]
