"""Currencies of ISO 4217 and the smallest unit that can be paid in each. Amounts are micro-units. The module is pure."""

from __future__ import annotations

import iso4217

from accounting.values.errors import InvalidError

MOST_DECIMALS = 6


def decimals(code: str) -> int:
    """Returns the number of decimals of payable amounts: 2 for EUR, 0 for JPY, 3 for KWD. Raises InvalidError for a
    code that is no currency, and for those in which nothing is paid, such as gold."""
    try:
        exponent = iso4217.Currency(code.upper()).exponent
    except ValueError:
        raise InvalidError(f"{code!r} is not a currency of ISO 4217, such as EUR or USD.", "currency") from None
    if exponent is None:
        raise InvalidError(f"{code!r} has no smallest unit, so nothing can be billed in it.", "currency")
    return int(exponent)


def places(code: str) -> int:
    """Returns the decimals of amounts in the currency; 2 for one that is not of ISO 4217, as old price sheets may
    have."""
    try:
        return decimals(code)
    except InvalidError:
        return 2


def written(micro_units: int, code: str) -> str:
    """Returns the amount with the decimals of its currency, and with more where it has more: `12.50`, `1000`,
    `0.00014`."""
    whole, rest = divmod(abs(micro_units), 10**MOST_DECIMALS)
    fraction = f"{rest:06d}".rstrip("0").ljust(places(code), "0")
    sign = "-" if micro_units < 0 else ""
    return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"


def unit(num_decimals: int) -> int:
    """Returns the smallest payable amount in micro-units."""
    return int(10 ** (MOST_DECIMALS - num_decimals))
