"""What a prompt would find here now, and how long it would wait. Changes nothing: no LRU, no counter, no place."""

from __future__ import annotations

from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import PathEntry
from workers.protocol.messages import CacheProbe, CacheProbed


def peek(message: CacheProbe, root: str, identity: bytes | None, cache: PrefixCache, wait_s: float) -> CacheProbed:
    """`identity`: of the adapter, None for one that is not here. `wait_s`: how long it would wait, whatever it is."""
    wait_ms = int(1000 * wait_s)
    if message.root != root or identity is None:
        return CacheProbed(message.peek_id, -1, wait_ms)
    path = tuple(PathEntry(region.id + identity, region.end) for region in message.namespace)
    try:
        num_cached = cache.match(path, message.prompt) if message.cache_read else 0
    except ValueError:  # a path that no request could have either
        num_cached = -1
    return CacheProbed(message.peek_id, num_cached, wait_ms)
