"""This measures what the prefix cache costs: a match, an insertion and an eviction, against the size of the tree. It needs
the standard library only.

    python -m benchmarks.prefix_cache [--quick] [--json FILE]

A tree of N nodes is N prompts of one block each below shared prefixes of a conversation's depth, over many tenants. Times
are medians of repeated runs in microseconds; growth is the ratio to the smallest tree. The last part drives whole requests
that never hit (acquire, allocate, commit by chunks, release) and sets them against a step of the given length.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import NamespacePath, PathEntry

BLOCK = 16
NUM_TENANTS = 100
PROMPT = 4000
STEP_TOKENS = 512


def path_of(tenant: int) -> NamespacePath:
    return (PathEntry(tenant.to_bytes(16, "big"), -1),)


def insert(cache: PrefixCache, tenant: int, tokens: array[int]) -> None:
    """A whole request, to its end."""
    handle = cache.acquire(path_of(tenant), tokens, tenant=str(tenant), priority=50)
    num_blocks = -(-len(tokens) // BLOCK) - handle.num_tree_blocks
    private = cache.allocate(num_blocks, needed_by=str(tenant))
    assert private is not None
    table = [*handle.block_ids, *private]
    result = cache.commit(handle, tokens, table, len(tokens), prompt_len=len(tokens))
    cache.release(handle, result.block_ids)
    cache.begin_step()


def tree_of(num_nodes: int, spare: int = 0) -> PrefixCache:
    """`num_nodes` leaves of one block, no two with an equal first token, and `spare` free blocks."""
    cache = PrefixCache(num_nodes + spare + 1, BLOCK)
    for number in range(num_nodes):
        insert(cache, number % NUM_TENANTS, array("i", [number + 1] * BLOCK))
    return cache


def median_us(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def measure(num_nodes: int, repeats: int) -> dict[str, float]:
    prompt_blocks = PROMPT // BLOCK
    cache = tree_of(num_nodes, spare=2 * prompt_blocks)
    rng = random.Random(num_nodes)
    known = array("i", [rng.randrange(1, 50_000) for _ in range(PROMPT)])
    known[0] = num_nodes + 7
    insert(cache, 0, known)
    unknown = array("i", [-1] * PROMPT)
    found: dict[str, float] = {"nodes": sum(1 for _ in cache.owners.tree.nodes())}
    found["match_hit_us"] = median_us(lambda: cache.match(path_of(0), known), repeats)
    found["match_miss_us"] = median_us(lambda: cache.match(path_of(0), unknown), repeats)
    assert cache.match(path_of(0), known) == PROMPT - BLOCK
    fresh = iter(range(10**6, 10**9))

    def inserted() -> None:
        insert(cache, 1, array("i", [next(fresh)] * BLOCK * 8))

    found["request_of_8_blocks_us"] = median_us(inserted, min(repeats, 200))
    leaves = tree_of(num_nodes)
    leaves.allocate(1)  # the first one brings the heap of tenants up to date
    found["evict_one_leaf_us"] = median_us(lambda: leaves.allocate(1), min(repeats, num_nodes // 2))
    start, num_left = time.perf_counter_ns(), leaves.num_evictable
    leaves.allocate(num_left)
    found["evict_all_us_per_leaf"] = (time.perf_counter_ns() - start) / 1000 / num_left
    return found


def at_no_hits(cache: PrefixCache, num_prompts: int) -> float:
    """Microseconds per step of STEP_TOKENS, spent on prompts that nobody sent before, in a pool that is full."""
    spent, num_tokens = 0, 4096
    for number in range(num_prompts):
        tokens = array("i", [2_000_000 + number] * num_tokens)
        tenant = number % NUM_TENANTS
        start = time.perf_counter_ns()
        handle = cache.acquire(path_of(tenant), tokens, tenant=str(tenant), priority=50)
        table = [*handle.block_ids, *(cache.allocate(num_tokens // BLOCK) or [])]
        for end in range(STEP_TOKENS, num_tokens + 1, STEP_TOKENS):
            table = cache.commit(handle, tokens, table, end, prompt_len=num_tokens).block_ids
            cache.begin_step()
        cache.release(handle, table)
        spent += time.perf_counter_ns() - start
    return spent / 1000 / num_prompts / (num_tokens // STEP_TOKENS)


def no_hits(num_prompts: int, step_ms: float) -> dict[str, float]:
    """Measures a pool that holds whole prompts of others, and one that holds single blocks of theirs. Each evicted block is
    a leaf of its own in the second, which is the worst case.
    """
    prompts = PrefixCache(20_000, BLOCK)
    at_no_hits(prompts, 80)
    found = {
        "whole_prompts_us": at_no_hits(prompts, num_prompts),
        "single_blocks_us": at_no_hits(tree_of(20_000), min(num_prompts, 70)),
    }
    shares = {name.replace("_us", "_share"): us / 1000 / step_ms for name, us in found.items()}
    return found | shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two sizes, few repeats")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--step-ms", type=float, default=20.0, help="a step of 512 prompt tokens")
    told = parser.parse_args()
    sizes = [1_000, 10_000] if told.quick else [1_000, 10_000, 100_000]
    rows = [measure(size, 50 if told.quick else 400) for size in sizes]
    columns = list(rows[0])
    print("  ".join(f"{name:>24}" for name in columns))
    for row in rows:
        print("  ".join(f"{row[name]:>24,.2f}" for name in columns))
    growth = {name: rows[-1][name] / rows[0][name] for name in columns}
    print("  ".join(f"{growth[name]:>23,.2f}x" for name in columns))
    cold = no_hits(20 if told.quick else 200, told.step_ms)
    for kind in ("whole_prompts", "single_blocks"):
        print(
            f"0 % hits, pool full of {kind}: {cold[kind + '_us']:.0f} us per step of {STEP_TOKENS} tokens, "
            f"{cold[kind + '_share']:.2%} of {told.step_ms} ms"
        )
    if told.json is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        whole = {"machine": machine, "rows": rows, "growth": growth, "no_hits": cold}
        told.json.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
