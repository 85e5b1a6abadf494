from __future__ import annotations

from accounting.values.budget_types import MAX_AMOUNT, Adjustment, Budget
from accounting.values.tenant_types import ApiKeyInfo
from accounting.values.types import Limits, Principal, Usage


def principal(**changes) -> Principal:
    return Principal(kind="tenant", tenant_id="t", key_id="k", scopes=frozenset(), **changes)


def test_a_principal_can_be_hashed():
    assert hash(principal(model_limits=(("m", Limits(1)),)))


def test_prompt_and_total_are_sums_of_disjoint_parts():
    usage = Usage(1, 2, 4, 8)
    assert (usage.prompt, usage.total) == (7, 15)


def test_a_redacted_key_shows_its_id_and_nothing_of_the_secret():
    info = ApiKeyInfo(
        id="key_1",
        public_id="AAAAAAAAAA",
        kind="test",
        tenant_id="t",
        service_account_id=None,
        name=None,
        scopes=frozenset(),
        models=None,
        created_at=0,
        expires_at=None,
        last_used_at=None,
        revoked_at=None,
        limits=Limits(),
    )
    assert info.redacted_value == "hg_test_AAAAAAAAAA_***"


def test_no_adjustment_raises_a_budget_beyond_the_highest_amount():
    """The limiter refused every request of a budget without end that was raised once more."""
    more = Adjustment(id="a", micro_units=5, from_ms=0, until_ms=10)
    budget = Budget(id="b", tenant_id="t", period="month", limit_micro_units=MAX_AMOUNT, adjustments=(more,))
    assert budget.limit_at(5) == MAX_AMOUNT
