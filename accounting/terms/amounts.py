"""The amounts that a document asks for: whole units of the currency, with the remainder carried to the next one. The module is pure.

Charges are exact micro-units, and nobody can pay a tenth of a cent. For each document

    net - paid + carried_out = total + carried_in

where `total` is what was charged less what was prepaid. `net` and `paid` are whole units, so the remainder
`carried_out` is at most half a unit, and it is the `carried_in` of the tenant's next document. Over all documents of a
tenant the remainders cancel out but for the last one: nothing is lost and nothing is asked for twice. Tax is computed on
`net` and rounded by itself, as the law has it, and `due = net + tax - paid`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WHOLE = 1_000_000
"""A tax rate of 100 %."""


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Micro-units. All but the carried remainders are whole units of the currency."""

    net: int
    """The base of the tax."""
    tax: int
    paid: int
    """The amount that prepaid cash pays."""
    due: int
    carried_in: int
    carried_out: int

    def negated(self, carried_in: int) -> Amounts:
        """Returns the amounts of the document that cancels this one. It takes back the remainder too."""
        return Amounts(
            net=-self.net,
            tax=-self.tax,
            paid=-self.paid,
            due=-self.due,
            carried_in=carried_in,
            carried_out=carried_in - (self.carried_out - self.carried_in),
        )


def of_document(total: int, cash: int, carried_in: int, *, unit: int, tax_rate: int) -> Amounts:
    """`total` is what was charged less all that was prepaid, and `cash` the part of the latter that is a payment and no
    discount."""
    paid = rounded(cash, unit)
    exact = total + paid + carried_in
    net = rounded(exact, unit)
    tax = tax_on(net, tax_rate, unit)
    return Amounts(net=net, tax=tax, paid=paid, due=net + tax - paid, carried_in=carried_in, carried_out=exact - net)


def rounded(amount: int, unit: int) -> int:
    """Rounds half to even, so that halves favour nobody."""
    whole, rest = divmod(amount, unit)
    up = 2 * rest > unit or (2 * rest == unit and whole % 2 == 1)
    return (whole + up) * unit


def tax_on(net: int, tax_rate: int, unit: int) -> int:
    """Returns the tax in whole units. A half is rounded away from zero, as EN 16931 computes it (BR-CO-17)."""
    units = (2 * abs(net) * tax_rate + WHOLE * unit) // (2 * WHOLE * unit)
    return units * unit if net >= 0 else -units * unit


def shares(amounts: Sequence[int], unit: int) -> list[int]:
    """Rounds each amount so that together they are their sum, rounded: the largest remainders get the units that are
    missing."""
    floors = [amount // unit for amount in amounts]
    missing = rounded(sum(amounts), unit) // unit - sum(floors)
    by_rest = sorted(range(len(amounts)), key=lambda i: (-(amounts[i] % unit), i))
    for i in by_rest[:missing]:
        floors[i] += 1
    return [whole * unit for whole in floors]
