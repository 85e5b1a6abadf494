"""The processor time that the masks of a tenant's grammars may take. The module is pure but for the clock.

Masks are made between the steps of everybody, so the choices of one tenant must not hold up all others. A usual mask
takes a tenth of a millisecond; the library's own bounds let a hostile one take 40, and a request may have 128 choices.
A request that takes too long ends. A guess may not end a request, so masks after guesses are made only while there is time
that the other ones left.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

EACH_S = 0.5e-3
"""Seconds that each mask may take on average."""
SHARE = 0.1
"""Part of the time that a tenant's masks may take beyond that."""
AT_ONCE_S = 1.0
"""Seconds that they may be ahead of both: the first masks of a large grammar take longer than those that follow."""
MAX_TENANTS = 4096


class MaskTime:
    """The time of one tenant's masks beyond what they may take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._drawn = _Excess(clock)
        self._all = _Excess(clock)
        """The time of masks after guesses is in this one alone."""

    def took(self, seconds: float) -> bool:
        """Counts a mask. Returns False if the tenant's masks take too long and this is one of the slow ones."""
        self._all.add(seconds - EACH_S)
        over_s = self._drawn.add(seconds - EACH_S)
        self._drawn.over_s = min(over_s, AT_ONCE_S)
        return seconds <= EACH_S or over_s <= AT_ONCE_S

    def may_guess(self) -> bool:
        """Returns whether a mask may be made after a guess now."""
        return self._all.add(0.0) <= AT_ONCE_S

    def took_guess(self, seconds: float) -> bool:
        """Counts a mask after a guess. Returns False if all masks together take too long."""
        return self._all.add(seconds - EACH_S) <= AT_ONCE_S


class _Excess:
    """A sum of seconds that falls by `SHARE` of the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.over_s = 0.0
        self._clock = clock
        self._counted_at = clock()

    def add(self, seconds: float) -> float:
        now = self._clock()
        self.over_s = max(0.0, self.over_s + seconds - SHARE * (now - self._counted_at))
        self._counted_at = now
        return self.over_s


class MaskTimes:
    """The times of all tenants of a worker; of those beyond `MAX_TENANTS` the one that began nothing for longest is
    forgotten.
    """

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, MaskTime] = OrderedDict()

    def of(self, tenant: str) -> MaskTime:
        found = self._by_tenant.setdefault(tenant, MaskTime())
        self._by_tenant.move_to_end(tenant)
        if len(self._by_tenant) > MAX_TENANTS:
            self._by_tenant.popitem(last=False)
        return found
