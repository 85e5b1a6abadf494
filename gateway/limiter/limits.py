"""The client of the limiter scripts: reserve, extend, settle, release, and a snapshot of what counts now.

It remembers its grants (`open_reservations.py`), so that a state which Redis lost is rebuilt before anything more is
granted (`rebuild.py`); `upkeep.py` repeats endings that Redis did not confirm. It knows integers and opaque ids; no
rates (a ladder has its costs with it), no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from accounting.database.db import Database
from accounting.values.budget_types import Budget
from accounting.values.errors import InvalidError
from gateway.base.redis_link import TIMEOUT_S, Argument, LifeChanged, LimiterUnavailable, NotSent, RedisLink, Script
from gateway.limiter.incidents import Incidents
from gateway.limiter.open_reservations import Ending, OpenReservation, OpenReservations, PendingEnding
from gateway.limiter.rebuild import TERM_MS, Rebuilder
from gateway.limiter.redis_keys import LIFE_PREFIX, script_keys, shadow_key
from gateway.limiter.rules import BudgetUse, LimitSubject, Rule, budget_uses

Ladder = Sequence[tuple[int, int]]
"""(tokens, cost in micro-units) of each rung, largest first."""

TRIES = 5
UNREAD_MS = 1000
"""The wait of a lease that a budget stops which this gateway has not read yet."""


class ReservationEnded(Exception):
    """The limiter knows that this request has ended: nothing more may be spent."""


class Window(NamedTuple):
    """The sum that counts against one limit now, and the time until it is empty."""

    sum: int = 0
    empty_in_ms: int = 0
    open: int = 0
    """Tokens of those requests of the window's place that still run."""


class Money(NamedTuple):
    """Micro-units of one budget row."""

    used: int = 0
    held: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """The answer to `reserve`."""

    now_ms: int
    bound: int
    reserved: int
    failing: Rule | BudgetUse | None
    wait_ms: int
    """Milliseconds until the request would fit; -1 means never."""
    windows: Mapping[str, Window] = msgspec.field(default_factory=dict)
    running: Mapping[Rule, int] = msgspec.field(default_factory=dict)
    money: Mapping[str, Money] = msgspec.field(default_factory=dict)
    shadowed: tuple[Rule | BudgetUse, ...] = ()
    """Shadow limits that would have refused the request."""


@dataclass(frozen=True)
class LeaseGrant:
    bound: int
    wait_ms: int
    reserved: int
    stop: BudgetUse | None = None
    """The budget that cannot pay for one token more."""


@dataclass(frozen=True)
class UsageSnapshot:
    """The sums that count against limits and budgets, read without reserving anything."""

    now_ms: int
    windows: Mapping[str, Window]
    running: Mapping[Rule, int]
    money: Mapping[str, Money]
    shadowed: Mapping[str, int]
    """The requests of the last 7 days, by days in UTC, that each limit in shadow mode would have refused, by its
    `shadow_name`."""


@dataclass
class Fresh:
    """The newest budgets of the tenants that have running requests. They replace the budgets with which those requests
    began.
    """

    version: int = -1
    """A budget that is not among them and is older than this version has been deleted."""
    by_tenant: dict[str, tuple[Budget, ...]] = field(default_factory=dict)

    def uses(self, holder: LimitSubject) -> tuple[BudgetUse, ...]:
        budgets = self.by_tenant.get(holder.tenant_id)
        if budgets is None:
            return holder.budgets
        return budget_uses(budgets, holder.key_id, holder.model, holder.tier, holder.opened_ms)

    def known(self, holder: LimitSubject) -> int:
        return self.version if holder.tenant_id in self.by_tenant else -1


class Limiter:
    def __init__(
        self,
        link: RedisLink,
        slot: int,
        database: Database,
        *,
        caught_up: Callable[[], Awaitable[None]],
        now_ms: Callable[[], int] | None = None,
        books_ms: Callable[[], int] | None = None,
    ) -> None:
        """`caught_up` returns when every ending that is durable now is in SQL. If `now_ms` is None, Redis TIME is used;
        if `books_ms` is None, this machine's clock. Only tests pass clocks.
        """
        self.open_reservations = OpenReservations(slot)
        self.incidents = Incidents(link, database, self.open_reservations, caught_up)
        self.rebuilder = Rebuilder(link, database, self.incidents, slot, now_ms=now_ms, books_ms=books_ms)
        self.fresh = Fresh()
        self.renewals = Counter(dict.fromkeys(("granted", "waits", "stopped", "ended", "unavailable"), 0))
        """The number of calls of `extend` by their result."""
        self._link = link
        self._now_ms = now_ms

    @property
    def num_held(self) -> int:
        return len(self.open_reservations.held)

    @property
    def num_owed(self) -> int:
        """The number of endings that Redis has not confirmed yet. They are repeated each second."""
        return len(self.open_reservations.owed)

    async def reserve(self, holder: LimitSubject, prompt_tokens: int, prompt_cost: int, ladder: Ladder) -> Verdict:
        """Reserves at all levels or at none. Raises LimiterUnavailable; unless that is NotSent, it is unknown whether
        Redis reserved, so the caller must release.
        """
        ask = {
            "id": holder.request_id,
            "slot": self.open_reservations.slot,
            "places": holder.places,
            "limits": holder.limits,
            "running": holder.running,
            "budgets": [use.at(holder.opened_ms) for use in holder.budgets],
            "prompt": prompt_tokens,
            "cost": prompt_cost,
            "term": TERM_MS,
            "ladder": ladder,
        }
        if shadow := holder.shadow_names:
            ask["shadow"] = shadow
        answer = await self._run("reserve", holder, holder.windows, ask)
        if answer[0] == "ended":
            raise ReservationEnded(holder.request_id)
        verdict = _verdict(holder, answer)
        if verdict.failing is None:
            self.open_reservations.held[holder.request_id] = OpenReservation(
                holder, prompt_tokens, verdict.bound, 0, verdict.reserved
            )
        return verdict

    async def extend(
        self, holder: LimitSubject, seq: int, ladder: Ladder, now_ms: int, counted_prompt: int = -1
    ) -> LeaseGrant:
        """Extends a lease. `counted_prompt` is the number of prompt tokens that were not cached, once that is known.
        `now_ms` selects the budgets' limits.
        """
        try:
            grant = await self._extend(holder, seq, ladder, now_ms, counted_prompt)
        except ReservationEnded:
            self.renewals["ended"] += 1
            raise
        except LimiterUnavailable:
            self.renewals["unavailable"] += 1
            raise
        self.renewals["stopped" if grant.stop else "waits" if grant.wait_ms else "granted"] += 1
        return grant

    async def _extend(
        self, holder: LimitSubject, seq: int, ladder: Ladder, now_ms: int, counted_prompt: int
    ) -> LeaseGrant:
        held = self.open_reservations.held.get(holder.request_id)
        if held is None:
            raise ReservationEnded(holder.request_id)
        uses = self.fresh.uses(holder)
        ask = {
            "id": holder.request_id,
            "seq": seq,
            "limits": holder.limits,
            "budgets": [use.at(now_ms) for use in uses],
            "known": self.fresh.known(holder),
            "counted": counted_prompt,
            "term": TERM_MS,
            "ladder": ladder,
        }
        answer = await self._run("extend", holder, holder.windows, ask)
        if answer[0] == "ended":
            raise ReservationEnded(holder.request_id)
        bound, wait_ms, reserved, row = answer[1:]
        held.bound, held.seq, held.reserved = bound, max(seq, held.seq), reserved
        if counted_prompt >= 0:
            held.prompt_tokens = min(held.prompt_tokens, counted_prompt)
        stop = next((use for use in (*uses, *holder.budgets) if use.row == row), None)
        if row and stop is None:  # upkeep reads the budgets each second
            wait_ms = UNREAD_MS
        return LeaseGrant(bound, wait_ms, reserved, stop)

    async def settle(self, holder: LimitSubject, cost: int, input_tokens: int, output_tokens: int) -> None:
        """Ends a request with its cost. This never fails: an ending that Redis does not confirm now is repeated until
        it does.
        """
        self.owe_settle(holder, cost, input_tokens, output_tokens)
        await self.pay(holder.request_id)

    async def release(self, holder: LimitSubject, *, never_admitted: bool = False) -> None:
        """Ends a request without a cost, as reliably as `settle`. If `never_admitted` is set, it does not count as a
        request either.
        """
        self.owe_release(holder, never_admitted=never_admitted)
        await self.pay(holder.request_id)

    def owe_settle(self, holder: LimitSubject, cost: int, input_tokens: int, output_tokens: int) -> None:
        """Begins what `settle` does. One of `pay` and `pay_together` sends it."""
        self._owe("settle", holder, {"cost": cost, "input": input_tokens, "output": output_tokens})

    def owe_release(self, holder: LimitSubject, *, never_admitted: bool = False) -> None:
        """Begins what `release` does, as `owe_settle` does for `settle`."""
        self._owe("release", holder, {"never_admitted": never_admitted})

    async def peek(self, holder: LimitSubject) -> UsageSnapshot:
        """Reads the sums. Raises LimiterUnavailable."""
        windows, running = holder.windows, holder.running_rules
        shadow = [name for name in holder.shadow_names if name]
        ask = {
            "running": [rule.place for rule in running],
            "rows": [use.row for use in holder.budgets],
            "shadow": shadow,
        }
        answer = await self._run("peek", holder, windows, ask)
        _, now_ms, sums, counts, money, shadowed = answer
        return UsageSnapshot(
            now_ms,
            _windows(windows, sums),
            dict(zip(running, counts, strict=True)),
            _money(holder.budgets, money),
            dict(zip(shadow, shadowed, strict=True)),
        )

    async def touch(self) -> None:
        """Moves the expiry of all open reservations."""
        held = [entry.holder for entry in self.open_reservations.held.values()]
        for tenant_id in {holder.tenant_id for holder in held}:
            mine = [holder for holder in held if holder.tenant_id == tenant_id]
            ids = [holder.request_id for holder in mine]
            await self._run("touch", mine[0], (), {"term": TERM_MS, "ids": ids})

    async def pay(self, request_id: str) -> None:
        """Sends Redis an ending that it has not confirmed. A reservation of a lost state is ended once that state is
        rebuilt.
        """
        owed = self.open_reservations.owed.get(request_id)
        if owed is None:  # paid meanwhile
            return
        holder, ask = owed.holder, {"id": request_id, **owed.args}
        try:
            await self._run(owed.ending, holder, holder.windows, ask)
        except LimiterUnavailable:
            return  # repeated later
        self.open_reservations.owed.pop(request_id, None)

    def pay_together(self, request_ids: Iterable[str]) -> Coroutine[Any, Any, None]:
        """Sends Redis these endings at once, in one round trip. What it returns must be awaited: it sees them through."""
        sent: list[tuple[LimitSubject, int, Script | None]] = []
        for request_id in request_ids:
            owed = self.open_reservations.owed.get(request_id)
            if owed is None:  # paid meanwhile
                continue
            holder, epoch, script = owed.holder, self.incidents.of(owed.holder.tenant_id), None
            if self.incidents.is_current:
                try:
                    script = self._begin(owed.ending, holder, holder.windows, epoch, {"id": request_id, **owed.args})
                except NotSent:  # repeated later
                    break
            sent.append((holder, epoch, script))
        return self._see_through(sent)

    async def _see_through(self, sent: list[tuple[LimitSubject, int, Script | None]]) -> None:
        """Pays anew where the state of a tenant has to be read or built first."""
        anew = [
            holder.request_id
            for holder, epoch, script in sent
            if script is None or not await self._confirmed(holder, epoch, script)
        ]
        if anew:
            await asyncio.gather(*(self.pay(request_id) for request_id in anew))

    async def _confirmed(self, holder: LimitSubject, epoch: int, script: Script) -> bool:
        """Says whether an ending needs no other way: it has come, or it is repeated later."""
        try:
            answer = await script()
        except LifeChanged:
            return False
        except LimiterUnavailable:
            return True
        if answer[0] not in ("ok", "none") or not self.incidents.is_in_force(holder.tenant_id, epoch):
            return False
        self.open_reservations.owed.pop(holder.request_id, None)
        return True

    def _owe(self, ending: Ending, holder: LimitSubject, args: dict[str, Any]) -> None:
        self.open_reservations.held.pop(holder.request_id, None)
        self.open_reservations.owed[holder.request_id] = PendingEnding(ending, holder, args)

    async def _run(self, script: str, holder: LimitSubject, windows: Iterable[str], ask: dict[str, Any]) -> list[Any]:
        """Runs one script call. A tenant's state that is lost or belongs to another epoch is rebuilt first. An answer
        under an epoch that is over grants nothing, because the rebuilt state may not contain it.
        """
        windows, tenant_id = tuple(windows), holder.tenant_id
        for number in range(TRIES):
            try:
                epoch = await self.incidents.epoch(tenant_id)
                answer = await self._begin(script, holder, windows, epoch, ask)()
            except LifeChanged:
                continue
            except NotSent as reason:
                if number:  # an earlier try may have been
                    raise LimiterUnavailable(str(reason)) from reason
                raise
            if not self.incidents.is_in_force(tenant_id, epoch):
                continue
            if answer[0] == "inexact":
                raise InvalidError("An amount is beyond what the limiter can count.")
            if answer[0] != "rebuild":
                return answer
            try:
                await self.rebuilder.rebuild(tenant_id, epoch, answer[1])
            except NotSent as reason:
                raise LimiterUnavailable(str(reason)) from reason
        raise LimiterUnavailable("limiter state does not settle")

    def _begin(
        self, script: str, holder: LimitSubject, windows: Iterable[str], epoch: int, ask: dict[str, Any]
    ) -> Script:
        keys = script_keys(holder.tenant_id, holder.request_id, windows)
        if "shadow" in ask:
            keys.append(shadow_key(holder.tenant_id))
        now: Argument = "" if self._now_ms is None else self._now_ms()
        body = msgspec.json.encode({"epoch": epoch, **ask})
        return self._link.begin_script(script, keys, (now, body))


def limiter_link(
    url: str, *, timeout_s: float = TIMEOUT_S, script_ran: Callable[[str, float], None] = lambda *_: None
) -> RedisLink:
    return RedisLink(url, life_key=LIFE_PREFIX, timeout_s=timeout_s, script_ran=script_ran)


def _verdict(holder: LimitSubject, answer: list[Any]) -> Verdict:
    _, now_ms, bound, reserved, failing, wait_ms, sums, running, money, shadowed = answer
    numbered = (*holder.window_rules, *holder.running_rules, *holder.budgets)
    return Verdict(
        now_ms,
        bound,
        reserved,
        numbered[failing - 1] if failing else None,
        wait_ms,
        _windows(holder.windows, sums),
        dict(zip(holder.running_rules, running, strict=True)),
        _money(holder.budgets, money),
        tuple(numbered[number - 1] for number in shadowed),
    )


def _windows(names: Sequence[str], flat: Sequence[int]) -> dict[str, Window]:
    return {name: Window(*flat[3 * i : 3 * i + 3]) for i, name in enumerate(names)}


def _money(uses: Sequence[BudgetUse], flat: Sequence[int]) -> dict[str, Money]:
    return {use.row: Money(*flat[2 * i : 2 * i + 2]) for i, use in enumerate(uses)}
