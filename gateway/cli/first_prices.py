"""The first price of a served model, for a price sheet that has none: the operator's, the demo model's example, or 0.
Which of the served models cost nothing is said at each start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accounting.lifecycle.bootstrap import EXAMPLE_RATES, FREE
from accounting.prices.price_lists import SheetVersion
from accounting.prices.prices import DEFAULT_SHEET
from accounting.values.types import Rates, Tier
from gateway.cli.model import DEMO_MODEL_ID, ServedModel
from gateway.configuration.file import Price

MICRO = 1_000_000


def first_rates(model: ServedModel) -> Mapping[Tier, Rates]:
    price = model.wanted.price
    if price is None:
        return EXAMPLE_RATES if model.id == DEMO_MODEL_ID else FREE
    return {"interactive": _rates(price, 1.0), "batch": _rates(price, price.batch_share)}


def price_notes(models: Sequence[str], standard: SheetVersion | None) -> list[str]:
    """Returns a sentence for each of the models that is free, or that has no price, by the default sheet's version in
    force.
    """
    priced = standard.rates if standard is not None else []
    notes = [_note(model, [one.rates for one in priced if one.model == model]) for model in models]
    return [note for note in notes if note is not None]


def _note(model: str, rates: list[Rates]) -> str | None:
    if not rates:
        return f"{model} has no price on the sheet {DEFAULT_SHEET}: requests for it are refused (headgate prices add)."
    if all(one in FREE.values() for one in rates):
        return f"{model} is free: its price on the sheet {DEFAULT_SHEET} is 0 (headgate prices add)."
    return None


def _rates(price: Price, share: float) -> Rates:
    """Returns rates in micro-units for a million tokens."""
    amounts = (price.input if price.cached is None else price.cached, price.input, price.input, price.output)
    cache_read, cache_write, uncached, output = (round(amount * share * MICRO) for amount in amounts)
    return Rates(cache_read=cache_read, cache_write=cache_write, uncached=uncached, output=output)
