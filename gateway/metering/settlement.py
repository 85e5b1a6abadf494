"""What a request's ending costs whom: the table of metering.md section 8 as one total function. Pure.

Knows outcomes and token counts; no rates, no journal, no client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from accounting.values.types import Outcome, Usage, WriteOffReason

_FREE: dict[Outcome, WriteOffReason] = {
    "internal": "internal",
    "worker_lost": "worker_crash",
    "drain": "drain",
    "quarantine": "quarantine",
    "lease_lost": "lease_lost",
    "batch_cancelled": "batch_cancelled",
    "gateway_crash": "gateway_crash",
}
"""Our error, or a line that will not be delivered: whatever was computed, the tenant pays nothing."""


@dataclass(frozen=True)
class Ending:
    """`outcome` is the one that is recorded: it may differ from the one claimed (see `decide`)."""

    kind: Literal["settle", "void"]
    outcome: Outcome
    billed: Usage
    write_off: WriteOffReason
    """For engine tokens beyond `billed`."""


def decide(outcome: Outcome, usage: Usage, *, engine_final: bool, max_output: int | None = None) -> Ending:
    """The first terminal event decides; call it once.

    `usage`: the engine's own if `engine_final` (its Finished or Failed has arrived), else the prompt counts of the
    first delta and the output tokens received by the gateway. `max_output`: the abort bound, beyond which a client
    that left does not pay (equation I12); None: not exceeded.
    """
    if outcome == "ok":
        # Without the engine's final there is no good end: the last chunk waits for it.
        return Ending("settle", "ok", usage, "resume") if engine_final else _free("worker_lost")
    if outcome == "client_gone":
        return _client_gone(usage, engine_final, max_output)
    return _free(outcome)


def _client_gone(usage: Usage, engine_final: bool, max_output: int | None) -> Ending:
    """Pays what was computed for it; of a lost worker's work what had reached the gateway."""
    if not engine_final:
        if usage.output == 0:
            return Ending("void", "client_gone", Usage(), "worker_crash")
        return Ending("settle", "client_gone", usage, "worker_crash")
    if max_output is not None and usage.output > max_output:
        usage = msgspec.structs.replace(usage, output=max_output)
    if usage.total == 0:
        return Ending("void", "client_gone", Usage(), "late_abort")
    return Ending("settle", "client_gone", usage, "late_abort")


def _free(outcome: Outcome) -> Ending:
    return Ending("void", outcome, Usage(), _FREE[outcome])
