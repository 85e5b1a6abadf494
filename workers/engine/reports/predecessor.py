"""The file that passes the names of cached blocks from one process of a slot to the next.

It is written when a process ends in order, and read and deleted when the next begins. It is used only where the root
has changed. Without it only one thing differs: a miss has the reason `cold` instead of `version`.
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
    """Writes the file. It raises nothing, because a full disk must not spoil a clean end."""
    left = _Left(root, cache.block_size, names(cache.owners.tree))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(left))
    except OSError:
        path.unlink(missing_ok=True)


def take(path: Path, cache: PrefixCache, root: str) -> None:
    """Reads and deletes the file. It gives the cache its predecessor, if there is one that had another root."""
    try:
        data = path.read_bytes()
        path.unlink()
        left = msgspec.msgpack.decode(data, type=_Left)
    except (OSError, msgspec.MsgspecError):
        return
    if left.root != root and left.block_size == cache.block_size:
        cache.predecessor = Predecessor(left.names, left.block_size)
