"""The choice of the grant that pays for each hour. The module is pure: amounts are in micro-units, times in Unix
seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

HOUR_S = 3_600


class Grant(msgspec.Struct, frozen=True):
    id: str
    remaining: int
    priority: int
    starts_at: int
    expires_at: int | None
    """The value is None if the grant never expires."""
    source: str = "cash"
    """Cash is a payment; promotion is a discount."""
    note: str = ""


def allocate(hours: Mapping[int, int], grants: Sequence[Grant], most: int) -> list[tuple[Grant, int]]:
    """Returns the amount that each grant pays of the charges in its time. The lowest priority pays first, then the
    first to end.

    An hour that overlaps a grant's time is paid as a whole. All grants together pay at most `most`.
    """
    unpaid = {hour: charge for hour, charge in sorted(hours.items()) if charge > 0}
    paid: list[tuple[Grant, int]] = []
    for grant in sorted(grants, key=_order):
        amount = 0
        for hour in unpaid:
            if hour + HOUR_S <= grant.starts_at:
                continue
            if grant.expires_at is not None and hour >= grant.expires_at:
                break
            taken = min(unpaid[hour], grant.remaining - amount, most)
            unpaid[hour] -= taken
            amount += taken
            most -= taken
        if amount:
            paid.append((grant, amount))
    return paid


def _order(grant: Grant) -> tuple[int, bool, int, int, str]:
    return (grant.priority, grant.expires_at is None, grant.expires_at or 0, grant.starts_at, grant.id)
