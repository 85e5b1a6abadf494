"""Tokens times rates, in integers. The module is pure: it knows neither tables nor clocks nor currencies.

A rate is micro-units per million tokens, so a product is micro-micro-units and every amount is rounded exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

from accounting.values.budget_types import MAX_AMOUNT
from accounting.values.errors import InvalidError
from accounting.values.types import TOKEN_CLASSES, Charge, Rates, Usage

PER_MILLION = 1_000_000
PER_GB_HOUR = 10**9 * 3_600_000
"""Byte-milliseconds of one GB-hour."""
MAX_RATE = 10**12


def charge(usage: Usage, rates: Rates) -> Charge:
    """Returns the charge of one request, rounded once, half to even. The amounts of the classes are split from it by
    largest remainder and add up to it."""
    made = sum_charge(usage, rates)
    _within_range(made.total)
    return made


def sum_charge(usage: Usage, rates: Rates) -> Charge:
    """Returns the charge of the usage of many requests, rounded as if it were one. It has no bound, because the limiter
    never gets it."""
    exact = [_product(getattr(usage, name), getattr(rates, name)) for name in TOKEN_CLASSES]
    parts = _rounded(exact, PER_MILLION)
    return Charge(sum(parts), *parts)


def residency_charge(byte_ms: Sequence[int], rates: Sequence[int]) -> list[int]:
    """Returns byte-milliseconds times micro-units per GB and hour, each by its own rate, rounded as one charge. Raises
    InvalidError."""
    for value, rate in zip(byte_ms, rates, strict=True):
        if value < 0 or not 0 <= rate <= MAX_RATE:
            raise InvalidError("Residency and its rates must not be below 0.")
    parts = _rounded([v * rate for v, rate in zip(byte_ms, rates, strict=True)], PER_GB_HOUR)
    _within_range(sum(parts))
    return parts


def prompt_reservation(num_tokens: int, rates: Rates) -> int:
    """Returns the highest price of a prompt, whatever part of it is cached: the highest input rate, rounded up."""
    highest = max(rates.cache_read, rates.cache_write, rates.uncached)
    return _within_range(_round_up(_product(num_tokens, highest)))


def lease_cost(num_tokens: int, rates: Rates) -> int:
    """Returns the highest price of a lease of output tokens. It is rounded up per lease, so charge <= sum of
    reservations."""
    return _within_range(_round_up(_product(num_tokens, rates.output)))


def _product(num_tokens: int, rate: int) -> int:
    if not 0 <= num_tokens <= MAX_AMOUNT:
        raise InvalidError(f"A token count must be 0 to {MAX_AMOUNT}, not {num_tokens}.")
    if not 0 <= rate <= MAX_RATE:
        raise InvalidError(f"A rate must be 0 to {MAX_RATE}, not {rate}.")
    return num_tokens * rate


def _rounded(exact: Sequence[int], per: int) -> list[int]:
    """Divides each amount by `per`, so that the results add up to the rounded sum."""
    total = _round_half_even(sum(exact), per)
    parts = [amount // per for amount in exact]
    # The sort is stable: of equal remainders the first gets the unit.
    by_remainder = sorted(range(len(parts)), key=lambda i: -(exact[i] % per))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def _round_half_even(exact: int, per: int) -> int:
    whole, rest = divmod(exact, per)
    twice = 2 * rest
    return whole + (twice > per or (twice == per and whole % 2 == 1))


def _round_up(micro_micro: int) -> int:
    return -(-micro_micro // PER_MILLION)


def _within_range(amount: int) -> int:
    if amount > MAX_AMOUNT:
        raise InvalidError(f"An amount must not exceed {MAX_AMOUNT} micro-units.")
    return amount
