"""A tenant's limiter state, computed from the books and the gateways' lists: the argument of `rebuild.lua`. The module
is pure.

If a time is not known, the choice goes against the tenant: tokens granted to running requests count from now. The books
have the gateways' time and the limiter has Redis'; `ahead_s` is how far Redis' clock is ahead, in seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from accounting.limits.limiter_books import Recent, Snapshot, Spent, Unposted
from accounting.limits.limiter_state import Running
from accounting.values.model_names import base_of
from gateway.limiter.open_reservations import Detail, detail_of
from gateway.limiter.rules import COUNTED, DAY_BUCKET_S, TENANT, places_of, row_of, window_of

Buckets = Mapping[str, Counter[int]]
"""Window name → the amount in each bucket."""


def windows(snapshot: Snapshot, now_s: int, ahead_s: int = 0) -> Buckets:
    """Returns the tenant's windows. `now_s` is Redis' time."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    units = {"requests", "tokens"} | {COUNTED[d][0] for d in snapshot.dimensions if d in COUNTED}
    for recent in snapshot.recent:
        _count(found, recent, 1, units, ahead_s)
    for recent in snapshot.day:
        _count(found, recent, DAY_BUCKET_S, units, ahead_s)
    for unposted in snapshot.unposted:
        _count_unposted(found, unposted, ahead_s)
    for running in snapshot.running:
        _count_running(found, running, detail_of(running), now_s, ahead_s)
    return {name: buckets for name, buckets in found.items() if any(buckets.values())}


def budgets(snapshot: Snapshot, now_ms: int) -> list[list[Any]]:
    return [
        [
            row_of(spent.budget, spent.period),
            spent.budget.id,
            spent.used + _stands_for(snapshot.unposted, spent),
            spent.budget.limit_at(now_ms),
            spent.budget.hardness,
            spent.budget.version,
        ]
        for spent in snapshot.spent
    ]


def _stands_for(unposted: tuple[Unposted, ...], spent: Spent) -> int:
    """Returns the charge of unposted requests. Their budgets are not known, so they are charged to each of the tenant's
    budgets.
    """
    period = spent.period
    return sum(one.charge for one in unposted if period.start_ms <= one.at_ms < period.end_ms)


def requests(snapshot: Snapshot, now_s: int, ahead_s: int = 0) -> list[dict[str, Any]]:
    return [_request(running, snapshot.spent, now_s, ahead_s) for running in snapshot.running]


def _request(running: Running, spent: tuple[Spent, ...], now_s: int, ahead_s: int) -> dict[str, Any]:
    detail = detail_of(running)
    return {
        "id": running.request_id,
        "slot": running.slot,
        "places": detail.places,
        "rows": [row_of(one.budget, one.period) for one in spent if _is_charged(running, detail, one)],
        "w": detail.windows,
        "input": detail.prompt_tokens,
        "in_s": _opened_s(running, now_s, ahead_s),
        "bound": detail.bound,
        "at_s": now_s,
        "seq": detail.seq,
        "mu": detail.reserved,
    }


def _opened_s(running: Running, now_s: int, ahead_s: int) -> int:
    return min(running.opened_ms // 1000 + ahead_s, now_s)


def _is_charged(running: Running, detail: Detail, spent: Spent) -> bool:
    return (
        spent.budget.binds(detail.key_id, detail.model, detail.tier)
        and spent.period.start_ms <= running.opened_ms < spent.period.end_ms
    )


def _count(found: dict[str, Counter[int]], recent: Recent, width_s: int, units: Collection[str], ahead_s: int) -> None:
    """Counts a finished request in those units that some limit may use. Other units are not counted while requests run
    either. The limits of a base bind its adapters and its overflow, so it is counted in the base's windows, too.
    """
    bucket = -(-(recent.second + ahead_s) // width_s)  # the request may lie in two buckets; the later one is used
    amounts = _amounts(recent.num_requests, recent.input, recent.output)
    names = filter(None, (recent.model, base_of(recent.model)))
    places = {place for name in names for place in places_of(recent.key_id, name, recent.tier).values()}
    for place in (recent.end_user,) if recent.end_user else places:
        for unit in units:
            found[window_of(place, unit, width_s)][bucket] += amounts[unit]


def _count_unposted(found: dict[str, Counter[int]], unposted: Unposted, ahead_s: int) -> None:
    """Counts an unposted request in the tenant's own windows, because its key and model are not known."""
    amounts = _amounts(1, unposted.input, unposted.output)
    for unit, width_s in set(COUNTED.values()):
        bucket = (unposted.at_ms // 1000 + ahead_s) // width_s
        found[window_of(TENANT, unit, width_s)][bucket] += amounts[unit]


def _amounts(num_requests: int, input_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "requests": num_requests,
        "tokens": input_tokens + output_tokens,
        "input": input_tokens,
        "output": output_tokens,
    }


def _count_running(found: dict[str, Counter[int]], running: Running, detail: Detail, now_s: int, ahead_s: int) -> None:
    opened_s = _opened_s(running, now_s, ahead_s)
    for name in detail.windows:
        _, unit, width = name.rsplit(":", 2)
        began, now = opened_s // int(width), now_s // int(width)
        if unit == "requests":
            found[name][began] += 1
        if unit in ("tokens", "input"):
            found[name][began] += detail.prompt_tokens
        if unit in ("tokens", "output"):
            found[name][now] += detail.bound
