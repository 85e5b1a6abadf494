"""The batch tier's floor: a share of what is scheduled, so that batch always moves (engine.md 3.3). The module is pure
and knows numbers only.

The share is measured twice, in tokens computed and in tokens drawn, and each sum fades over `WINDOW_S`. Batch is below
its floor where it has less than its share of both. Computed tokens alone would say so while many batch streams run
with one long prompt, and drawn tokens alone while one long batch prompt runs with many streams. A model for vectors draws
nothing, so there computed tokens decide.

An input that is computed in one step may need more than the share of a step, and so may beams, which draw together. For
them the share is saved from step to step until it is enough (deficit round robin, Shreedhar and Varghese 1995).
"""

from __future__ import annotations

import math

SHARE = 0.03
WINDOW_S = 10.0


class BatchFloor:
    def __init__(self, max_running: int) -> None:
        self.num_protected = max(1, int(SHARE * max_running))
        """Number of batch sequences that are neither kept out nor preempted while batch is below its floor."""
        self._at = -math.inf
        self._batch = [0.0, 0.0]
        self._all = [0.0, 0.0]
        self._saved = 0
        """Tokens of steps that were too few for what batch computes next."""

    @property
    def due(self) -> bool:
        """Whether batch is below its floor. A worker that did nothing recently owes batch nothing."""
        counted = [(mine, whole) for mine, whole in zip(self._batch, self._all, strict=True) if whole]
        return bool(counted) and all(mine < SHARE * whole for mine, whole in counted)

    def reserve(self, budget: int, num_whole: int = 0) -> int:
        """Returns the number of a step's tokens that interactive prompts leave to batch while it is below its floor.
        `num_whole` are the tokens of what batch computes next, if that is computed in one step. What is larger than the
        budget gets the whole step in its turn."""
        share = max(1, int(SHARE * budget)) if budget > 1 else 0
        if num_whole <= share:
            return share
        self._saved += share
        if self._saved < num_whole:
            return 0
        self._saved = 0
        return min(budget, num_whole)

    def count(self, now: float, batch: tuple[int, int], interactive: tuple[int, int]) -> None:
        """Counts a planned step: (tokens computed, tokens drawn) of each tier."""
        fade = math.exp((self._at - now) / WINDOW_S)
        self._at = now
        for kind in (0, 1):
            self._batch[kind] = self._batch[kind] * fade + batch[kind]
            self._all[kind] = self._all[kind] * fade + batch[kind] + interactive[kind]
