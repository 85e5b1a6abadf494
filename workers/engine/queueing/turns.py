"""Order in which streams get rows, where a step has fewer rows than there are streams. The module is pure.

Each tenant's stream whose last token is the longest ago comes first, then each tenant's second, and so on. So of n
streams of t tenants every stream has a turn, with r rows in a step after at most n * t / r steps. However many streams
one tenant has, they delay those of another by at most one turn for each tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from workers.engine.sequences.sequence import Sequence


def in_turn(running: Iterable[Sequence]) -> list[Sequence]:
    """Returns the sequences in the order of their turns. O(n log n)."""
    num_before: Counter[str] = Counter()
    turns: dict[Sequence, tuple[int, int]] = {}
    for sequence in sorted(running, key=attrgetter("last_step")):
        tenant = sequence.attempt.message.tenant
        turns[sequence] = num_before[tenant], sequence.last_step
        num_before[tenant] += 1
    return sorted(turns, key=turns.__getitem__)
