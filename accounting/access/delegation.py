"""The rule by which a tenant's key manages other keys of its tenant: none of them may do more than itself. The module
is pure.

A key may do what its scopes, models, addresses, expiry and limits say. A key that has limits or budgets of its own could
escape them by a second key, because each key is counted by itself. So such a key neither makes nor changes keys.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from accounting.values.budget_types import Budget, Quota
from accounting.values.errors import NotAllowedError
from accounting.values.tenant_types import ApiKeyInfo
from accounting.values.types import Limits

SCOPE = "keys"
"""The scope of a key that manages keys. No key has it unless it was asked for."""


def check_within(holder: ApiKeyInfo, key: ApiKeyInfo) -> None:
    """Raises NotAllowedError if `key` may do something that `holder` may not."""
    for name, is_within in (
        ("scopes", key.scopes <= holder.scopes),
        ("models", holder.models is None or (key.models is not None and key.models <= holder.models)),
        ("addresses", _networks_within(holder.addresses, key.addresses)),
        ("expiry", _is_at_most(key.expires_at, holder.expires_at)),
        ("limits", all(map(_is_at_most, _values(key.limits), _values(holder.limits)))),
    ):
        if not is_within:
            raise NotAllowedError(f"The {name} of that key go beyond those of this API key.")


def check_unbounded(holder: ApiKeyInfo, budgets: Iterable[Budget], quotas: Iterable[Quota]) -> None:
    """Raises NotAllowedError if something is counted for `holder` alone, which another key would not share."""
    is_counted = any(value is not None for value in _values(holder.limits))
    is_counted |= any(budget.key_id == holder.id for budget in budgets)
    is_counted |= any(quota.level == "key" and quota.subject == holder.id for quota in quotas)
    if is_counted:
        raise NotAllowedError("This API key has limits, so it cannot make or change keys, nor make webhooks.")


def check_lasting(holder: ApiKeyInfo) -> None:
    """Raises NotAllowedError if `holder` ends by itself or may ask from some addresses only: what is told to a webhook
    that it made would go beyond both.
    """
    if holder.expires_at is not None or holder.addresses is not None:
        raise NotAllowedError("This API key expires or is bound to addresses, so it cannot make webhooks.")


def _is_at_most(value: int | None, bound: int | None) -> bool:
    return bound is None or (value is not None and value <= bound)


def _values(limits: Limits) -> tuple[int | None, ...]:
    return limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency


def _networks_within(outer: tuple[str, ...] | None, inner: tuple[str, ...] | None) -> bool:
    if outer is None:
        return True
    return inner is not None and all(any(_lies_in(one, other) for other in outer) for one in inner)


def _lies_in(inner: str, outer: str) -> bool:
    small, large = ipaddress.ip_network(inner), ipaddress.ip_network(outer)
    if isinstance(small, ipaddress.IPv4Network) and isinstance(large, ipaddress.IPv4Network):
        return small.subnet_of(large)
    if isinstance(small, ipaddress.IPv6Network) and isinstance(large, ipaddress.IPv6Network):
        return small.subnet_of(large)
    return False
