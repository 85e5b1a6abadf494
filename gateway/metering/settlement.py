"""The cost of a request's ending, and who bears it: the table of metering.md section 8 as one total function. The
module is pure.

It knows outcomes and token counts; no rates, no journal, no client.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from accounting.values.types import LastingFacts, Outcome, Usage, WriteOffReason

_FREE: dict[Outcome, WriteOffReason] = {
    "internal": "internal",
    "worker_lost": "worker_crash",
    "drain": "drain",
    "lease_lost": "lease_lost",
    "batch_cancelled": "batch_cancelled",
    "gateway_crash": "gateway_crash",
}
"""Outcomes for which the tenant pays nothing, whatever was computed: our errors, and a line that will
not be delivered.
"""


def unstored(facts: LastingFacts) -> Outcome:
    """Returns the outcome under an idempotency key without a stored answer. Only a stored answer is delivered and paid.
    A batch line's key is taken away when its batch is stopped.
    """
    return "internal" if facts.batch_id is None else "batch_cancelled"


class Ending(msgspec.Struct, frozen=True):
    """A decided ending. `outcome` is the one that is recorded: it may differ from the one claimed (see `decide`)."""

    kind: Literal["settle", "void"]
    outcome: Outcome
    billed: Usage
    write_off: WriteOffReason
    """The reason for the write-off of engine tokens beyond `billed`."""


def decide(
    outcome: Outcome, usage: Usage, *, engine_final: bool, max_output: int | None = None, is_unwitnessed: bool = False
) -> Ending:
    """Decides an ending. The first terminal event decides; call it once.

    `usage` is the engine's own if `engine_final` (its Finished or Failed has arrived); otherwise it is the prompt
    counts of the first delta and the output tokens received by the gateway. `max_output` is the abort bound, beyond
    which a client that left does not pay (equation I12); None means that it is not exceeded. `is_unwitnessed`: the answer
    is whole, and its last worker was lost before it could count it.
    """
    if outcome == "ok":
        # A request without the engine's final event has not ended well: the last chunk waits for that event.
        if not engine_final:
            return _free("worker_lost")
        return Ending("settle", "ok", usage, "worker_crash" if is_unwitnessed else "resume")
    if outcome == "client_gone":
        return _client_gone(usage, engine_final, max_output)
    return _free(outcome)


def _client_gone(usage: Usage, engine_final: bool, max_output: int | None) -> Ending:
    """A client that left pays for what was computed for it. If the worker was lost, it pays for what had reached the
    gateway, up to the bound.
    """
    if max_output is not None and usage.output > max_output:
        usage = msgspec.structs.replace(usage, output=max_output)
    if not engine_final:
        if usage.output == 0:
            return Ending("void", "client_gone", Usage(), "worker_crash")
        return Ending("settle", "client_gone", usage, "worker_crash")
    if usage.total == 0:
        return Ending("void", "client_gone", Usage(), "late_abort")
    return Ending("settle", "client_gone", usage, "late_abort")


def _free(outcome: Outcome) -> Ending:
    return Ending("void", outcome, Usage(), _FREE[outcome])
