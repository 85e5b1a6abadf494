"""Keyed hashes that leave the worker: region ids, and the chained group hashes for events, stores and the router.

The only module of this folder that the gateway imports; both sides compute equal hashes from equal inputs and one
deployment secret. Every part is length-framed, so ("org_1", "2345") and ("org_12345", "") differ. A hash only ever says
where to look: whoever finds something compares tokens before using it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

HASH_BYTES = 16
GROUP_TOKENS = 64


def region_id(secret: bytes, *parts: bytes) -> bytes:
    """16 bytes that name a region: level, tenant, key or user, salt, in the caller's order."""
    return _keyed(secret, b"hg-region", b"".join(_framed(part) for part in parts))


def group_hashes(
    secret: bytes,
    root: bytes,
    path: Iterable[tuple[bytes, int]],
    tokens: Sequence[int],
    *,
    block_size: int,
) -> list[tuple[bytes, int]]:
    """(hash, end token) of each whole group of 64 tokens, chained from the root of the KV identity. O(tokens).

    `path` holds (region id, end), end -1 in the last entry, and ends are rounded down to blocks as the cache does it.
    Groups restart where a region begins; the last group of an ended region may be shorter, the last of all is left out.
    """
    if GROUP_TOKENS % block_size:
        raise ValueError(
            f"a group of {GROUP_TOKENS} tokens holds no whole number of blocks of {block_size}"
        )
    data = array("i", tokens)
    if sys.byteorder == "big":
        data.byteswap()
    chain, start, groups = _keyed(secret, b"hg-root", _framed(root)), 0, []
    for region, end in path:
        ended = 0 <= end <= len(data)
        stop = end // block_size * block_size if ended else len(data)
        while start < stop and (ended or start + GROUP_TOKENS <= stop):
            group_end = min(start + GROUP_TOKENS, stop)
            chain = _keyed(
                secret, b"hg-group", chain + _framed(region) + data[start:group_end].tobytes()
            )
            groups.append((chain, group_end))
            start = group_end
        if not ended:
            break
    return groups


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little") + part


def _keyed(secret: bytes, purpose: bytes, data: bytes) -> bytes:
    if not secret:
        raise ValueError("the hashing secret is empty")
    # BLAKE2b takes keys of up to 64 bytes; a longer secret is hashed into one.
    key = secret if len(secret) <= 64 else blake2b(secret).digest()
    return blake2b(data, digest_size=HASH_BYTES, key=key, person=purpose).digest()
