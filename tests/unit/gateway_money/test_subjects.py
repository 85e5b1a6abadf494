"""What binds a key is made once: each request gets what a fresh look at the key's rules gives, and a key that was read anew
gets its new rules."""

from __future__ import annotations

import msgspec
import pytest

from accounting.values.budget_types import Budget, Quota
from accounting.values.types import Limits, Principal, Tier
from gateway.limiter.rules import LimitSubject, Subjects

NOW_MS = 1_700_000_000_000
KEY = Principal(
    "tenant",
    "proj_1",
    "key_1",
    frozenset({"chat"}),
    key_limits=Limits(requests_per_minute=5, tokens_per_minute=None, concurrency=2),
    tenant_limits=Limits(requests_per_minute=50, tokens_per_minute=1000, concurrency=None),
    quotas=(
        Quota("end_user", "", "requests_per_minute", 3, False),
        Quota("tenant", "", "input_tokens_per_minute", 70, True),
        Quota("key", "key_1", "batch_tokens_per_day", 900, False),
    ),
    budgets=(Budget(id="budget_1", tenant_id="proj_1", period="month", limit_micro_units=10),),
)
MADE_OF_RULES = ("window_rules", "running_rules", "windows", "limits", "running")


def seen(subject: LimitSubject) -> dict[str, object]:
    return {name: getattr(subject, name) for name in (*LimitSubject.__dataclass_fields__, *MADE_OF_RULES)}


@pytest.mark.parametrize("tier", ["interactive", "batch"])
@pytest.mark.parametrize("end_user", ["", "ann", "bob"])
def test_each_request_gets_what_a_fresh_look_gives(tier: Tier, end_user: str) -> None:
    subjects = Subjects()
    for number in range(3):
        asked = (f"req_{number}", KEY, "m-8b", tier)
        now_ms = NOW_MS + number * 40 * 86_400_000  # the budget's period is another one
        found = subjects.of(*asked, now_ms=now_ms, end_user=end_user)
        assert seen(found) == seen(LimitSubject.of(*asked, now_ms=now_ms, end_user=end_user))


def test_two_requests_share_no_fact_of_their_own() -> None:
    subjects = Subjects()
    first = subjects.of("req_1", KEY, "m-8b", "interactive", now_ms=NOW_MS)
    second = subjects.of("req_2", KEY, "m-8b", "interactive", now_ms=NOW_MS + 5)
    assert (first.request_id, first.opened_ms) == ("req_1", NOW_MS)
    assert (second.request_id, second.opened_ms) == ("req_2", NOW_MS + 5)


def test_a_key_that_was_read_anew_has_its_new_rules_at_once() -> None:
    subjects = Subjects()
    subjects.of("req_1", KEY, "m-8b", "interactive", now_ms=NOW_MS)
    changed = msgspec.structs.replace(KEY, key_limits=Limits(requests_per_minute=1), quotas=())
    found = subjects.of("req_2", changed, "m-8b", "interactive", now_ms=NOW_MS)
    assert [rule.limit for rule in found.rules if rule.level == "key"] == [1]
    assert seen(found) == seen(LimitSubject.of("req_2", changed, "m-8b", "interactive", now_ms=NOW_MS))


@pytest.mark.parametrize("name", ["m-8b:legal", "m-8b:overflow"])
def test_a_name_made_of_a_model_has_the_models_limits_and_the_budgets_of_both(name: str) -> None:
    budgets = tuple(
        Budget(id=f"of {model}", tenant_id="proj_1", period="month", limit_micro_units=10, model=model)
        for model in ("m-8b", name, "other", "m-8b:other")
    )
    key = msgspec.structs.replace(KEY, model_limits=(("m-8b", Limits(concurrency=7)),), budgets=budgets)
    subjects = Subjects()
    base = subjects.of("req_1", key, "m-8b", "interactive", now_ms=NOW_MS)
    found = subjects.of("req_2", key, name, "interactive", base="m-8b", now_ms=NOW_MS)
    assert (found.rules, found.places) == (base.rules, base.places)
    assert [use.budget.id for use in found.budgets] == ["of m-8b", f"of {name}"]
    assert [use.budget.id for use in base.budgets] == ["of m-8b"]


def test_a_model_that_becomes_an_adapters_base_is_another_subject() -> None:
    subjects = Subjects()
    alone = subjects.of("req_1", KEY, "m-8b:legal", "interactive", now_ms=NOW_MS)
    adapter = subjects.of("req_2", KEY, "m-8b:legal", "interactive", base="m-8b", now_ms=NOW_MS)
    assert alone.places != adapter.places
    assert seen(adapter) == seen(LimitSubject.of("req_2", KEY, "m-8b:legal", "interactive", base="m-8b", now_ms=NOW_MS))


def test_only_so_many_keys_are_remembered() -> None:
    subjects = Subjects(most=2)
    for number in range(5):
        key = msgspec.structs.replace(KEY, key_id=f"key_{number}")
        assert subjects.of("req", key, "m-8b", "interactive", now_ms=NOW_MS).key_id == f"key_{number}"
    assert len(subjects._known) == 2
