"""Answer to the question what a prompt would find in the cache now, and how long it would wait. It changes nothing: no
LRU order, no counter, no reservation."""

from __future__ import annotations

from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import PathEntry
from workers.protocol.messages import CacheProbe, CacheProbed


def probe(message: CacheProbe, root: str, identity: bytes | None, cache: PrefixCache, wait_s: float) -> CacheProbed:
    """Answers a probe. `identity` is that of the adapter, or None if this worker does not have the adapter. `wait_s` is
    how long any request would wait."""
    wait_ms = int(1000 * wait_s)
    if message.root != root or identity is None:
        return CacheProbed(message.peek_id, -1, wait_ms)
    path = tuple(PathEntry(region.id + identity, region.end) for region in message.namespace)
    try:
        num_cached = cache.match(path, message.prompt) if message.cache_read else 0
    except ValueError:  # no request could have this path either
        num_cached = -1
    return CacheProbed(message.peek_id, num_cached, wait_ms)
