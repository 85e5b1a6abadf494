"""Client of the limiter scripts: reserve, extend, settle, release, and the upkeep of what this gateway holds.

Owns every Redis key name of the limiter and the memory of open reservations, from which a tenant's state is made again
when Redis lost it. Knows integers and opaque ids; no rates (a ladder brings its costs along), no HTTP.

Known gap, for the accounting issue: after Redis lost its data each gateway puts back what it holds itself within a
second, so for that second another gateway's requests are missing, and the minute's requests that had already ended
count no more. Money is unaffected: the ledger never asks the limiter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accounting.types import Limits, Principal, Tier
from gateway.redis_keys import EPOCH_PREFIX, of_space, tenant_space
from gateway.redis_link import (
    TIMEOUT_S,
    Argument,
    EpochChanged,
    LimiterUnavailable,
    RedisLink,
)

log = logging.getLogger(__name__)

Ladder = Sequence[tuple[int, int]]
"""(tokens, cost in micro-units) of each rung, largest first."""

TERM_MS = 60_000
UPKEEP_EVERY_S = 1.0
TOUCH_EVERY = 15
SUSPECTS_EVERY = 30
REBUILD_CHUNK = 200


class ReservationEnded(Exception):
    """The limiter knows this request as ended: nothing more may be spent."""


@dataclass(frozen=True)
class Holder:
    """Who asks: everything the key names and limits of one request are made of."""

    request_id: str
    tenant_id: str
    key_id: str
    key_limits: Limits
    tenant_limits: Limits
    tier: Tier = "interactive"

    @classmethod
    def of(cls, request_id: str, principal: Principal, model: str, tier: Tier) -> Holder:
        """Limits bind tier `batch` only where one names that tier, and none does yet: backlog and fairness bound it.

        A model's limit is held against all that the tenant uses: exact with one model, too strict with several.
        """
        binds = tier != "batch"
        return cls(
            request_id,
            principal.tenant_id,
            principal.key_id,
            principal.key_limits if binds else Limits(),
            principal.limits_on(model) if binds else Limits(),
            tier,
        )

    @property
    def space(self) -> str:
        """Begins all its key names. Counted apart by tier: a batch must not starve its owner's chats."""
        return tenant_space(self.tenant_id, batch=self.tier == "batch")


@dataclass(frozen=True)
class Window:
    """What counts of one limit now, and when nothing of it will."""

    sum: int = 0
    empty_in_ms: int = 0


@dataclass(frozen=True)
class Verdict:
    """The answer to `reserve`. `failing`: 0, or 1-6 for key requests, tokens, concurrency, then the tenant's."""

    now_ms: int
    bound: int
    reserved: int
    failing: int
    wait_ms: int
    """Until it would fit; -1: never."""
    key_requests: Window
    key_tokens: Window
    tenant_requests: Window
    tenant_tokens: Window
    key_running: int
    key_open_tokens: int
    tenant_running: int
    tenant_open_tokens: int


@dataclass(frozen=True)
class LeaseGrant:
    bound: int
    wait_ms: int
    reserved: int


@dataclass
class _Held:
    """What Redis must know about an open request; kept here to tell it again."""

    holder: Holder
    prompt_tokens: int
    bound: int
    seq: int
    reserved: int
    opened_s: int


class Limiter:
    """`start()` begins the upkeep, `close()` ends it."""

    def __init__(
        self, link: RedisLink, slot: int, *, now_ms: Callable[[], int] | None = None
    ) -> None:
        self._link = link
        self._slot = slot
        self._now_ms = now_ms  # None: Redis TIME; only tests bring a clock
        self._held: dict[str, _Held] = {}
        self._owed: dict[str, tuple[str, Holder, tuple[Argument, ...]]] = {}
        self._epoch = ""
        self._upkeep: asyncio.Task[None] | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_owed(self) -> int:
        """Endings that Redis has not confirmed yet; repeated each second."""
        return len(self._owed)

    async def reserve(
        self, holder: Holder, prompt_tokens: int, prompt_cost: int, ladder: Ladder
    ) -> Verdict:
        """All levels or none. Raises LimiterUnavailable; then it is unknown whether it was taken: release it."""
        answer = await self._run(
            "reserve", holder, (*_KEYS, "kr", "kt", "tr", "tt"),
            holder.request_id, self._slot, holder.key_id,
            *_limit_args(holder.key_limits), *_limit_args(holder.tenant_limits),
            prompt_tokens, prompt_cost, TERM_MS, *_flat(ladder),
        )  # fmt: skip
        if answer[0] == b"ended":
            raise ReservationEnded(holder.request_id)
        verdict = _verdict(answer)
        if answer[0] == b"ok":
            self._held[holder.request_id] = _Held(
                holder, prompt_tokens, verdict.bound, 0, verdict.reserved, verdict.now_ms // 1000
            )
        return verdict

    async def extend(
        self, holder: Holder, seq: int, ladder: Ladder, counted_prompt: int = -1
    ) -> LeaseGrant:
        """`counted_prompt`: prompt tokens that were not cached, once that is known."""
        held = self._held.get(holder.request_id)
        if held is None:
            raise ReservationEnded(holder.request_id)
        answer = await self._run(
            "extend", holder, (*_KEYS, "kt", "tt"), holder.request_id, seq,
            _limit(holder.key_limits.tokens_per_minute), _limit(holder.tenant_limits.tokens_per_minute),
            counted_prompt, TERM_MS, *_flat(ladder),
        )  # fmt: skip
        if answer[0] == b"ended":
            raise ReservationEnded(holder.request_id)
        grant = LeaseGrant(*answer[1:])
        held.bound, held.seq, held.reserved = grant.bound, max(seq, held.seq), grant.reserved
        if counted_prompt >= 0:
            held.prompt_tokens = min(held.prompt_tokens, counted_prompt)
        return grant

    async def settle(
        self, holder: Holder, cost: int, input_tokens: int, output_tokens: int
    ) -> None:
        """Never fails: what Redis does not confirm now is repeated until it does."""
        await self._end("settle", holder, (cost, input_tokens, output_tokens))

    async def release(self, holder: Holder, *, never_admitted: bool = False) -> None:
        """As `settle`. `never_admitted`: it does not count as a request either."""
        await self._end("release", holder, (int(never_admitted),))

    async def start(self) -> None:
        """Gives back what an earlier process of this slot left open, then keeps up. The journal is replayed before.

        Without Redis this waits for nothing: what is left becomes suspect, and the upkeep finds it.
        """
        try:
            await self.release_orphans("+inf")  # nothing is held yet
        except LimiterUnavailable as reason:
            log.warning("reservations of an earlier process are not given back yet: %s", reason)
        self._upkeep = asyncio.create_task(self._keep_up())

    async def close(self) -> None:
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)

    async def release_orphans(self, until_ms: str) -> None:
        """Ends this slot's reservations whose expiry lies before `until_ms` and that nobody here holds.

        While requests are admitted only suspect ones may be looked for: one being reserved right now is not held yet.
        """
        cursor = 0
        while True:
            answer = await self._link.command(
                "SCAN", cursor, "MATCH", tenant_space("*") + "*:open", "COUNT", 1000
            )
            for name in answer[1]:
                await self._release_not_held(name.decode().removesuffix(":open"), until_ms)
            cursor = int(answer[0])
            if cursor == 0:
                return

    async def touch(self) -> None:
        """Moves the expiry of everything held; what Redis does not know it is told again."""
        for space, held in self._held_by_space().items():
            ids = [entry.holder.request_id for entry in held]
            answer = await self._run("touch", held[0].holder, _KEYS[:2], TERM_MS, *ids)
            if len(answer) > 1:
                await self._rebuild(space)

    async def _end(self, script: str, holder: Holder, args: tuple[Argument, ...]) -> None:
        self._held.pop(holder.request_id, None)
        self._owed[holder.request_id] = (script, holder, args)
        await self._pay(holder.request_id)

    async def _pay(self, request_id: str) -> None:
        """`rebuild` is a good answer here: what the tenant's state no longer has need not be given back."""
        owed = self._owed.get(request_id)
        if owed is None:  # paid by the upkeep meanwhile
            return
        script, holder, args = owed
        try:
            epoch = await self._link.epoch()
            await self._call(script, holder, _END_KEYS[script], epoch, (request_id, *args))
        except LimiterUnavailable as reason:
            log.info("%s is repeated later: %s", script, reason)
            return
        self._owed.pop(request_id, None)

    async def _run(
        self, script: str, holder: Holder, keys: Sequence[str], *args: Argument
    ) -> list[Any]:
        """One script call; a tenant that Redis does not have, or has from another epoch, is rebuilt first."""
        for _ in range(4):
            try:
                epoch = await self._link.epoch()
                answer = await self._call(script, holder, keys, epoch, args)
                if answer[0] != b"rebuild":
                    return answer
                await self._link.refresh_epoch()
                await self._rebuild(holder.space)
            except EpochChanged:
                continue
        raise LimiterUnavailable("limiter state does not settle")

    async def _call(
        self, script: str, holder: Holder, keys: Sequence[str], epoch: str, args: Iterable[Argument]
    ) -> list[Any]:
        now = "" if self._now_ms is None else self._now_ms()
        return await self._link.script(script, _names(holder, keys), (now, epoch, *args))

    async def _rebuild(self, space: str) -> None:
        held = self._held_by_space().get(space, [])
        now = "" if self._now_ms is None else self._now_ms()
        for start in range(0, max(1, len(held)), REBUILD_CHUNK):
            keys = [f"{space}:s", f"{space}:open"]
            args: list[Argument] = [now, await self._link.epoch(), self._slot, TERM_MS]
            for entry in held[start : start + REBUILD_CHUNK]:
                keys += _names(entry.holder, ("r", "kr", "kt", "tr", "tt"))
                args += [
                    entry.holder.request_id, entry.holder.key_id, entry.prompt_tokens, entry.bound, entry.seq,
                    entry.reserved, entry.opened_s,
                ]  # fmt: skip
            await self._link.script("rebuild", keys, args)

    async def _keep_up(self) -> None:
        """Each second: a new epoch is noticed, owed endings are repeated. Less often: touch, suspects."""
        tick = 0
        while True:
            await asyncio.sleep(UPKEEP_EVERY_S)
            tick += 1
            try:
                await self._follow_epoch()
                for request_id in list(self._owed):
                    await self._pay(request_id)
                if tick % TOUCH_EVERY == 0:
                    await self.touch()
                if tick % SUSPECTS_EVERY == 0:
                    await self.release_orphans(await self._redis_ms())
            except LimiterUnavailable:
                continue  # the next round tries again

    async def _follow_epoch(self) -> None:
        epoch = await self._link.refresh_epoch()
        if epoch != self._epoch:
            for space in self._held_by_space():
                await self._rebuild(space)
            self._epoch = epoch

    async def _release_not_held(self, space: str, until: str) -> None:
        tenant_id, is_batch = of_space(space)
        for member in await self._link.command("ZRANGEBYSCORE", f"{space}:open", "-inf", until):
            request_id = member.decode()
            slot, key_id = await self._link.command(
                "HMGET", f"{space}:r:{request_id}", "slot", "key"
            )
            if request_id in self._held or slot != str(self._slot).encode() or key_id is None:
                continue
            await self.release(
                Holder(
                    request_id, tenant_id, key_id.decode(), Limits(), Limits(),
                    "batch" if is_batch else "interactive",
                )
            )  # fmt: skip

    async def _redis_ms(self) -> str:
        seconds, microseconds = await self._link.command("TIME")
        return str(int(seconds) * 1000 + int(microseconds) // 1000)

    def _held_by_space(self) -> dict[str, list[_Held]]:
        by_space: dict[str, list[_Held]] = defaultdict(list)
        for entry in self._held.values():
            by_space[entry.holder.space].append(entry)
        return by_space


def limiter_link(url: str, *, timeout_s: float = TIMEOUT_S) -> RedisLink:
    return RedisLink(url, epoch_key=EPOCH_PREFIX, timeout_s=timeout_s)


_KEYS = ("s", "open", "r")
_END_KEYS = {
    "settle": (*_KEYS, "kt", "tt"),
    "release": (*_KEYS, "kt", "tt", "kr", "tr"),
}


def _names(holder: Holder, kinds: Sequence[str]) -> list[str]:
    """Key names; all keys of a tenant lie in one hash slot."""
    space = holder.space
    names = {
        "s": f"{space}:s",
        "open": f"{space}:open",
        "r": f"{space}:r:{holder.request_id}",
        "kr": f"{space}:w:{holder.key_id}:requests",
        "kt": f"{space}:w:{holder.key_id}:tokens",
        "tr": f"{space}:w:t:requests",
        "tt": f"{space}:w:t:tokens",
    }
    return [names[kind] for kind in kinds]


def _limit(limit: int | None) -> int:
    return -1 if limit is None else limit


def _limit_args(limits: Limits) -> tuple[int, int, int]:
    return (
        _limit(limits.requests_per_minute),
        _limit(limits.tokens_per_minute),
        _limit(limits.concurrency),
    )


def _flat(ladder: Ladder) -> list[int]:
    return [number for rung in ladder for number in rung]


def _verdict(answer: list[Any]) -> Verdict:
    now_ms, bound, reserved, failing, wait_ms = answer[1:6]
    sums = [Window(answer[i], answer[i + 1]) for i in range(6, 14, 2)]
    return Verdict(
        now_ms,
        bound,
        reserved,
        failing,
        wait_ms,
        sums[0],
        sums[1],
        sums[2],
        sums[3],
        *answer[14:18],
    )
