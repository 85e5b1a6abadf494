"""Every key and channel name of a gateway in Redis; those of the worker registry are in workers/protocol/registry.py.

Names are built from ids that accounting made and fixed words only: no text of a client enters one.
"""

from __future__ import annotations

LIFE_PREFIX = "hg:life:"
"""+ the server's run id: which life of its data this is."""
REVOKED_CHANNEL = "hg:revoked"
"""Any message: identities changed, forget what you remember."""

_TENANT_PREFIX = "hg:{t:"


def tenant_space(tenant_id: str) -> str:
    """Begins all limiter keys of a tenant. The braces put them into one cluster slot."""
    return f"{_TENANT_PREFIX}{tenant_id}}}"


def state_key(tenant_id: str) -> str:
    return f"{tenant_space(tenant_id)}:s"


def open_key(tenant_id: str) -> str:
    return f"{tenant_space(tenant_id)}:open"


def reservation_key(tenant_id: str, request_id: str) -> str:
    return f"{tenant_space(tenant_id)}:r:{request_id}"


def window_key(tenant_id: str, window: str) -> str:
    """`window`: as `rules.window_of` names it."""
    return f"{tenant_space(tenant_id)}:w:{window}"


def tenant_of(name: str) -> str:
    """Whose key this is."""
    return name.removeprefix(_TENANT_PREFIX).partition("}")[0]
