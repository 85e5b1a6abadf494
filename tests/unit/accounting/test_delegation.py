"""What a key that manages keys may hand out: nothing beyond itself."""

from __future__ import annotations

import msgspec
import pytest

from accounting.access import delegation
from accounting.values.budget_types import Budget, Quota
from accounting.values.errors import NotAllowedError
from accounting.values.tenant_types import ApiKeyInfo
from accounting.values.types import Limits

HOLDER = ApiKeyInfo(
    id="key_h",
    public_id="h",
    kind="live",
    tenant_id="t",
    service_account_id=None,
    name=None,
    scopes=frozenset({"chat", "keys"}),
    models=frozenset({"a", "b"}),
    created_at=0,
    expires_at=100,
    last_used_at=None,
    revoked_at=None,
    limits=Limits(10, 1000, 2),
    addresses=("192.0.2.0/24", "2001:db8::/32"),
)


@pytest.mark.parametrize(
    ("change", "is_within"),
    [
        ({}, True),
        ({"scopes": frozenset()}, True),
        ({"scopes": frozenset({"chat", "batch"})}, False),
        ({"models": frozenset({"a"})}, True),
        ({"models": frozenset()}, True),
        ({"models": frozenset({"a", "c"})}, False),
        ({"models": None}, False),
        ({"addresses": ("192.0.2.7/32",)}, True),
        ({"addresses": ("192.0.2.7/32", "2001:db8:1::/48")}, True),
        ({"addresses": ("192.0.0.0/16",)}, False),
        ({"addresses": ("192.0.2.7/32", "198.51.100.1/32")}, False),
        ({"addresses": ("::/0",)}, False),
        ({"addresses": None}, False),
        ({"expires_at": 99}, True),
        ({"expires_at": 101}, False),
        ({"expires_at": None}, False),
        ({"limits": Limits(10, 999, 1)}, True),
        ({"limits": Limits(11, 1000, 2)}, False),
        ({"limits": Limits(10, None, 2)}, False),
    ],
)
def test_a_key_is_within_another_only_if_it_may_do_no_more(change: dict[str, object], is_within: bool) -> None:
    key = msgspec.structs.replace(HOLDER, id="key_k", **change)
    if is_within:
        delegation.check_within(HOLDER, key)
    else:
        with pytest.raises(NotAllowedError):
            delegation.check_within(HOLDER, key)


def test_a_key_without_bounds_may_hand_out_any_bounds() -> None:
    free = msgspec.structs.replace(HOLDER, models=None, addresses=None, expires_at=None, limits=Limits())
    delegation.check_within(free, HOLDER)
    delegation.check_within(free, free)


def test_what_is_counted_for_one_key_alone_bounds_it() -> None:
    free = msgspec.structs.replace(HOLDER, limits=Limits())
    of_key = Budget(id="b", tenant_id="t", key_id="key_h", period="day", limit_micro_units=1)
    of_tenant = msgspec.structs.replace(of_key, key_id=None)
    of_other = msgspec.structs.replace(of_key, key_id="key_x")
    others = [Quota("key", "key_x", "requests_per_day", 1, False), Quota("tenant", "", "requests_per_day", 1, False)]
    delegation.check_unbounded(free, [of_tenant, of_other], others)
    for holder, budgets, quotas in (
        (HOLDER, [], []),
        (msgspec.structs.replace(free, limits=Limits(concurrency=0)), [], []),
        (free, [of_key], []),
        (free, [], [Quota("key", "key_h", "requests_per_day", 1, False)]),
    ):
        with pytest.raises(NotAllowedError):
            delegation.check_unbounded(holder, budgets, quotas)
