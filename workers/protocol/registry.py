"""Where workers are: the Redis keys of the worker registry and the value behind them, and of the KV they share. Pure.

Redis says only where a worker listens. A gateway dials it and from then on judges it by `WorkerStatus` on the
link, so its links outlive Redis. Every key name of the registry is in this file.
"""

from __future__ import annotations

import msgspec

WORKER_KEY_PREFIX = "hg:worker:"
WORKERS = "hg:workers"
"""A set: the names of the workers that were ever here. Who is, has a key: to look for those among all keys of a Redis
takes the longer the more requests ended lately."""
REGISTRATION_TTL_S = 10
REGISTRATION_REFRESH_S = 2.0

SHARED_ENTRY = "hg:kv:entry:"
"""Before `region:name`: a sealed value."""
SHARED_REGION = "hg:kv:region:"
"""Before a region: its names."""
SHARED_OWNER = "hg:kv:owner:"
"""Before an owner: regions it wrote in."""
SHARED_ORDER, SHARED_SIZES, SHARED_TOTAL = "hg:kv:order", "hg:kv:sizes", "hg:kv:bytes"


class Registration(msgspec.Struct, frozen=True):
    worker: str
    """Stable id: `worker-<slot>`."""
    process: str
    address: str
    """`unix:/path` or `tcp:host:port`."""
    model: str
    root: str
    pid: int


def worker_key(worker: str) -> str:
    return WORKER_KEY_PREFIX + worker


def encode(registration: Registration) -> bytes:
    return msgspec.json.encode(registration)


def decode(value: bytes) -> Registration:
    """Raises `msgspec.DecodeError`."""
    return msgspec.json.decode(value, type=Registration)
