"""Bugs that other prefix caches had in public (engine.md 2.8), each as the sequence that would show it here."""

from __future__ import annotations

import ast
import random
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

import cache.prefix_cache
import cache.tree.radix
from cache import invariants
from cache.blocks.block_pool import NULL_BLOCK
from cache.prefix_cache import PrefixCache
from cache.tree.handle import CommitResult, Handle
from cache.tree.hashing import group_hashes
from cache.tree.namespaces import PathEntry

Start = Callable[..., tuple[Handle, CommitResult]]
Serve = Callable[..., Handle]
PATH = (PathEntry(b"tenant", -1),)


def test_splits_inside_held_edges_leave_every_count_right(start: Start) -> None:
    """sglang #35270, #35470, mllm #656: evictable counted twice, leaf counts negative after a split."""
    pool = PrefixCache(64, 2)
    first, result = start(pool, PATH, [1] * 16)
    handles = []
    for cut in (12, 8, 4, 2):
        handles.append(start(pool, PATH, [1] * cut + [9] * (16 - cut)))
        invariants.check(pool, [first, *(handle for handle, _ in handles)])
    for handle, table in [(first, result), *handles]:
        pool.release(handle, table.block_ids)
        invariants.check(pool)
    assert pool.num_free + pool.num_evictable == 63
    assert pool.allocate(63) is not None, "an idle cache gives every block back"
    invariants.check(pool, [])


def test_memory_is_linear_in_the_trees_tokens_after_a_hundred_thousand_operations() -> None:
    """sglang #17191, #5958: splits that keep views of their parent's storage never return memory."""
    pool, rng = PrefixCache(128, 2), random.Random(5)
    for _ in range(100_000 // 4):
        tokens = array("i", [rng.randrange(3) for _ in range(rng.randrange(2, 24))])
        handle = pool.acquire(PATH, tokens)
        private = pool.allocate(-(-len(tokens) // 2) - handle.num_tree_blocks) or []
        done = pool.commit(handle, tokens, [*handle.block_ids, *private], len(tokens))
        pool.release(handle, done.block_ids)
        pool.begin_step()
    invariants.check(pool, [])
    nodes = list(pool.owners.tree.nodes())
    num_blocks = 127 - pool.num_free
    for name, each in (("tokens", 2), ("block_ids", 1), ("hashes", 1)):
        storage = [getattr(node, name) for node in nodes]
        assert all(type(edge) is array for edge in storage), "storage of its own"
        assert sum(map(len, storage)) == each * num_blocks
        num_bytes = sum(edge.buffer_info()[1] * edge.itemsize for edge in storage)
        assert num_bytes == each * num_blocks * storage[0].itemsize
    heaps = [h for x in (pool.owners.protection.cold, pool.owners.protection.recent) for h in x.heaps.values()]
    assert sum(len(heap.entries()) for heap in heaps) <= 2 * len(nodes) + 64 * len(heaps)


def test_the_cache_imports_the_standard_library_only() -> None:
    """Tiny device tensors per node (sglang #5958) cannot come in where no tensor library does."""
    for source in Path(cache.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in {"cache", *sys.stdlib_module_names}, (source, name)


def test_a_slot_that_left_the_window_is_never_freed_with_its_table() -> None:
    """sglang #27586: freeing by a window's table freed a live slot of somebody else."""
    pool = PrefixCache(8, 2)
    handle, table = pool.acquire(PATH, [1] * 6, read=False), pool.allocate(3) or []
    gone = table[0]
    pool.free([gone])
    table = [NULL_BLOCK, *table[1:]]
    other = pool.allocate(1)
    assert other == [gone]
    pool.release(handle, table)
    assert pool.refcount(gone) == 1
    invariants.check(pool, [])


@pytest.mark.parametrize("committed", range(9))
def test_an_abort_at_any_position_leaves_no_uncommitted_block(committed: int) -> None:
    """sglang #35470: blocks with drafts or unwritten tokens in the tree."""
    pool = PrefixCache(16, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    handle, table = pool.acquire(PATH, tokens), pool.allocate(4) or []
    done = pool.commit(handle, tokens, table, committed)
    pool.release(handle, done.block_ids)
    invariants.check(pool, [])
    assert pool.match(PATH, [*tokens, 9]) == committed // 2 * 2
    assert pool.num_free == 15 - committed // 2


def test_a_finish_that_is_seen_twice_frees_once(start: Start) -> None:
    """mini-sglang: an abort and a finish of one sequence under lag."""
    pool = PrefixCache(16, 2)
    handle, result = start(pool, PATH, [1, 2, 3, 4, 5])
    pool.release(handle, result.block_ids)
    free = pool.num_free
    for again in range(2):
        with pytest.raises(RuntimeError):
            pool.release(handle, result.block_ids)
        assert pool.num_free == free, again
    with pytest.raises(RuntimeError):
        pool.free([result.block_ids[-1]])
    invariants.check(pool, [])


@pytest.mark.parametrize("part", ["model", "weights", "tokenizer", "adapter", "kv"])
def test_another_root_shares_no_name_in_any_tier(part: str) -> None:
    """AReaL #421, LMCache, sglang #37160: weights replaced and the cache kept. The tree of a worker has one root; what
    leaves it, for events and stores, is named by it."""
    identity = dict.fromkeys(["model", "weights", "tokenizer", "adapter", "kv"], "a")
    tokens = list(range(256))
    path = [(b"p" * 16, -1)]

    def names(parts: dict[str, str]) -> set[bytes]:
        root = "/".join(parts.values()).encode()
        return {h for h, _ in group_hashes(b"secret", root, path, tokens, block_size=16)}

    assert names(identity)
    assert not names(identity) & names({**identity, part: "b"})


def test_planted_collisions_change_reasons_at_most(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """CVE-2025-25183: with every hash equal, tokens still decide what is found."""
    monkeypatch.setattr(cache.tree.radix, "chain_hash", lambda *_: 7)
    pool = PrefixCache(12, 2)
    serve(pool, PATH, [1, 2, 3, 4, 5, 6])
    assert pool.match(PATH, [1, 2, 9, 9, 5, 6, 7]) == 2
    assert pool.match(PATH, [9, 9, 3, 4, 5, 6, 7]) == 0
    assert pool.match(PATH, [1, 2, 3, 4, 5, 6, 7]) == 6
    for number in range(10):
        serve(pool, PATH, [number] * 8)
    assert pool.match(PATH, [9] * 9) == 8
    invariants.check(pool, [])


def test_what_an_eviction_looks_at_does_not_grow_with_tenants_or_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang PR #14339: 7 ms per eviction in a large tree. One eviction refreshes the tenant it cut, no other."""

    def refreshed(num_tenants: int, leaves_each: int) -> float:
        pool = PrefixCache(num_tenants * leaves_each + 1, 1)
        for tenant in range(num_tenants):
            path = (PathEntry(b"%d" % tenant, -1),)
            for token in range(leaves_each):
                handle = pool.acquire(path, [token, 0], tenant=str(tenant))
                table = pool.allocate(1) or []
                pool.commit(handle, [token, 0], table, 1)
                pool.release(handle, table)
                pool.begin_step()
        pool.allocate(1)
        calls = 0
        inner = cache.blocks.eviction.Leaves._refresh

        def counted(leaves: cache.blocks.eviction.Leaves, tenant: str) -> None:
            nonlocal calls
            calls += 1
            inner(leaves, tenant)

        with monkeypatch.context() as patched:
            patched.setattr(cache.blocks.eviction.Leaves, "_refresh", counted)
            for _ in range(50):
                pool.allocate(1)
        return calls / 50

    assert refreshed(2, 40) <= 2
    assert refreshed(60, 40) <= 2
