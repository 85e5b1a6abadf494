"""The least time that a whole workload can take on a device with two measured ceilings.

The steps are `workers.engine.sizing.capacity`'s, the arithmetic by which a worker sizes itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.sizing.capacity import Ceilings, Served


def workload_s(served: Served, prompts: Sequence[int], outputs: Sequence[int], ceilings: Ceilings) -> float:
    """All at once: every prompt is computed, then each step gives a token to every sequence that is not done."""
    total = sum(served.prefill_s(length, ceilings) for length in prompts)
    for done in range(1, max(outputs)):  # the first token comes with the prefill
        running = [p + done for p, o in zip(prompts, outputs, strict=True) if o > done]
        total += served.decode_s(running, ceilings)
    return total
