"""Every key and channel name of a gateway in Redis; those of the worker registry are in workers/protocol/registry.py.

Names are built from ids that accounting made and fixed words only: no text of a client enters one.
"""

from __future__ import annotations

EPOCH_PREFIX = "hg:epoch:"
"""+ the server's run id: which limiter epoch this Redis process belongs to."""
REVOKED_CHANNEL = "hg:revoked"
"""Any message: identities changed, forget what you remember."""

_TENANT_PREFIX = "hg:{t:"


def tenant_space(tenant_id: str, *, batch: bool = False) -> str:
    """Begins all limiter keys of a tenant. The braces put them into one cluster slot. Tier `batch` is counted apart,
    so that a batch cannot starve its owner's chats."""
    return f"{_TENANT_PREFIX}{tenant_id}}}" + (":batch" if batch else "")


def of_space(space: str) -> tuple[str, bool]:
    """The reverse of `tenant_space`: (tenant id, whether tier batch)."""
    tenant, _, tier = space.partition("}")
    return tenant.removeprefix(_TENANT_PREFIX), bool(tier)
