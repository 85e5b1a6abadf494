"""The keywords of numbers, with values that the grammar library reads exactly. The module is pure.

The library reads them as 64-bit floats. So a bound that a float does not hold is moved inwards to the next one that it
holds, and a step must be one that the library turns into a decimal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any as Json

from gateway.structured.document import SchemaError

KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LIMIT = 10**18
"""The largest size of an integer and of a bound: 64 bits hold it, so that every client can read it."""
MAX_DECIMALS = 20
"""The most decimals of a bound."""
MAX_STEP, MAX_ROUND_STEP = 500, 3_600
"""The largest step in units of its last decimal, and the largest one of which at most 9 is left without the factors 2
and 5, as 3,600. The library has a state for each remainder, and these factors leave few of them."""
LEAKS = (
    "A whole number that is excluded cannot be enforced beside another bound that is less than 1 away; use 'minimum' or "
    "'maximum' with the next number."
)
_MAX_COMMON = 2**32
"""The library multiplies steps of schemas that hold together in 32 bits."""


def read(schema: dict[str, Json], at: str, *, is_whole: bool) -> dict[str, Json]:
    """Returns the keywords of numbers in a schema. `is_whole`: it allows integers only. Raises `SchemaError`."""
    for name in KEYWORDS:
        if name in schema and not (type(schema[name]) is int or is_exact(schema[name])):
            raise SchemaError(f"{at}/{name}", "It must be a number.")
    bounds = _whole(schema) if is_whole else _any(schema, at)
    low = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf))
    high = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf))
    if low > high or (low == high and low in (bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum"))):
        raise SchemaError(at, "No number is within the bounds.")
    if (leak := leaking([bounds])) is not None:
        raise SchemaError(f"{at}/{leak}", LEAKS)
    if "multipleOf" in schema:
        bounds["multipleOf"] = _step(schema["multipleOf"], at)
    return bounds


def leaking(bounds: Sequence[Mapping[str, Json]]) -> str | None:
    """Returns the name of a bound that the library would let out, of numbers that may have to satisfy several of these
    bounds: a whole number that is excluded, where another bound is less than 1 away on the side that is allowed.
    """
    for name, next_whole, others in (
        ("exclusiveMinimum", math.floor, ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", math.ceil, ("minimum", "exclusiveMinimum")),
    ):
        excluded = {one[name] for one in bounds if one.get(name, 0.5) % 1 == 0}
        ends = [one[other] for one in bounds for other in others if other in one]
        if not excluded.isdisjoint(next_whole(end) for end in ends if end % 1):
            return name
    return None


def _whole(schema: dict[str, Json]) -> dict[str, Json]:
    low, high = -LIMIT, LIMIT
    if "minimum" in schema:
        low = max(low, math.ceil(schema["minimum"]))
    if "exclusiveMinimum" in schema:
        low = max(low, math.floor(schema["exclusiveMinimum"]) + 1)
    if "maximum" in schema:
        high = min(high, math.floor(schema["maximum"]))
    if "exclusiveMaximum" in schema:
        high = min(high, math.ceil(schema["exclusiveMaximum"]) - 1)
    return {"minimum": int(_inward(low, math.inf)), "maximum": int(_inward(high, -math.inf))}


def _any(schema: dict[str, Json], at: str) -> dict[str, Json]:
    bounds: dict[str, Json] = {}
    for name in KEYWORDS[:4]:
        if name in schema:
            far = abs(schema[name]) > LIMIT
            bound = 0.0 if far else _inward(schema[name], -math.inf if name.lower().endswith("maximum") else math.inf)
            if far or -Decimal(str(bound)).as_tuple().exponent > MAX_DECIMALS:  # type: ignore[operator]  # a finite number has a numeric exponent
                raise SchemaError(f"{at}/{name}", f"A bound has at most 18 digits and {MAX_DECIMALS} decimals.")
            bounds[name] = schema[name] if schema[name] == bound else int(bound)
    return bounds


def _inward(bound: float, end: float) -> float:
    """Returns the float that holds the bound, or the next one towards `end`."""
    held = float(bound)
    return held if held == bound or (held < bound) == (end < 0) else math.nextafter(held, end)


def _step(value: float, at: str) -> float:
    """Returns a step that the library reads exactly: it multiplies a float by ten until it is whole."""
    whole, num_decimals = float(min(value, MAX_ROUND_STEP + 1)), 0
    while whole % 1 and num_decimals < MAX_DECIMALS:
        whole, num_decimals = whole * 10, num_decimals + 1
    if not _is_small(int(whole)) or Fraction(int(whole), 10**num_decimals) != Fraction(str(value)):
        raise SchemaError(
            f"{at}/multipleOf",
            f"This step cannot be enforced. It must be above 0, at most {MAX_STEP} units of its last decimal (round "
            f"ones up to {MAX_ROUND_STEP}), and exact as a float, as 0.01 and 250 are.",
        )
    return value


def have_common_multiple(steps: list[float]) -> bool:
    """Returns whether the library can find the common multiple of steps that hold together."""
    exact = [Decimal(str(step)).normalize() for step in dict.fromkeys(steps)]
    num_decimals = max((-int(one.as_tuple().exponent) for one in exact), default=0)
    common = 1
    for one in exact:
        scaled = int(one.scaleb(max(0, num_decimals)))
        if common * scaled >= _MAX_COMMON:
            return False
        common = math.lcm(common, scaled)
    return _is_small(common)


def _is_small(step: int) -> bool:
    odd = step
    for factor in (2, 5):
        while odd and odd % factor == 0:
            odd //= factor
    return 0 < step <= (MAX_ROUND_STEP if odd <= 9 else MAX_STEP)


def is_exact(number: Json) -> bool:
    """Returns whether it is a number that a float holds."""
    if type(number) not in (int, float):
        return False
    try:
        return math.isfinite(held := float(number)) and held == number
    except OverflowError:
        return False
