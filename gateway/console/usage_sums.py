"""Usage and costs of the API's buckets as sums by time and by group. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.schema.money import MICRO_UNITS

Group = Literal["", "tenant", "key", "model", "tier"]
Measure = Literal["tokens", "cost", "requests"]
GROUPS: dict[Group, str | None] = {
    "": None,
    "tenant": "project_id",
    "key": "api_key_id",
    "model": "model",
    "tier": "service_tier",
}
"""The dimension of the API that stands for a group."""
CLASSES = ("cached", "written", "uncached", "output")
_FIELDS = {
    "cached": "input_cached_tokens",
    "written": "input_cache_write_tokens",
    "uncached": "input_uncached_tokens",
    "output": "output_tokens",
    "requests": "num_model_requests",
}
_CLASS_OF_ITEM = {"cache_read": "cached", "cache_write": "written", "uncached": "uncached", "output": "output"}
KEPT = "kept KV"
OTHER = "other"
NUM_PARTS = 4
"""The groups of a chart that have a colour of their own; the rest is one part."""


@dataclass(slots=True)
class Sums:
    """Tokens and requests by the currency of their charges, and amounts in micro-units by currency and by class of
    tokens.
    """

    counts_of: dict[str, Counter[str]] = field(default_factory=dict)
    amounts: dict[str, dict[str, int]] = field(default_factory=dict)

    def count(self, result: Mapping[str, Any]) -> None:
        self._count(result["currency"].upper(), {name: result[source] for name, source in _FIELDS.items()})

    def charge(self, currency: str, name: str, amount: int) -> None:
        parts = self.amounts.setdefault(currency, {})
        parts[name] = parts.get(name, 0) + amount

    def add(self, other: Sums) -> None:
        for currency, counts in other.counts_of.items():
            self._count(currency, counts)
        for currency, parts in other.amounts.items():
            for part, amount in parts.items():
                self.charge(currency, part, amount)

    def _count(self, currency: str, counts: Mapping[str, int]) -> None:
        self.counts_of.setdefault(currency, Counter()).update(counts)

    @property
    def counts(self) -> Counter[str]:
        """The counts of all currencies."""
        found = Counter[str]()
        for counts in self.counts_of.values():
            found.update(counts)
        return found

    @property
    def currencies(self) -> Sequence[str]:
        return sorted(self.counts_of.keys() | self.amounts.keys())

    def amount(self, currency: str) -> int:
        return sum(self.amounts.get(currency, {}).values())

    def measured(self, measure: Measure, currency: str) -> float:
        if measure == "cost":
            return self.amount(currency)
        names = ("requests",) if measure == "requests" else CLASSES
        return sum(counts[name] for counts in self.counts_of.values() for name in names)

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """A row for each currency, or one of zeros without an amount."""
        return [self._row(currency) for currency in self.currencies or [""]]

    def _row(self, currency: str) -> dict[str, Any]:
        counts = self.counts_of.get(currency) or Counter[str]()
        amount = self.amount(currency) if currency in self.amounts else None
        return {name: counts[name] for name in _FIELDS} | {"cost": amount, "currency": currency}


@dataclass(frozen=True, slots=True)
class Item:
    """A line item of costs, such as `llama, cache_read, batch`."""

    model: str
    token_class: str
    tier: str


def item_of(text: str) -> Item:
    tier = "default"
    if text.endswith(", batch"):
        text, tier = text.removesuffix(", batch"), "batch"
    model, _, token_class = text.rpartition(", ")
    return Item(model, _CLASS_OF_ITEM.get(token_class, KEPT), tier)


class Table:
    """Sums by the start of a bucket and the name of a group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.cells: dict[tuple[int, str], Sums] = {}
        self._by: dict[str, dict[Any, Sums]] = {}
        """The answers of `by`, until something is added."""

    def add_usage(self, buckets: Iterable[Mapping[str, Any]]) -> None:
        dimension = GROUPS[self._group]
        for bucket in buckets:
            for result in bucket["results"]:
                name = "" if dimension is None else result[dimension] or ""
                self._cell(bucket["start_time"], name).count(result)

    def add_costs(self, buckets: Iterable[Mapping[str, Any]], is_asked: Callable[[Item], bool]) -> None:
        """`is_asked` says which line items count; results without a line item always do."""
        for bucket in buckets:
            for result in bucket["results"]:
                item = None if result["line_item"] is None else item_of(result["line_item"])
                if item is None or is_asked(item):
                    # JSON's number is a decimal of whole micro-units, so its nearest whole number is exact.
                    amount = round(result["amount"]["value"] * MICRO_UNITS)
                    name = "" if item is None else item.token_class
                    cell = self._cell(bucket["start_time"], self._name(result, item))
                    cell.charge(result["amount"]["currency"].upper(), name, amount)

    def _name(self, result: Mapping[str, Any], item: Item | None) -> str:
        if self._group in {"model", "tier"} and item is not None:
            return item.model if self._group == "model" else item.tier
        dimension = GROUPS[self._group]
        return "" if dimension is None else result.get(dimension) or ""

    def _cell(self, start: int, name: str) -> Sums:
        self._by.clear()
        return self.cells.setdefault((start, name), Sums())

    @property
    def currencies(self) -> Sequence[str]:
        return sorted({currency for sums in self.cells.values() for currency in sums.currencies})

    def by(self, place: Literal["time", "group"]) -> dict[Any, Sums]:
        if place in self._by:
            return self._by[place]
        found = self._by[place] = {}
        for (start, name), sums in self.cells.items():
            found.setdefault(start if place == "time" else name, Sums()).add(sums)
        return found

    @property
    def total(self) -> Sums:
        found = Sums()
        for sums in self.by("time").values():
            found.add(sums)
        return found

    def parts(
        self, starts: Iterable[int], measure: Measure, currency: str
    ) -> tuple[Sequence[str], list[dict[str, float]]]:
        """Returns the names of a chart's parts, and the parts of each bar: classes of tokens, or the largest groups."""
        if self._group == "" and measure != "requests":
            return self._classes(starts, measure, currency)
        totals = {name: sums.measured(measure, currency) for name, sums in self.by("group").items()}
        largest = sorted(totals, key=lambda name: (-totals[name], name))[:NUM_PARTS]
        bars = {start: dict[str, float]() for start in starts}
        for (start, name), sums in self.cells.items():
            if start in bars:
                part = name if name in largest else OTHER
                bars[start][part] = bars[start].get(part, 0) + max(0, sums.measured(measure, currency))
        names = [*largest, *([OTHER] if len(totals) > len(largest) else [])]
        return names, list(bars.values())

    def _classes(
        self, starts: Iterable[int], measure: Measure, currency: str
    ) -> tuple[Sequence[str], list[dict[str, float]]]:
        bars: list[dict[str, float]] = []
        for start in starts:
            sums = self.cells.get((start, ""), Sums())
            parts = sums.counts if measure == "tokens" else sums.amounts.get(currency, {})
            bars.append({name: max(0, parts.get(name, 0)) for name in (*CLASSES, KEPT)})
        names = [*CLASSES, *([KEPT] if any(bar[KEPT] for bar in bars) else [])]
        return names, bars
