"""The limits and budgets that bind a request, and the names under which the limiter counts them. The module is pure.

A place is anything that is counted separately: an API key, the tenant, one of its models, one of its end users. Tier
`batch` has its own places, so that a batch cannot starve its owner's chats. It knows no Redis and no answer to a
client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from accounting.values.budget_types import Budget, Dimension, Level, Period, Quota
from accounting.values.types import DEFAULT_MODEL_LIMITS, Limits, Principal, Tier

DAY_BUCKET_S = 1440
COUNTED: dict[Dimension, tuple[str, int]] = {
    "requests_per_minute": ("requests", 1),
    "tokens_per_minute": ("tokens", 1),
    "input_tokens_per_minute": ("input", 1),
    "output_tokens_per_minute": ("output", 1),
    "requests_per_day": ("requests", DAY_BUCKET_S),
    "batch_tokens_per_day": ("tokens", DAY_BUCKET_S),
}
"""The unit and the seconds per bucket. A window is 60 buckets and the current one. Concurrency has no window."""

_LEVELS: tuple[Level, ...] = ("key", "tenant", "model", "end_user")
_DIMENSIONS: tuple[Dimension, ...] = (*COUNTED, "concurrency")
TENANT = "t"
MAX_SUBJECTS = 4096
"""The most keys whose rules are remembered, about 2 KB each."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One limit on one place."""

    level: Level
    dimension: Dimension
    limit: int
    place: str
    shadow: bool = False

    @property
    def window(self) -> str:
        unit, width_s = COUNTED[self.dimension]
        return window_of(self.place, unit, width_s)

    @property
    def shadow_name(self) -> str:
        """The name under which the refusals of a limit in shadow mode are counted. Those of limits on end users are not:
        there are too many end users.
        """
        if not self.shadow or self.level == "end_user":
            return ""
        return f"run:{self.place}" if self.dimension == "concurrency" else self.window


@dataclass(frozen=True, slots=True)
class BudgetUse:
    """The row of a budget that a request is charged to."""

    budget: Budget
    period: Period

    @property
    def row(self) -> str:
        return row_of(self.budget, self.period)

    @property
    def shadow_name(self) -> str:
        """The name under which the refusals of a budget in shadow mode are counted, whatever its period is."""
        return self.budget.id if self.budget.hardness == "shadow" else ""

    def at(self, now_ms: int) -> list[Any]:
        """Returns the budget row as the scripts take it."""
        budget = self.budget
        start = self.period.start_ms if budget.begins_empty(self.period) else -1
        return [self.row, budget.id, start, budget.limit_at(now_ms), budget.hardness, budget.version]


@dataclass(frozen=True)
class LimitSubject:
    """The subject of a request's limits: the key that asks, and the rules and budgets that bind the request."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str = ""
    """The name under which the request is billed. Budgets go by it."""
    tier: Tier = "interactive"
    opened_ms: int = 0
    rules: tuple[Rule, ...] = ()
    """The rules in the order in which they are checked: windows, then concurrency."""
    budgets: tuple[BudgetUse, ...] = ()
    places: tuple[str, ...] = ()
    """The places that count the request as open."""
    end_user_place: str = ""
    """The last of `places`, if a limit counts the end user."""
    counted_in: tuple[str, ...] = ()
    """The windows in which the request was counted, if another process left it."""

    @classmethod
    def of(
        cls,
        request_id: str,
        principal: Principal,
        model: str,
        tier: Tier,
        *,
        base: str = "",
        now_ms: int = 0,
        end_user: str = "",
    ) -> LimitSubject:
        """`base` is the model whose limits bind the request, if this one is an adapter of it or its overflow."""
        limited = base or model
        places = places_of(principal.key_id, limited, tier, end_user)
        found = tuple(sorted(_rules(principal, limited, tier, places), key=_order))
        end_user_place = places.get("end_user", "")
        used = {rule.place for rule in found}
        if end_user_place not in used:
            end_user_place = ""
        used |= set(list(places.values())[:3])
        return cls(
            request_id,
            principal.tenant_id,
            principal.key_id,
            model,
            tier,
            now_ms,
            found,
            budget_uses(principal.budgets, principal.key_id, model, tier, now_ms),
            tuple(place for place in places.values() if place in used),
            end_user_place,
        )

    @cached_property
    def window_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.dimension != "concurrency")

    @cached_property
    def running_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.dimension == "concurrency")

    @cached_property
    def windows(self) -> tuple[str, ...]:
        """The windows of all limits, each of them once."""
        return self.counted_in or tuple(dict.fromkeys(rule.window for rule in self.window_rules))

    @cached_property
    def limits(self) -> list[tuple[int, int, int]]:
        """The window rules as the scripts take them: the number of the window, the limit, 1 for a shadow."""
        return [(self.windows.index(rule.window) + 1, rule.limit, int(rule.shadow)) for rule in self.window_rules]

    @cached_property
    def running(self) -> list[tuple[str, int, int]]:
        """The rules of concurrency as the scripts take them: the place, the limit, 1 for a shadow."""
        return [(rule.place, rule.limit, int(rule.shadow)) for rule in self.running_rules]

    @cached_property
    def _shadow_names_of_rules(self) -> list[str]:
        return [rule.shadow_name for rule in (*self.window_rules, *self.running_rules)]

    @property
    def shadow_names(self) -> list[str]:
        """The names of the rules and budgets that are counted in shadow mode, as the scripts take them: empty where none
        is, otherwise one for each rule and budget.
        """
        names = [*self._shadow_names_of_rules, *(use.shadow_name for use in self.budgets)]
        return names if any(names) else []

    def of_request(self, request_id: str, opened_ms: int, budgets: tuple[BudgetUse, ...]) -> LimitSubject:
        """Returns the subject of another request of the same key, model and tier. It shares what was made of the rules,
        which a new object would make anew.
        """
        made = object.__new__(LimitSubject)
        vars(made).update(vars(self), request_id=request_id, opened_ms=opened_ms, budgets=budgets)
        return made


class Subjects:
    """The subjects of the keys. The limits of a key are the same until the key is read again, so its subject is made
    once. A limit on end users depends on each request.
    """

    def __init__(self, most: int = MAX_SUBJECTS) -> None:
        self._most = most
        self._known: dict[tuple[str, str, str, Tier], tuple[Principal, LimitSubject]] = {}

    def of(
        self,
        request_id: str,
        principal: Principal,
        model: str,
        tier: Tier,
        *,
        base: str = "",
        now_ms: int,
        end_user: str = "",
    ) -> LimitSubject:
        """Returns what `LimitSubject.of` returns."""
        if end_user and any(quota.level == "end_user" for quota in principal.quotas):
            return LimitSubject.of(request_id, principal, model, tier, base=base, now_ms=now_ms, end_user=end_user)
        key = (principal.key_id, model, base, tier)
        known = self._known.get(key)
        if known is None or known[0] is not principal:
            known = self._known[key] = (principal, _first(principal, model, base, tier))
            if len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        budgets = budget_uses(principal.budgets, principal.key_id, model, tier, now_ms)
        return known[1].of_request(request_id, now_ms, budgets)


def _first(principal: Principal, model: str, base: str, tier: Tier) -> LimitSubject:
    """Returns the subject of no request, with everything made that is made of its rules."""
    subject = LimitSubject.of("", principal, model, tier, base=base)
    _ = subject.limits, subject.running, subject.shadow_names
    return subject


def window_of(place: str, unit: str, width_s: int) -> str:
    return f"{place}:{unit}:{width_s}"


def row_of(budget: Budget, period: Period) -> str:
    return f"{budget.id}@{period.start_ms}"


def places_of(key_id: str, model: str, tier: str, end_user: str = "") -> dict[Level, str]:
    """Returns the place of each level. Its name holds no text of a client or an operator."""
    before = "batch:" if tier == "batch" else ""
    places: dict[Level, str] = {
        "key": before + key_id,
        "tenant": before + TENANT,
        "model": f"{before}m:{_digest(model)}",
    }
    if end_user:
        places["end_user"] = f"{before}u:{_digest(end_user)}"
    return places


def budget_uses(
    budgets: tuple[Budget, ...], key_id: str, model: str | None, tier: str, opened_ms: int
) -> tuple[BudgetUse, ...]:
    """Returns the budget rows that a request opened at this time belongs to."""
    return tuple(
        BudgetUse(budget, period)
        for budget in budgets
        if budget.binds(key_id, model, tier) and (period := budget.period_at(opened_ms)) is not None
    )


def everything_of(
    principal: Principal, models: Sequence[str], tiers: Sequence[Tier], now_ms: int
) -> tuple[LimitSubject, dict[str, str]]:
    """Returns everything that binds the key on any of the models, and the model of each place. This does not serve a
    request.
    """
    rules: dict[Rule, None] = {}
    names: dict[str, str] = {}
    for tier in tiers:
        for model in models:
            places = places_of(principal.key_id, model, tier)
            names[places["model"]] = model
            rules |= dict.fromkeys(_rules(principal, model, tier, places))
    uses = {
        use.row: use for tier in tiers for use in budget_uses(principal.budgets, principal.key_id, None, tier, now_ms)
    }
    holder = LimitSubject(
        "",
        principal.tenant_id,
        principal.key_id,
        opened_ms=now_ms,
        rules=tuple(sorted(rules, key=_order)),
        budgets=tuple(uses.values()),
    )
    return holder, names


def _rules(principal: Principal, model: str, tier: Tier, places: dict[Level, str]) -> Iterator[Rule]:
    """Yields the limits that bind a request. Only limits that name tier `batch` bind a batch."""
    subjects = {"key": principal.key_id, "model": model}
    for quota in principal.quotas:
        names_batch = quota.dimension == "batch_tokens_per_day"
        place = places.get(quota.level)
        if place is not None and quota.subject == subjects.get(quota.level, "") and names_batch == (tier == "batch"):
            yield _rule(quota, place)
    if tier == "batch":
        return
    of_model = dict(principal.model_limits).get(model, DEFAULT_MODEL_LIMITS)
    columns: tuple[tuple[Level, Limits], ...] = (
        ("key", principal.key_limits),
        ("tenant", principal.tenant_limits),
        ("model", of_model),
    )
    for level, limits in columns:
        for dimension in ("requests_per_minute", "tokens_per_minute", "concurrency"):
            limit = getattr(limits, dimension)
            if limit is not None:
                yield Rule(level, dimension, limit, places[level])


def _rule(quota: Quota, place: str) -> Rule:
    return Rule(quota.level, quota.dimension, quota.limit, place, quota.shadow)


def _order(rule: Rule) -> tuple[bool, int, int, int]:
    return (rule.dimension == "concurrency", _LEVELS.index(rule.level), _DIMENSIONS.index(rule.dimension), rule.limit)


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=12).hexdigest()
