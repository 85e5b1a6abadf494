"""Decides which requests to refuse before any work is done for them, because workers would refuse them: adaptive
throttling per tenant and model.

The algorithm is that of "Site Reliability Engineering" (O'Reilly 2016), chapter 21. It lets through as many requests
that workers refuse about as many as they accept. A tenant whom workers accept is never refused here. A tenant who sends
at most twice what workers accept hears refusals from workers alone, with the times they give. A tenant who sends ten
times as much would otherwise cost this process, and with it every other tenant, an admission and an ending for each
refusal. A client that comes again at the time that a worker gave is let through, because a place is kept for it. The
clock is given.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import islice

from aiohttp import web

ACCEPTS = 2.0
"""The book's K: the number of requests let through for each accepted one."""
FADE_S = 10.0
"""The time constant with which the counts fade. The book counts over two minutes; a tenant who has calmed down would
feel that.
"""
TAKEN_BEFORE = 20.0
"""Counting begins at a worker's first refusal, as if this number had been accepted before."""
OPEN_S = 2.0
"""Every request is let through once no worker has refused for this time."""
GRACE_S = 5.0
"""Workers keep a place for this time after the time they gave."""
LONGEST_S = 120.0
"""Clients that are given a longer wait do not come again, and workers keep no place for them."""
JITTER = 0.2


@dataclass
class _Refused:
    """The counts of one tenant and model, kept as long as workers refuse."""

    at: float
    """The time of the last refusal by a worker."""
    after_s: float
    """The wait that the worker gave at that refusal."""
    num_asked: float = 0.0
    num_taken: float = 0.0
    """Requests that workers accepted, or that were let through and are not refused yet. Both counts are faded to
    `counted_at`.
    """
    counted_at: float = 0.0
    places: dict[bytes, float] = field(default_factory=dict)
    """Request fingerprint → the time at which the client should come again, as a worker said."""

    def fade(self, now: float) -> None:
        share = math.exp((self.counted_at - now) / FADE_S)
        self.num_asked *= share
        self.num_taken *= share
        self.counted_at = now


class AdaptiveThrottle:
    def __init__(self, seed: int | None = None) -> None:
        self._refused: dict[tuple[str, str], _Refused] = {}
        self._random = random.Random(seed)  # draws refusals and the spread of waits; nothing here is secret

    def is_open(self, tenant: str, model: str, now: float) -> bool:
        """Returns True while every request is let through and nothing is counted."""
        refused = self._refused.get((tenant, model))
        if refused is not None and now - refused.at > OPEN_S:
            del self._refused[tenant, model]
            return True
        return refused is None

    def refuse(self, tenant: str, model: str, request: bytes, now: float) -> float:
        """Returns the seconds after which to come again, or 0 to let the request through. `request` is
        its fingerprint.
        """
        refused = self._refused.get((tenant, model))
        if refused is None:
            return 0.0
        due = refused.places.get(request, math.inf)
        if now < due < math.inf:
            return due - now
        refused.fade(now)
        refused.num_asked += 1
        excess = refused.num_asked - ACCEPTS * refused.num_taken
        on_time = due < math.inf
        if not on_time and self._random.random() < excess / (refused.num_asked + 1):
            return refused.after_s * self._random.uniform(1 - JITTER, 1 + JITTER)
        refused.places.pop(request, None)
        refused.num_taken += 1
        return 0.0

    def refused(self, tenant: str, model: str, request: bytes, after_s: float, now: float) -> None:
        """Notes that a worker refused a request that was let through."""
        refused = self._refused.get((tenant, model))
        if refused is None:
            refused = self._refused[tenant, model] = _Refused(now, after_s, TAKEN_BEFORE, TAKEN_BEFORE, now)
        refused.at, refused.after_s = now, after_s
        refused.fade(now)
        refused.num_taken = max(0.0, refused.num_taken - 1)
        _lapse(refused.places, now)
        if after_s <= LONGEST_S:
            refused.places[request] = now + after_s


def _lapse(places: dict[bytes, float], now: float) -> None:
    """Removes up to two of the oldest places if they are past their time. So places go at least as fast
    as they come.
    """
    for request in list(islice(places, 2)):
        if places[request] + GRACE_S < now:
            del places[request]


THROTTLE = web.AppKey("throttle", AdaptiveThrottle)
