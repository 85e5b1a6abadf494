"""`headgate prices`: price sheets. The command uses the same HTTP API as any program of the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.cli.admin import one_sentence, print_rows, show, table, warn
from gateway.cli.api import AdminApi
from gateway.cli.common import home_option, json_option
from gateway.cli.groups import Commands
from gateway.cli.money import Amount, shown
from gateway.cli.times import MOMENT

PATH = "/admin/v1/price-sheets"
EXAMPLE = "my-model=0.25,1.25,1.00,4.00"
CLASSES = ("cache_read", "cache_write", "uncached", "output")


class RateParam(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A parameter type: `MODEL=CACHE_READ,CACHE_WRITE,UNCACHED,OUTPUT`, amounts of the currency per million tokens."""

    name = "MODEL=4 RATES"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, Any]:
        model, _, numbers = value.rpartition("=")
        rates = numbers.split(",")
        if not model or len(rates) != len(CLASSES):
            self.fail(f"{value!r} is not MODEL=CACHE_READ,CACHE_WRITE,UNCACHED,OUTPUT, like {EXAMPLE}.", param, ctx)
        read = [Amount().convert(rate.strip(), param, ctx) for rate in rates]
        return {"model": model, **dict(zip(CLASSES, read, strict=True))}


@click.group(cls=Commands)
def prices() -> None:
    """Manage price sheets: rates in the currency per million tokens, in force from a moment on. Versions
    are immutable.
    """


@prices.command("add")
@click.argument("sheet")
@click.option(
    "--rate",
    "rates",
    type=RateParam(),
    multiple=True,
    help=f"Interactive rates of a model per million tokens, like {EXAMPLE}: cached input, input kept in the"
    " cache, other input, output. May be repeated.",
)
@click.option("--batch-rate", "batch_rates", type=RateParam(), multiple=True, help="As --rate, for batch lines.")
@click.option(
    "--batch-percent",
    type=click.IntRange(0, 100),
    help="Batch rates of every --rate, as a share of it; rounded up to micro-units and printed.",
)
@click.option(
    "--file", "file", type=click.File("rb"), help="The whole version as JSON, as the API takes it: in micro-units."
)
@click.option("--currency", help="Of a new sheet.  [default: USD]")
@click.option("--from", "from_", type=MOMENT, help="When it begins.  [default: now]")
@click.option("--until", type=MOMENT, help="When it ends.  [default: when the next version begins]")
@home_option
@json_option
def add(
    sheet: str,
    rates: tuple[dict[str, Any], ...],
    batch_rates: tuple[dict[str, Any], ...],
    batch_percent: int | None,
    file: Any,
    currency: str | None,
    from_: int | None,
    until: int | None,
    home: Path,
    as_json: bool,
) -> None:
    """Add the next version of SHEET, or a new sheet if there is none of that name. Prints its id.

    A version has the rates of all its models: a model that it does not name has no price.
    """
    body: dict[str, Any] = _read(file) if file else {}
    listed = [*body.get("rates", []), *rates, *({**rate, "tier": "batch"} for rate in batch_rates)]
    if batch_percent is not None:
        listed += [_share(rate, batch_percent) for rate in rates]
    given = {"currency": currency, "from": from_, "until": until}
    body |= {"sheet": sheet, "rates": listed, **{k: v for k, v in given.items() if v is not None}}
    if not listed:
        raise click.UsageError("Give at least one --rate, or --file.")
    with one_sentence():
        made = AdminApi.of(home).call("POST", PATH, body)
        if batch_percent is not None and not as_json:
            _print_rates(made, as_json)
        show(made, as_json, "id")
        _warn_of_gaps(made["id"], made)


@prices.command("list")
@home_option
@json_option
def list_sheets(home: Path, as_json: bool) -> None:
    """List every version of every sheet, the newest first."""
    with one_sentence():
        found = AdminApi.of(home).every(PATH)
        table(found, as_json, ("id", "currency", "from", "until"))


@prices.command("show")
@click.argument("version", metavar="SHEET@VERSION")
@home_option
@json_option
def show_version(version: str, home: Path, as_json: bool) -> None:
    """Show all rates of one version."""
    sheet, _, number = version.rpartition("@")
    if not sheet or not number.isdigit():
        raise click.UsageError("A version is written SHEET@NUMBER.")
    with one_sentence():
        _print_rates(AdminApi.of(home).call("GET", f"{PATH}/{sheet}/{number}"), as_json)


@prices.command("assign")
@click.argument("tenant")
@click.argument("sheet")
@click.option("--from", "from_", type=MOMENT, help="When it begins.  [default: now]")
@click.option("--until", type=MOMENT, help="When the default sheet comes back.  [default: never]")
@home_option
@json_option
def assign(tenant: str, sheet: str, from_: int | None, until: int | None, home: Path, as_json: bool) -> None:
    """Let TENANT (id or name) pay by SHEET. Intervals of a tenant cannot overlap."""
    with one_sentence():
        api = AdminApi.of(home)
        path = f"/admin/v1/tenants/{api.project(tenant)['id']}/price-sheet"
        times = {k: v for k, v in {"from": from_, "until": until}.items() if v is not None}
        made = api.call("PUT", path, {"sheet": sheet, **times})
        columns = ("sheet", "from", "until")
        rows = [tuple(i[name] for name in columns) for i in made["intervals"]]
        print_rows(made, as_json, columns, rows)
        _warn_of_gaps(sheet, made)


def _warn_of_gaps(sheet: str, made: dict[str, Any]) -> None:
    """Warns of models without a price. A gateway of an older version does not report them."""
    tiers: dict[str, list[str]] = {}
    for gap in made.get("unpriced", []):
        tiers.setdefault(gap["model"], []).append(gap["tier"])
    if tiers:
        models = ", ".join(f"{model} ({', '.join(names)})" for model, names in tiers.items())
        warn(
            f"{sheet} has no price for {models}: tenants that pay by it get 403 price_unknown there."
            " Add a version with rates for every served model."
        )


def _read(file: Any) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.UsageError(f"The file is no JSON object: {error}") from None


def _share(rate: dict[str, Any], percent: int) -> dict[str, Any]:
    return {"model": rate["model"], "tier": "batch", **{name: -(-rate[name] * percent // 100) for name in CLASSES}}


def _print_rates(version: dict[str, Any], as_json: bool) -> None:
    columns = ("model", "tier", *CLASSES)
    rows = [
        (rate["model"], rate["tier"], *(shown(rate[name], version["currency"]) for name in CLASSES))
        for rate in version["rates"]
    ]
    print_rows(version, as_json, columns, rows)


COMMANDS: tuple[click.Command, ...] = (prices,)
