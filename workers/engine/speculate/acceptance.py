"""Acceptance rate of the proposals for one sequence. It decides how many to make, and when to stop for a while. The
module is pure."""

from __future__ import annotations

WEIGHT = 0.2
"""Weight of the newest proposal in the moving average."""
LEAST_RATE = 0.3
"""Smallest useful acceptance rate. Below it, a proposal costs more than it saves."""
FIRST_RATE = 0.5
"""Acceptance rate with which a sequence begins. Two or three misses end a first try, so a text that repeats nothing
pays for those only."""
RETRY_TOKENS = 64
FEWEST = 3


class Acceptance:
    __slots__ = ("_length", "_quiet_until", "rate")

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        """Moving average of accepted tokens divided by proposed ones."""
        self._length = FEWEST
        self._quiet_until = 0

    def num_wanted(self, num_tokens: int, most: int) -> int:
        """Returns the number of proposals for a sequence of `num_tokens`. It is 0 while the sequence gets none."""
        return min(self._length, most) if num_tokens >= self._quiet_until else 0

    def observe(self, num_proposed: int, num_accepted: int, num_tokens: int) -> None:
        """Records how many tokens of the last proposal were accepted; the sequence is `num_tokens` long now. The length
        doubles after a proposal that was right to its end. It returns to its least value after one of which less than
        half was right."""
        self.rate += WEIGHT * (num_accepted / num_proposed - self.rate)
        if num_accepted == num_proposed:
            self._length = max(FEWEST, 2 * num_proposed)
        elif 2 * num_accepted < num_proposed:
            self._length = FEWEST
        if self.rate < LEAST_RATE:
            self._quiet_until = num_tokens + RETRY_TOKENS
            self.rate = FIRST_RATE
            self._length = FEWEST
