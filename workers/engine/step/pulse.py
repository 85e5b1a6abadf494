"""Test step of the engine: one token that belongs to no request. If this step fails too, the failure of a step was not
caused by a request.

The module knows the runner, and takes a block and a device row while the test lasts. No step may be in flight.
"""

from __future__ import annotations

import logging

from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.values.plan import Row, SampleSpec, StepRunner
from workers.protocol.messages import SamplingParams

logger = logging.getLogger(__name__)

TRIES = 3
_TOKEN = 0
"""Token id that every vocabulary has."""
_DRAW = SampleSpec(SamplingParams(seed=0, temperature=0.0), 0, 1, (_TOKEN,), ())


class Pulse:
    def __init__(self, runner: StepRunner, block_tables: BlockTables) -> None:
        self.num_steps = 0
        """Number of test steps that ran."""
        self._runner = runner
        self._block_tables = block_tables

    def beats(self) -> bool:
        """Returns whether the device computes one token in at least one of `TRIES` tries. Without a free block nothing
        is known, and the result is True."""
        with self._block_tables.spare() as spare:
            if spare is None:
                return True
            block, row_id = spare
            row = Row((_TOKEN,), 0, [block], (_DRAW,), row_id=row_id)
            return any(self._computes(row) for _ in range(TRIES))

    def _computes(self, row: Row) -> bool:
        try:
            (result,) = self._runner.launch([row]).collect()
        except Exception:  # whatever it was, a step failed in which no request had a part
            logger.exception("the engine's own step failed", extra={"event": "pulse_failed"})
            return False
        self.num_steps += 1
        return len(result.drawn) == 1
