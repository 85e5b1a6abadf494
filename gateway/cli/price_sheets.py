"""The options of `headgate prices add` become a version of a price sheet, and its rates become a table."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from gateway.cli.admin_commands import Fields
from gateway.cli.answers import Grid
from gateway.cli.input_files import whole_of
from gateway.cli.money import Amount, shown

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


def version_of(given: Fields) -> Fields:
    """Returns the body of a new version: what the file has, and over it what the options say. Raises UsageError."""
    rates, batch_rates, percent, file = (given.pop(n) for n in ("rates", "batch_rates", "batch_percent", "file"))
    body = _read(file) if file else {}
    listed = [*body.get("rates", []), *rates, *({**rate, "tier": "batch"} for rate in batch_rates)]
    if percent is not None:
        listed += _shares(listed, percent)
    if not listed:
        raise click.UsageError("Give at least one --rate, or --file.")
    return {**body, **{name: value for name, value in given.items() if value is not None}, "rates": listed}


def version_named(given: Fields) -> Fields:
    """Splits SHEET@NUMBER into its two parts. Raises UsageError."""
    sheet, _, number = given["version"].rpartition("@")
    if not sheet or not number.isdigit():
        raise click.UsageError("A version is written SHEET@NUMBER.")
    return {"sheet": sheet, "number": number}


def rates(version: dict[str, Any]) -> Grid:
    return Grid(
        ("model", "tier", *CLASSES),
        [
            (rate["model"], rate["tier"], *(shown(rate[name], version["currency"]) for name in CLASSES))
            for rate in version["rates"]
        ],
    )


def version_made(made: dict[str, Any]) -> tuple[Grid | str, ...]:
    """Returns the id, below the rates if some of them were computed."""
    computed = click.get_current_context().params["batch_percent"] is not None
    return (rates(made), made["id"]) if computed else (made["id"],)


def gaps(sheet: str, made: dict[str, Any]) -> str | None:
    """Returns a sentence about models without a price."""
    tiers: dict[str, list[str]] = {}
    for gap in made["unpriced"]:
        tiers.setdefault(gap["model"], []).append(gap["tier"])
    if not tiers:
        return None
    models = ", ".join(f"{model} ({', '.join(names)})" for model, names in tiers.items())
    return (
        f"{sheet} has no price for {models}: tenants that pay by it get 403 price_unknown there."
        " Add a version with rates for every served model."
    )


def _read(file: Any) -> dict[str, Any]:
    try:
        return msgspec.json.decode(whole_of(file, "The file"), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise click.UsageError(f"The file is not a JSON object: {error}") from None


def _shares(rates: list[dict[str, Any]], percent: int) -> list[dict[str, Any]]:
    """Returns batch rates of the models that have none. Raises UsageError."""
    try:
        have_some = {rate["model"] for rate in rates if rate.get("tier") == "batch"}
        return [_share(rate, percent) for rate in rates if rate["model"] not in have_some]
    except (AttributeError, KeyError, TypeError):
        raise click.UsageError(
            f"--batch-percent needs rates with a model, and {', '.join(CLASSES)} in micro-units."
        ) from None


def _share(rate: dict[str, Any], percent: int) -> dict[str, Any]:
    return {"model": rate["model"], "tier": "batch", **{name: -(-rate[name] * percent // 100) for name in CLASSES}}
