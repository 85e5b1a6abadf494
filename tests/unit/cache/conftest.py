from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from cache import invariants
from cache.prefix_cache import PrefixCache
from cache.tree.handle import CommitResult, Handle
from cache.tree.namespaces import NamespacePath

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]


@pytest.fixture
def start() -> Start:
    """A request up to the point where all its tokens are committed; it still runs."""

    def start(
        cache: PrefixCache,
        path: NamespacePath,
        tokens: Sequence[int],
        *,
        read: bool = True,
        tenant: str = "",
        **commit: object,
    ) -> tuple[Handle, CommitResult]:
        handle = cache.acquire(path, tokens, read=read, tenant=tenant)
        num_blocks = -(-len(tokens) // cache.block_size)
        private = cache.allocate(num_blocks - handle.num_tree_blocks)
        assert private is not None, "the test's pool is too small"
        table = [*handle.block_ids, *private]
        result = cache.commit(handle, tokens, table, len(tokens), **commit)
        invariants.check(cache)
        return handle, result

    return start


@pytest.fixture
def serve(start: Start) -> Serve:
    """A whole request, from acquire to release, one step long."""

    def serve(cache: PrefixCache, path: NamespacePath, tokens: Sequence[int], **how: object) -> Handle:
        handle, result = start(cache, path, tokens, **how)
        cache.release(handle, result.block_ids)
        cache.begin_step()
        invariants.check(cache)
        return handle

    return serve
