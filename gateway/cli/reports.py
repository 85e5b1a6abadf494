"""`headgate usage` and `headgate costs`: the reports of the API, with its groups, filters and widths."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gateway.cli.answers import Grid, one_sentence, show
from gateway.cli.api import PROJECTS, AdminApi
from gateway.cli.common import example_text, home_option, json_option
from gateway.cli.times import MOMENT, refuse_empty_span

USAGE_GROUPS = ("project_id", "api_key_id", "model", "batch", "service_tier", "currency")
COST_GROUPS = ("project_id", "api_key_id", "line_item")
LIMITS = {"1m": 1440, "1h": 168, "1d": 31}
COST_LIMIT = 180
SECONDS = {"1m": 60, "1h": 3_600, "1d": 86_400}
FORMATS = {"1m": "%Y-%m-%d %H:%M", "1h": "%Y-%m-%d %H:00", "1d": "%Y-%m-%d"}
TOKENS = (
    ("requests", "num_model_requests"),
    ("input", "input_tokens"),
    ("cached", "input_cached_tokens"),
    ("cache write", "input_cache_write_tokens"),
    ("uncached", "input_uncached_tokens"),
    ("output", "output_tokens"),
)

range_options = (
    click.option(
        "--days",
        default=7,
        show_default=True,
        type=click.IntRange(1, 3660),
        help="Days up to now, in UTC; today is one of them.",
    ),
    click.option("--from", "start", type=MOMENT, help="Start of the range, included, instead of --days."),
    click.option("--to", "end", type=MOMENT, help="End of the range, not included.  [default: now]"),
    click.option(
        "--tenant", "tenants", multiple=True, help="Id or name of a tenant; may be repeated.  [default: every tenant]"
    ),
    click.option("--key", "key_ids", multiple=True, help="Id of an API key; may be repeated.  [default: every key]"),
)


def _span(asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the request with both ends of the range. Raises UsageError for an empty range."""
    now = int(time.time())
    start = now - now % 86_400 - (asked["days"] - 1) * 86_400
    start = start if asked["start"] is None else asked["start"]
    end = now + 1 if asked["end"] is None else asked["end"]
    if asked["end"] is None and start >= end:
        raise click.UsageError("--from lies in the future.")
    refuse_empty_span(start, end)
    return {**asked, "start": start, "end": end}


def with_range(command: Any) -> Any:
    for option in reversed(range_options):
        command = option(command)
    return command


@click.command(epilog=example_text("usage --tenant acme --days 30 --group-by model"))
@with_range
@click.option(
    "--width",
    type=click.Choice(list(LIMITS)),
    default="1d",
    show_default=True,
    help="Length of time that a row sums up.",
)
@click.option(
    "--group-by",
    "groups",
    multiple=True,
    type=click.Choice(USAGE_GROUPS),
    default=("project_id", "model"),
    show_default=True,
    help="Print one row for each of these; may be repeated.",
)
@click.option("--model", "models", multiple=True, help="Id of a model; may be repeated.  [default: every model]")
@click.option(
    "--batch/--no-batch", default=None, help="Count only lines of batches, or leave them out.  [default: both]"
)
@home_option
@json_option
def usage(
    width: str,
    groups: tuple[str, ...],
    models: tuple[str, ...],
    batch: bool | None,
    home: Path,
    as_json: bool,
    **asked: Any,
) -> None:
    """Report the numbers of requests and tokens by time, and by tenant, key, model, tier or currency."""
    more = {"models[]": models} if models else {}
    if batch is not None:
        more["batch"] = ("true",) if batch else ("false",)
    asked = _span(asked)
    with one_sentence():
        api = AdminApi(home)
        buckets = list(_buckets(api, "usage/completions", width, LIMITS[width], groups, asked, more))
        rows = [
            (
                time.strftime(FORMATS[width], time.gmtime(bucket["start_time"])),
                *cells,
                *(result[field] for _, field in TOKENS),
            )
            for bucket, result, cells in _results(api, buckets, groups)
        ]
        columns = ("start", *groups, *(name for name, _ in TOKENS))
        show({"object": "page", "data": buckets}, Grid(columns, rows), as_json)


@click.command(epilog=example_text("costs --tenant acme --from 2026-10-01 --to 2026-11-01"))
@with_range
@click.option(
    "--group-by",
    "groups",
    multiple=True,
    type=click.Choice(COST_GROUPS),
    default=("project_id", "line_item"),
    show_default=True,
    help="Print one row for each of these; may be repeated.",
)
@click.option(
    "--line-item",
    "line_items",
    multiple=True,
    help="A line item, such as 'my-model, output'; may be repeated.  [default: every line item]",
)
@home_option
@json_option
def costs(groups: tuple[str, ...], line_items: tuple[str, ...], home: Path, as_json: bool, **asked: Any) -> None:
    """Report the charges by day, and by tenant, key or line item."""
    more = {"line_items[]": line_items} if line_items else {}
    asked = _span(asked)
    with one_sentence():
        api = AdminApi(home)
        buckets = list(_buckets(api, "costs", "1d", COST_LIMIT, groups, asked, more))
        rows = [
            (
                time.strftime(FORMATS["1d"], time.gmtime(bucket["start_time"])),
                *cells,
                result["quantity"],
                result["quantity_unit"],
                f"{result['amount']['value']:f} {result['amount']['currency'].upper()}",
            )
            for bucket, result, cells in _results(api, buckets, groups)
        ]
        columns = ("start", *groups, "quantity", "unit", "amount")
        show({"object": "page", "data": buckets}, Grid(columns, rows), as_json)


def _buckets(
    api: AdminApi,
    name: str,
    width: str,
    limit: int,
    groups: tuple[str, ...],
    asked: dict[str, Any],
    more: dict[str, tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    """Yields buckets, read page by page as any client would."""
    start, end = asked["start"], asked["end"]
    num_buckets = max(1, -(-end // SECONDS[width]) - start // SECONDS[width])
    params: dict[str, Any] = {
        "start_time": start,
        "end_time": end,
        "bucket_width": width,
        "limit": min(limit, num_buckets),
        "group_by[]": list(groups),
        **{key: list(values) for key, values in more.items()},
    }
    if asked["tenants"]:
        params["project_ids[]"] = [api.project(tenant)["id"] for tenant in asked["tenants"]]
    if asked["key_ids"]:
        params["api_key_ids[]"] = list(asked["key_ids"])
    while True:
        page = api.call("GET", f"/v1/organization/{name}", params=params)
        yield from page["data"]
        if not page["has_more"]:
            return
        params["page"] = page["next_page"]


def _results(
    api: AdminApi, buckets: list[dict[str, Any]], groups: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]]:
    """Yields (bucket, result, cells of its groups), with tenants by their names."""
    names: dict[str, str] = {}
    if "project_id" in groups:
        names = {p["id"]: p["name"] for p in api.read(PROJECTS, {"include_archived": "true"})}
    for bucket in buckets:
        for result in bucket["results"]:
            yield bucket, result, tuple(names.get(result[g], result[g]) for g in groups)


COMMANDS: tuple[click.Command, ...] = (usage, costs)
