"""Why a charge differs between two periods: the difference split into causes, in whole micro-units that add up to it.

The module is pure. What a model is charged for in one tier is a product:

    seconds x requests per second x the model's share of requests x the tier's share of the model's requests
            x (prompt tokens per request x mean rate of the prompt + output tokens per request x rate of the output)

Each factor is a cause. Its part is its Shapley value: the effect of changing it from its value in the first period to
that in the second, averaged over every order in which all factors can be changed (Albrecht, François and Schoors,
"A Shapley decomposition of carbon emissions without residuals", Energy Policy 30, 2002, pages 727-736). So no order is
preferred, nothing is left over, and exchanging the periods negates every part.

A factor without a value in one of the periods has the other period's value there. So all that a new or a vanished model
changes is an effect of the mix, and all that a period without any request changes is one of the volume.

What tokens times rates do not explain has separate parts: kept KV, corrections, and the rounding of each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from math import factorial, floor, lcm
from operator import mul
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec

from accounting.prices.pricing import PER_MILLION
from accounting.values.types import TOKEN_CLASSES, Rates, Tier, Usage

Factor = Literal["period_length", "volume", "model_mix", "tier_mix", "prompt_length", "output_length", "cache", "price"]
Cause = Literal[Factor, "residency", "corrections", "rounding"]
FACTORS: tuple[Factor, ...] = get_args(Factor)
CAUSES: tuple[Cause, ...] = get_args(Cause)
MEANINGS: dict[Cause, str] = {
    "period_length": "the length of the period",
    "volume": "the number of requests a day",
    "model_mix": "which models were asked",
    "tier_mix": "how many requests were lines of batches",
    "prompt_length": "the length of prompts",
    "output_length": "the length of answers",
    "cache": "how much of the prompts was cached",
    "price": "the rates of the price sheet",
    "residency": "KV that was kept",
    "corrections": "credit notes and adjustments",
    "rounding": "the rounding of each request's charge",
}
"""The causes in words, as a command and a page show them."""

T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one model, tier and price version in a period."""

    model: str
    tier: Tier
    num_requests: int
    usage: Usage
    charge: int
    rates: Rates


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """The charges of a tenant in a period, in micro-units. `seconds` is above 0."""

    seconds: int
    lines: tuple[Line, ...] = ()
    residency: Mapping[str, int] = {}
    """Charges for kept KV, by model."""
    corrections: int = 0
    """Credit notes and adjustments that were given in the period; it is not above 0."""

    def charge_of(self, model: str) -> int:
        usage = sum(line.charge for line in self.lines if line.model == model)
        return usage + self.residency.get(model, 0)

    @property
    def charge(self) -> int:
        return sum(line.charge for line in self.lines) + sum(self.residency.values()) + self.corrections

    @property
    def models(self) -> set[str]:
        return {line.model for line in self.lines} | self.residency.keys()


class Part(msgspec.Struct, frozen=True):
    cause: Cause
    amount: int


class ModelChange(msgspec.Struct, frozen=True):
    model: str
    before: int
    after: int
    parts: tuple[Part, ...]
    """These are ranked, and add up to `after` - `before`."""


class Change(msgspec.Struct, frozen=True):
    before: int
    after: int
    parts: tuple[Part, ...]
    """There is one for each cause, ranked: first the one that moved the charge most in the direction in which it went.
    They add up to `after` - `before`. So do the parts of all models together with the corrections."""
    models: tuple[ModelChange, ...]
    """The one whose charge changed most comes first."""

    @property
    def first_cause(self) -> Cause | None:
        return self.parts[0].cause if self.parts[0].amount else None


def change(before: Period, after: Period) -> Change:
    """Splits the difference of two periods. It takes about a millisecond for each model and tier."""
    effects = _effects(before, after)
    models = [_model_change(model, before, after, effects) for model in sorted(before.models | after.models)]
    models.sort(key=lambda one: -abs(one.after - one.before))
    amounts = dict.fromkeys(CAUSES, 0)
    amounts["corrections"] = after.corrections - before.corrections
    for one in models:
        for part in one.parts:
            amounts[part.cause] += part.amount
    return Change(before.charge, after.charge, _ranked(amounts), tuple(models))


Effects = Mapping[str, Sequence[Fraction]]
"""Each model has the exact effect of each factor, in micro-units."""


def _model_change(model: str, before: Period, after: Period, effects: Effects) -> ModelChange:
    charges = before.charge_of(model), after.charge_of(model)
    kept = after.residency.get(model, 0) - before.residency.get(model, 0)
    of_usage = charges[1] - charges[0] - kept
    exact = effects.get(model, [Fraction(0)] * len(FACTORS))
    *amounts, rounding = _rounded([*exact, of_usage - sum(exact, Fraction(0))])
    parts: dict[Cause, int] = {"residency": kept, "rounding": rounding}
    parts.update(zip(FACTORS, amounts, strict=True))
    return ModelChange(model, *charges, _ranked(parts))


def _ranked(amounts: Mapping[Cause, int]) -> tuple[Part, ...]:
    direction = sum(amounts.values())
    parts = [Part(cause, amounts.get(cause, 0)) for cause in CAUSES]
    if not direction:
        return tuple(sorted(parts, key=lambda part: -abs(part.amount)))
    return tuple(sorted(parts, key=lambda part: part.amount, reverse=direction > 0))


def _rounded(parts: Sequence[Fraction]) -> list[int]:
    """Rounds parts whose sum is whole so that they keep it: each is rounded down, and those with the largest remainders
    get the missing units, of equal ones the first. The negated parts are rounded to the negated amounts."""
    if next((part for part in parts if part), 0) < 0:
        return [-amount for amount in _rounded([-part for part in parts])]
    amounts = [floor(part) for part in parts]
    missing = int(sum(parts)) - sum(amounts)
    by_remainder = sorted(range(len(parts)), key=lambda i: amounts[i] - parts[i])
    for i in by_remainder[:missing]:
        amounts[i] += 1
    return amounts


class _Group(NamedTuple):
    model: str
    tier: Tier


class _Request(NamedTuple):
    """The mean request of a group in a period."""

    prompt: Fraction
    """The tokens of the prompt, and below those of the output."""
    output: Fraction
    cached: tuple[Fraction, Fraction] | None
    """The shares of the prompt that were read from the cache and kept in it. None if there is no prompt."""
    rates: tuple[Fraction, ...]
    """The rates are micro-units per million tokens, by class."""


class _Traffic:
    """The requests of a period: how many there are of each group, and the mean one."""

    def __init__(self, period: Period) -> None:
        lines: dict[_Group, list[Line]] = {}
        for line in period.lines:
            if line.num_requests > 0:
                lines.setdefault(_Group(line.model, line.tier), []).append(line)
        self.seconds = period.seconds
        self.requests = {group: _mean(mine) for group, mine in lines.items()}
        self._num_of = {group: sum(line.num_requests for line in mine) for group, mine in lines.items()}
        self._num = sum(self._num_of.values())
        self._num_of_model: dict[str, int] = {}
        for group, num in self._num_of.items():
            self._num_of_model[group.model] = self._num_of_model.get(group.model, 0) + num

    @property
    def per_second(self) -> Fraction:
        return Fraction(self._num, self.seconds)

    def share_of_model(self, model: str) -> Fraction | None:
        return Fraction(self._num_of_model.get(model, 0), self._num) if self._num else None

    def share_of_tier(self, group: _Group) -> Fraction | None:
        of_model = self._num_of_model.get(group.model)
        return Fraction(self._num_of.get(group, 0), of_model) if of_model else None


def _mean(lines: Sequence[Line]) -> _Request:
    num = sum(line.num_requests for line in lines)
    usage = Usage(*(sum(getattr(line.usage, name) for line in lines) for name in TOKEN_CLASSES))
    cached = None
    if usage.prompt:
        cached = Fraction(usage.cache_read, usage.prompt), Fraction(usage.cache_write, usage.prompt)
    rates = tuple([_mean_rate(lines, name) for name in TOKEN_CLASSES])
    return _Request(Fraction(usage.prompt, num), Fraction(usage.output, num), cached, rates)


def _mean_rate(lines: Sequence[Line], name: str) -> Fraction:
    """Returns the mean of the versions' rates by the tokens that each has priced, or by requests if none has priced
    any."""
    weights = [getattr(line.usage, name) for line in lines]
    if not any(weights):
        weights = [line.num_requests for line in lines]
    rates = [getattr(line.rates, name) for line in lines]
    return Fraction(sum(weight * rate for weight, rate in zip(weights, rates, strict=True)), sum(weights))


def _effects(before: Period, after: Period) -> Effects:
    one, other = _Traffic(before), _Traffic(after)
    found: dict[str, list[Fraction]] = {}
    for group in sorted({*one.requests, *other.requests}):
        outer = [
            (Fraction(one.seconds), Fraction(other.seconds)),
            (one.per_second, other.per_second),
            _both(one.share_of_model(group.model), other.share_of_model(group.model)),
            _both(one.share_of_tier(group), other.share_of_tier(group)),
        ]
        costs = _costs(*_both(one.requests.get(group), other.requests.get(group)))
        mine = found.setdefault(group.model, [Fraction(0)] * len(FACTORS))
        for i, effect in enumerate(_shapley(outer, costs)):
            mine[i] += Fraction(effect, PER_MILLION)
    return found


def _both(one: T | None, other: T | None) -> tuple[T, T]:
    """Returns both values. One that is not there is the other one."""
    known = other if one is None else one
    assert known is not None
    return known, known if other is None else other


def _costs(one: _Request, other: _Request) -> list[Fraction]:
    """Returns what a request costs with each choice of prompt, output, cache and price from the two. The choice of the
    prompt changes fastest."""
    no_prompt = Fraction(0), Fraction(0)
    cached = (no_prompt, no_prompt) if one.cached is other.cached is None else _both(one.cached, other.cached)
    choices = product((one.rates, other.rates), cached, (one.output, other.output), (one.prompt, other.prompt))
    return [_cost(*choice) for choice in choices]


def _cost(rates: Sequence[Fraction], cached: tuple[Fraction, Fraction], output: Fraction, prompt: Fraction) -> Fraction:
    read, write = cached
    shares = read, write, 1 - read - write
    return prompt * sum(share * rate for share, rate in zip(shares, rates[:3], strict=True)) + output * rates[3]


def _shapley(outer: Iterable[tuple[Fraction, Fraction]], inner: Sequence[Fraction]) -> list[Fraction]:
    """Returns the Shapley value of each factor of a product: of every pair in `outer`, and of the factors whose choices
    `inner` lists. It computes in integers over one common denominator, which is much faster than in fractions."""
    table, common = [1], 1
    for values in (*outer, inner):
        scaled, denominator = _scaled(values)
        table = [value * chosen for value in scaled for chosen in table]
        common *= denominator
    num = len(table).bit_length() - 1
    common *= factorial(num)
    return [Fraction(sum(map(mul, weights, table)), common) for weights in _weights(num)]


@cache
def _weights(num: int) -> list[list[int]]:
    """Returns for each of `num` factors the weight of each choice of values in its effect, times `num` factorial. A bit
    of the choice says that a factor has its later value."""
    orders = [factorial(size) * factorial(num - 1 - size) for size in range(num)]
    sizes = [choice.bit_count() for choice in range(1 << num)]
    return [
        [orders[size - 1] if choice >> factor & 1 else -orders[size] for choice, size in enumerate(sizes)]
        for factor in range(num)
    ]


def _scaled(values: Sequence[Fraction]) -> tuple[list[int], int]:
    common = lcm(*(value.denominator for value in values))
    return [value.numerator * (common // value.denominator) for value in values], common
