"""Whom to refuse before anything is done for him, because workers would: adaptive throttling, of each tenant and model.

The algorithm is that of "Site Reliability Engineering" (O'Reilly 2016), chapter 21: of what comes, so much is let
through that workers refuse about as many as they take. Nobody is refused here whom workers take; a tenant who sends
twice what they take, or less, hears of them alone, with the times they tell. One who sends ten times as much would
otherwise cost this process, and with it every other tenant, an admission and an ending for each refusal. Who comes
again at the time that a worker told him is let through: a place is kept for him there. Pure; the clock is given.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import islice

ACCEPTS = 2.0
"""The book's K: so many are let through for each that is taken."""
FADE_S = 10.0
"""What is counted fades with this; the book counts two minutes, which a tenant who has calmed down would feel."""
TAKEN_BEFORE = 20.0
"""Counting begins with a worker's first refusal, as if so many had been taken until then."""
OPEN_S = 2.0
"""Without a worker's refusal for so long, everybody is let through."""
GRACE_S = 5.0
"""Workers keep a place so long after the time they told."""
LONGEST_S = 120.0
"""Told to come later than this, clients do not come again, and workers keep no place."""
JITTER = 0.2


@dataclass
class _Refused:
    """Of one tenant and model, as long as workers refuse."""

    at: float
    """Of the last refusal by a worker."""
    after_s: float
    """What it told."""
    num_asked: float = 0.0
    num_taken: float = 0.0
    """Or let through and not refused yet. Both as of `counted_at`, faded."""
    counted_at: float = 0.0
    places: dict[bytes, float] = field(default_factory=dict)
    """When those come again whom a worker told a time."""

    def fade(self, now: float) -> None:
        share = math.exp((self.counted_at - now) / FADE_S)
        self.num_asked *= share
        self.num_taken *= share
        self.counted_at = now


class AdaptiveThrottle:
    def __init__(self, seed: int | None = None) -> None:
        self._refused: dict[tuple[str, str], _Refused] = {}
        self._random = random.Random(seed)  # who is refused, and the spread of returns; nothing is secret

    def is_open(self, tenant: str, model: str, now: float) -> bool:
        """Everybody is let through, and nothing is counted."""
        refused = self._refused.get((tenant, model))
        if refused is not None and now - refused.at > OPEN_S:
            del self._refused[tenant, model]
            return True
        return refused is None

    def refuse(self, tenant: str, model: str, request: bytes, now: float) -> float:
        """Seconds after which to come again; 0: let through. `request`: its fingerprint."""
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
        """By a worker, after it was let through."""
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
    """Of the oldest, as many as come in."""
    for request in list(islice(places, 2)):
        if places[request] + GRACE_S < now:
            del places[request]
