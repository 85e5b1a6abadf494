"""Money on the command line: decimal amounts of the currency, read exactly; the API's amounts are micro-units."""

from __future__ import annotations

from typing import Any

import click

from gateway.schema.money import MICRO_UNITS, decimal, micro_units


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
    """Formats micro-units for a table. What was refused has no amount and no currency."""
    return "" if amount is None or currency is None else f"{decimal(amount, 2)} {currency.upper()}"
