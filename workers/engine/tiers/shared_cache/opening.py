"""Set-up of a worker's shared cache from its settings: the store, the secret, and the identity of its kind of KV."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from cache.prefix_cache import PrefixCache
from cache.tree.hashing import identity
from workers.engine.queueing.forecast import Forecast
from workers.engine.tiers.shared_cache.directory import DirectoryStore
from workers.engine.tiers.shared_cache.shared import SharedTier
from workers.engine.tiers.shared_cache.store import Bounds, Store
from workers.engine.tiers.shared_cache.store_thread import StoreThread
from workers.engine.values.errors import StartError
from workers.engine.values.host_port import HostBlocks
from workers.engine.values.plan import StepRunner

SECRET_BYTES = 32


def open_store(where: str, bounds: Bounds) -> Store:
    """Opens a store. `where` is `/a/directory`, or a `redis://`, `rediss://` or `unix://` URL. Raises `StartError`."""
    if "://" in where:
        from workers.engine.tiers.shared_cache.redis_store import RedisStore

        try:
            return RedisStore(where, bounds)
        except ValueError as error:
            raise StartError(f"HEADGATE_ENGINE_SHARED_CACHE: {error}.") from None
    try:
        return DirectoryStore(Path(where).expanduser(), bounds)
    except OSError as error:
        raise StartError(f"HEADGATE_ENGINE_SHARED_CACHE: {error}.") from None


def read_secret(path: Path) -> bytes:
    """Reads the secret, which the first worker of a home draws. Workers elsewhere are given a copy of the file. Raises
    `StartError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _draw(path)
        secret = path.read_bytes()
    except OSError as error:
        raise StartError(f"The secret of the shared cache: {error}.") from None
    if len(secret) < SECRET_BYTES:
        raise StartError(f"{path} holds less than {SECRET_BYTES} bytes.")
    return secret[:64]


def _draw(path: Path) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
    try:
        os.link(beside, path)  # the first of several workers wins, and its file is whole
    except FileExistsError:
        pass
    finally:
        os.unlink(beside)


def identity_of(secret: bytes, runner: StepRunner, mover: HostBlocks) -> bytes:
    layout = f"{mover.layout} block_size={runner.block_size}"
    return identity(secret, runner.root.encode(), layout.encode())


def open_tier(
    store: Store, secret: bytes, runner: StepRunner, cache: PrefixCache, mover: HostBlocks, prefill: Forecast
) -> SharedTier:
    kind = identity_of(secret, runner, mover)
    return SharedTier(StoreThread(store, secret, kind), cache, mover, secret, kind, prefill)
