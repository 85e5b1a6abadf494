"""Readiness of a process: one check for each dependency, and the report over all checks. The functions are pure.

Every message is one sentence that may be shown to anybody: no tenant, no key, no path, no address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError

CLOCK_APART_S = 120.0
"""Clocks of well-kept machines differ by milliseconds."""
MODEL = "model:"
"""The name of a model's check is this prefix and the model's name."""

State = Literal["ok", "degraded", "failing"]


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one dependency. `degraded` means that everything is served, but somebody should look."""

    name: str
    state: State = "ok"
    message: str = ""


class Report(msgspec.Struct, frozen=True):
    """The answer of `/readyz`."""

    status: str
    """`ok`, `degraded`, `starting`, `draining` or `unready`."""
    checks: tuple[Check, ...] = ()

    @property
    def takes_traffic(self) -> bool:
        return self.status in ("ok", "degraded")


def report(checks: Iterable[Check]) -> Report:
    """The process is ready if nothing but models fails, and if at least one of its models is served."""
    found = tuple(checks)
    models = [check for check in found if check.name.startswith(MODEL)]
    others = [check for check in found if check not in models]
    if any(check.state == "failing" for check in others):
        return Report("unready", found)
    if models and all(check.state == "failing" for check in models):
        return Report("unready", found)
    return Report("ok" if all(check.state == "ok" for check in found) else "degraded", found)


def clocks_apart(ahead_s: float) -> str:
    """Returns one sentence that says what to do."""
    way = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"Redis' clock is {abs(ahead_s):.0f} s {way} this machine's: set both by NTP, for limits"
        " count by the one and bills by the other."
    )


def redis_fault(error: Exception) -> str:
    """Describes in one sentence why Redis refused or did not answer."""
    text = str(error)
    if isinstance(error, BusyLoadingError):
        return "Redis is loading its data."
    if "MISCONF" in text or "No space left" in text:
        return "Redis refuses writes: it cannot write to its disk, which may be full."
    if "OOM" in text or "maxmemory" in text:
        return "Redis refuses writes: it has no memory left."
    if "READONLY" in text or "read only" in text:
        return "Redis refuses writes: it is a replica."
    if isinstance(error, ResponseError) and not isinstance(error, ConnectionError):
        return "Redis refuses commands: see the log."
    return "Redis does not answer."
