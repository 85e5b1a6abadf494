"""The Redis keys of the worker registry and of the KV that workers share, and the value of a registration. The module
is pure.

Redis says only on which address a worker listens. A gateway dials it and from then on judges it by `WorkerStatus` on
the link, so its links outlive Redis. Every key name of the registry is in this file.
"""

from __future__ import annotations

import msgspec

WORKER_KEY_PREFIX = "hg:worker:"
WORKERS = "hg:workers"
"""A set of the names of all workers that were ever registered. A worker that is registered now also has a key. Looking
for those among all keys of a Redis would take longer the more requests ended recently."""
NEWS = "hg:workers:news"
"""The channel on which a worker says that it has registered, so that gateways look at once."""
REGISTRATION_TTL_S = 10
REGISTRATION_REFRESH_S = 2.0

SHARED_ENTRY = "hg:kv:entry:"
"""The prefix of `region:name`. The value is sealed KV."""
SHARED_REGION = "hg:kv:region:"
"""The prefix of a region. The value holds the names in it."""
SHARED_OWNER = "hg:kv:owner:"
"""The prefix of an owner. The value holds the regions it wrote in."""
SHARED_ORDER, SHARED_SIZES, SHARED_TOTAL = "hg:kv:order", "hg:kv:sizes", "hg:kv:bytes"


class Registration(msgspec.Struct, frozen=True):
    worker: str
    """A stable id: `worker-<slot>`."""
    process: str
    address: str
    """An address of the form `unix:/path` or `tcp:host:port`."""
    model: str
    root: str
    pid: int


def worker_key(worker: str) -> str:
    return WORKER_KEY_PREFIX + worker


def encode(registration: Registration) -> bytes:
    return msgspec.json.encode(registration)


def decode(value: bytes) -> Registration:
    """Reads a registration. Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(value, type=Registration)
