"""Bounds the bytes of bodies that tenants may send and hold here, counted as they arrive, before they are parsed.

Held bytes belong to requests that have not ended. One tenant may hold no more than what is left for all others
(Choudhury and Hahne, 1998), so the bound on all holds, and the next tenant always finds space. The clock is given.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from accounting.values.types import Principal
from gateway.base import errors
from gateway.base.app_keys import KEY_CONNECTIONS, LIFECYCLE

MINUTE_S = 60.0
RETRY_MS = 1_000
MAX_REMEMBERED = 4096
"""The number of remembered tenants at which those with a full allowance are removed."""

Dimension = Literal["body_bytes_held", "body_bytes_per_minute"]


@dataclass
class _Allowance:
    """The unused part of a minute's bytes; it is refilled evenly."""

    left: float
    at: float


class Intake:
    """The byte accounting of one gateway process."""

    def __init__(self, most_held: int, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_held = most_held
        self._per_minute = per_minute
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._allowances: dict[str, _Allowance] = {}
        self.num_held = 0
        """Held bytes of all tenants."""
        self.num_taken = 0
        """Bytes taken since the start."""
        self.refusals: Counter[Dimension] = Counter()

    def take(self, tenant: str, num_bytes: int, *, counts: bool) -> None:
        """Takes bytes. Raises `ApiError` 429. `counts` says whether they count towards the minute."""
        if self._held[tenant] + num_bytes > self._most_held - self.num_held - num_bytes:
            self.refusals["body_bytes_held"] += 1
            raise self._too_many_held(tenant)
        if counts:
            self._count(tenant, num_bytes)
        self._held[tenant] += num_bytes
        self.num_held += num_bytes
        self.num_taken += num_bytes

    def give_back(self, tenant: str, num_bytes: int) -> None:
        self.num_held -= num_bytes
        self._held[tenant] -= num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def _count(self, tenant: str, num_bytes: int) -> None:
        now, rate = self._clock(), self._per_minute / MINUTE_S
        allowance = self._allowances.get(tenant) or _Allowance(self._per_minute, now)
        left = min(self._per_minute, allowance.left + (now - allowance.at) * rate)
        if num_bytes > left:
            self.refusals["body_bytes_per_minute"] += 1
            raise self._too_many_per_minute(tenant, int(left), (num_bytes - left) / rate)
        if len(self._allowances) >= MAX_REMEMBERED:
            self._forget(now)
        self._allowances[tenant] = _Allowance(left - num_bytes, now)

    def _forget(self, now: float) -> None:
        """Removes tenants whose allowance is full again."""
        rate = self._per_minute / MINUTE_S
        self._allowances = {
            tenant: one
            for tenant, one in self._allowances.items()
            if one.left + (now - one.at) * rate < self._per_minute
        }

    def _too_many_held(self, tenant: str) -> errors.ApiError:
        return _refusal(
            f"Too many bytes of request bodies of project {tenant} are here at the same time. "
            "Wait until running requests have ended, or send smaller ones.",
            "body_bytes_held",
            self._most_held,
            self._held[tenant],
            RETRY_MS,
        )

    def _too_many_per_minute(self, tenant: str, left: int, wait_s: float) -> errors.ApiError:
        used = self._per_minute - left
        return _refusal(
            f"Rate limit reached in project {tenant} on bytes of request bodies per min: "
            f"Limit {self._per_minute}, Used {used}. Please try again in {wait_s:.1f}s.",
            "body_bytes_per_minute",
            self._per_minute,
            used,
            int(wait_s * 1000) + 1,
        )


class Share:
    """The bytes that one request has taken. If there is no tenant, nothing is counted. Bytes are taken only inside of
    `held`, or between `hold` and `let_go`: work that may outlive its request holds the share for itself.
    """

    def __init__(self, intake: Intake, principal: Principal | None) -> None:
        self._intake = intake
        self._principal = principal
        self._num_taken = 0
        self._num_holders = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the bytes for the length of a block."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def hold(self) -> None:
        """Adds a holder, until it calls `let_go`. The bytes are given back when their last holder has let go."""
        self._num_holders += 1

    def let_go(self) -> None:
        self._num_holders -= 1
        if not self._num_holders:
            self._give_back()

    def take_up_to(self, num_bytes: int) -> None:
        """Raises the request's bytes to `num_bytes` in all. The batch runner bounds itself, so its bytes count towards
        no minute. Raises `ApiError` 429.
        """
        assert self._num_holders, "nobody would give these bytes back"
        more = num_bytes - self._num_taken
        if self._principal is None or more <= 0:
            return
        counts = self._principal.kind != "batch"
        self._intake.take(self._principal.tenant_id, more, counts=counts)
        self._num_taken = num_bytes

    def _give_back(self) -> None:
        if self._principal is not None and self._num_taken:
            self._intake.give_back(self._principal.tenant_id, self._num_taken)
        self._num_taken = 0


class Held:
    """A request's place among those of its key, its share of bytes, and the drain that waits for it. All of it is given
    back when its answer is written, or its handler has failed. Raises `ApiError` 429 if its key has no place left.
    """

    def __init__(self, app: web.Application, principal: Principal | None) -> None:
        self._lifecycle = app[LIFECYCLE]
        self._connections = app[KEY_CONNECTIONS]
        self._principal = principal
        self._connections.take(principal)
        self._lifecycle.begin()
        self.share = Share(app[INTAKE], principal)
        self.share.hold()

    def close(self) -> None:
        self.share.let_go()
        self._lifecycle.end()
        self._connections.give_back(self._principal)


def _refusal(message: str, dimension: Dimension, limit: int, used: int, wait_ms: int) -> errors.ApiError:
    told = {"level": "tenant", "dimension": dimension, "limit": limit, "used": used}
    return errors.too_many(message, wait_ms, headgate=told)


INTAKE = web.AppKey("intake", Intake)
SHARE = web.RequestKey("share", Share)
"""The request's share of the bytes that may be held. It is given back when the request has ended."""
HELD = web.RequestKey("held", Held)
"""The things that a request holds after its handler has returned."""
