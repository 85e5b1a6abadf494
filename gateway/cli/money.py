"""Money on the command line: decimal amounts of the currency, read exactly; the API's amounts are micro-units.

Each amount stands with its currency. What a bill asks for has the decimals of its currency, what usage costs has six,
and what a person sets (rates, limits, credits) has at least two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from accounting.values import currencies
from gateway.schema.money import MICRO_UNITS, decimal, micro_units, percentage


class Amount(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A parameter type that reads `25.00` as micro-units."""

    name = "AMOUNT"

    def __init__(self, *, places: int = 6, signed: bool = False, positive: bool = False) -> None:
        """`places` is the most decimals. `signed` allows amounts below 0. `positive` allows only amounts above 0."""
        self._unit = MICRO_UNITS // 10**places
        self._places = places
        self.signed = signed
        self._positive = positive

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        try:
            amount = micro_units(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if amount % self._unit:
            self.fail(f"{value!r} has more than {self._places} decimals.", param, ctx)
        if amount < 0 and not self.signed:
            self.fail(f"{value!r} is negative.", param, ctx)
        if amount == 0 and self._positive:
            self.fail(f"{value!r} is not above 0.", param, ctx)
        return amount


def shown(amount: int | None, currency: str | None) -> str:
    """Formats what a person set: `25.00 USD`. What was refused has no amount and no currency."""
    return _formatted(amount, currency, 2)


def cost(amount: int | None, currency: str | None) -> str:
    """Formats what usage costs, to the micro-unit: `0.000140 USD`. What was refused has no amount and no currency."""
    return _formatted(amount, currency, 6)


def bill(amount: int, currency: str) -> str:
    """Formats what a bill asks for, in whole units of its currency: `25.00 USD`, `25 JPY`."""
    return _formatted(amount, currency, currencies.decimals(currency.upper()))


def rule_of_tax(rule: Mapping[str, Any]) -> str:
    """Formats a rule of tax with its rate: `standard, 19 %`."""
    return f"{rule['tax']}, {percentage(rule['rate'])} %"


def _formatted(amount: int | None, currency: str | None, min_places: int) -> str:
    return "" if amount is None or currency is None else f"{decimal(amount, min_places)} {currency.upper()}"
