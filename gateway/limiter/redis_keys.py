"""Every key and channel name of a gateway in Redis. The names of the worker registry are in
workers/protocol/registry.py.

Names are built only from fixed words and from ids that accounting made: no text of a client enters one.
"""

from __future__ import annotations

from collections.abc import Iterable

LIFE_PREFIX = "hg:life:"
"""Prefix of a key that ends in the server's run id; its value names the data life."""
CLAIMS_KEY = "hg:claims"
"""A hash of the claims to build limiter states that are not in SQL yet: `<tenant>@<epoch>`, and who claimed it."""
REVOKED_CHANNEL = "hg:revoked"
"""Any message on this channel means that identities changed and cached ones must be dropped."""

CONSOLE_SESSION = "hg:console:session:"
"""Prefix of a key that holds a session of the console: the API key that signed in, encrypted."""
CONSOLE_SESSIONS = "hg:console:sessions:"
"""Prefix of a key that lists the sessions of one API key, the newest first."""
VERDICT_KEY = "hg:books:verified"
"""The last verdict on the books, as JSON."""
START_PROBE_KEY = "headgate:probe:up"
"""A key that `headgate up` writes for some seconds at its start, to see that Redis takes a write."""

_TENANT_PREFIX = "hg:{t:"


def running_key(slot: int) -> str:
    """Returns the key that exists while a gateway runs in this slot, and for some seconds after it was killed."""
    return f"headgate:probe:{slot}"


def tenant_space(tenant_id: str) -> str:
    """Returns the prefix of all limiter keys of a tenant. The braces put them into one cluster slot."""
    return f"{_TENANT_PREFIX}{tenant_id}}}"


def state_key(tenant_id: str) -> str:
    return f"{tenant_space(tenant_id)}:s"


def open_key(tenant_id: str) -> str:
    return f"{tenant_space(tenant_id)}:open"


def reservation_key(tenant_id: str, request_id: str) -> str:
    return f"{tenant_space(tenant_id)}:r:{request_id}"


def window_key(tenant_id: str, window: str) -> str:
    """Returns the key of a window. `window` is a name made by `rules.window_of`."""
    return f"{tenant_space(tenant_id)}:w:{window}"


def shadow_key(tenant_id: str) -> str:
    """Returns the key that counts what the tenant's limits in shadow mode would have refused."""
    return f"{tenant_space(tenant_id)}:shadow"


def script_keys(tenant_id: str, request_id: str, windows: Iterable[str]) -> list[str]:
    """Returns the keys of a script that knows one request: state, open requests, its reservation, windows."""
    space = tenant_space(tenant_id)
    return [f"{space}:s", f"{space}:open", f"{space}:r:{request_id}", *[f"{space}:w:{window}" for window in windows]]


def tenant_of(name: str) -> str:
    """Returns the id of the tenant that a key belongs to."""
    return name.removeprefix(_TENANT_PREFIX).partition("}")[0]
