"""A step of the engine's own: one token that is nobody's. If that fails too, it was not the request that failed the step.

Knows the runner, and takes a block and a device row for as long as it lasts. No step may be in flight.
"""

from __future__ import annotations

import logging

from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.values.plan import Row, SampleSpec, StepRunner
from workers.protocol.messages import SamplingParams

logger = logging.getLogger(__name__)

TRIES = 3
_TOKEN = 0
"""Every vocabulary has it."""
_DRAW = SampleSpec(SamplingParams(seed=0, temperature=0.0), 0, 1, (_TOKEN,), ())


class Pulse:
    def __init__(self, runner: StepRunner, block_tables: BlockTables) -> None:
        self.num_steps = 0
        """That ran."""
        self._runner = runner
        self._block_tables = block_tables

    def beats(self) -> bool:
        """Whether the device computes one token, of some tries. Where no block is to be had nothing is known, and
        nothing is held against it."""
        with self._block_tables.spare() as spare:
            if spare is None:
                return True
            block, row_id = spare
            row = Row((_TOKEN,), 0, [block], (_DRAW,), row_id=row_id)
            return any(self._computes(row) for _ in range(TRIES))

    def _computes(self, row: Row) -> bool:
        try:
            (result,) = self._runner.launch([row]).collect()
        except Exception:  # whatever it was, a step failed that no request had a part in
            logger.exception("the engine's own step failed", extra={"event": "pulse_failed"})
            return False
        self.num_steps += 1
        return len(result.drawn) == 1
