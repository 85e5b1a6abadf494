"""The file that carries the names of what was cached from one process of a slot to the next.

Written when a process ends in order, read and deleted when the next begins; used only where the root has changed. Without
it nothing is wrong: a miss says `cold` instead of `version`.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cache.prefix_cache import PrefixCache
from cache.tree.predecessor import Predecessor, names


class _Left(msgspec.Struct, frozen=True):
    root: str
    block_size: int
    names: bytes


def leave(path: Path, cache: PrefixCache, root: str) -> None:
    """Raises nothing: a full disk must not spoil a clean end."""
    left = _Left(root, cache.block_size, names(cache.owners.tree))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(left))
    except OSError:
        path.unlink(missing_ok=True)


def take(path: Path, cache: PrefixCache, root: str) -> None:
    """Gives the cache its predecessor, if there is one and it had another root."""
    try:
        data = path.read_bytes()
        path.unlink()
        left = msgspec.msgpack.decode(data, type=_Left)
    except (OSError, msgspec.MsgspecError):
        return
    if left.root != root and left.block_size == cache.block_size:
        cache.predecessor = Predecessor(left.names, left.block_size)
