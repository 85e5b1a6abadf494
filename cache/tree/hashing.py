"""Keyed hashes that leave the worker: region ids, and the chained group hashes for events, stores and the router.

This is the only module of this folder that the gateway imports. Both sides compute equal hashes from equal inputs and
one deployment secret. Every part is preceded by its length, so ("org_1", "2345") and ("org_12345", "") differ. A hash
only says where to look: tokens are compared before anything found is used.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

HASH_BYTES = 16
GROUP_TOKENS = 64


def region_id(secret: bytes, *parts: bytes) -> bytes:
    """Returns 16 bytes that name a region: level, tenant, key or user, salt, in the caller's order."""
    return _keyed(secret, b"hg-region", b"".join(_framed(part) for part in parts))


def store_tag(secret: bytes, *parts: bytes) -> str:
    """Returns a name for a region or a tenant that reveals nothing to a reader of the store."""
    return _keyed(secret, b"hg-store", b"".join(_framed(part) for part in parts)).hex()


def identity(secret: bytes, *parts: bytes) -> bytes:
    """Returns 16 bytes that name a kind of KV: model and layout of a block. An adapter is part of the regions."""
    return _keyed(secret, b"hg-identity", b"".join(_framed(part) for part in parts))


def group_hashes(
    secret: bytes, root: bytes, path: Iterable[tuple[bytes, int]], tokens: Sequence[int], *, block_size: int
) -> list[tuple[bytes, int]]:
    """Returns (hash, end token) of each whole group of 64 tokens, chained from the root of the KV identity. O(tokens).

    `path` holds (region id, end), with end -1 in the last entry, and ends are rounded down to blocks as the cache does
    it. Groups restart where a region begins. The last group of an ended region may be shorter; a shorter group at the
    very end is left out. Raises ValueError if a group is no whole number of blocks.
    """
    if GROUP_TOKENS % block_size:
        raise ValueError(f"a group of {GROUP_TOKENS} tokens holds no whole number of blocks of {block_size}")
    data = array("i", tokens)
    hasher = group_hasher(secret)
    chain, start, groups = root_hash(secret, root), 0, []
    for region, end in path:
        ended = 0 <= end <= len(data)
        stop = end // block_size * block_size if ended else len(data)
        while start < stop and (ended or start + GROUP_TOKENS <= stop):
            group_end = min(start + GROUP_TOKENS, stop)
            chain = group_hash(hasher, chain, region, data[start:group_end])
            groups.append((chain, group_end))
            start = group_end
        if not ended:
            break
    return groups


def root_hash(secret: bytes, root: bytes) -> bytes:
    """Returns the hash with which every chain of one KV identity begins."""
    return _keyed(secret, b"hg-root", _framed(root))


def group_hasher(secret: bytes) -> blake2b:
    """Returns the hasher that `group_hash` copies, so that the key is processed only once."""
    return _hasher(secret, b"hg-group")


def group_hash(hasher: blake2b, before: bytes, region: bytes, tokens: array[int]) -> bytes:
    """Returns the hash of one group that follows everything that hashed to `before`. It takes about 1 us."""
    if sys.byteorder == "big":
        tokens = array("i", tokens)
        tokens.byteswap()
    one = hasher.copy()
    one.update(before + len(region).to_bytes(4, "little") + region + tokens.tobytes())
    return one.digest()


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little") + part


def _keyed(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    hasher = _hasher(secret, purpose)
    hasher.update(data)
    return hasher.digest()


def _hasher(secret: bytes, purpose: bytes) -> blake2b:
    if not secret:
        raise ValueError("the hashing secret is empty")
    # BLAKE2b takes keys of up to 64 bytes; a longer secret is hashed into one.
    key = secret if len(secret) <= 64 else blake2b(secret).digest()
    return blake2b(digest_size=HASH_BYTES, key=key, person=purpose)
