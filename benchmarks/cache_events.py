"""This measures what telling gateways of the cache costs a step of the engine: the same commits with and without it, in
microseconds.

    python benchmarks/cache_events.py [--running 64] [--steps 2000]

Each step fills the blocks that so many decodes fill on average, and now and then a chunk of 512 prompt tokens, with
evictions all the time. No model runs; what is measured is the engine thread's own share.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from array import array

from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import PathEntry
from workers.engine.reports.cache_feed import CacheFeed

BLOCK = 16
CHUNK = 512


class Decode:
    """One sequence, one token longer each step."""

    def __init__(self, cache: PrefixCache, rng: random.Random) -> None:
        self.cache, self.rng = cache, rng
        self.path = (PathEntry(bytes([rng.randrange(8)]) * 16, -1),)
        self.tokens = array("i", (rng.randrange(1000) for _ in range(CHUNK + rng.randrange(BLOCK))))
        self.handle = cache.acquire(self.path, self.tokens)
        fresh = cache.allocate(-(-len(self.tokens) // BLOCK) - len(self.handle.block_ids))
        assert fresh is not None
        self.table = self.handle.block_ids + fresh
        self.commit()

    def commit(self) -> None:
        result = self.cache.commit(self.handle, self.tokens, self.table, len(self.tokens))
        self.table = result.block_ids

    def step(self) -> None:
        self.tokens.append(self.rng.randrange(1000))
        if len(self.tokens) % BLOCK == 1:
            fresh = self.cache.allocate(1)
            assert fresh is not None
            self.table = [*self.table, *fresh]
        if len(self.tokens) % BLOCK == 0:
            self.commit()

    def end(self) -> None:
        self.cache.release(self.handle, self.table)


def run(num_running: int, num_steps: int, *, told: bool) -> list[float]:
    rng = random.Random(1)
    cache = PrefixCache(num_running * 80, BLOCK)
    feed = CacheFeed(cache, "root")
    if told:
        for link in range(2):
            feed.subscribe(link, b"k" * 32)
    running = [Decode(cache, rng) for _ in range(num_running)]
    seconds = []
    gc.disable()
    for step in range(num_steps):
        began = time.thread_time()
        for sequence in running:
            sequence.step()
        if step % 4 == 0:
            running.pop(0).end()
            running.append(Decode(cache, rng))
        cache.begin_step()
        feed.take()
        seconds.append(time.thread_time() - began)
    gc.enable()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    load = parser.parse_args()
    pairs = [[run(load.running, load.steps, told=told) for told in (False, True)] for _ in range(15)]
    # The best of equal steps: what a busy machine adds is not ours.
    best = [[min(times) for times in zip(*(pair[told] for pair in pairs), strict=True)] for told in (0, 1)]
    extra = [1e6 * (with_ - without) for without, with_ in zip(*best, strict=True)]
    print(
        f"{load.running} running: mean {statistics.mean(extra):.1f} us a step, "
        f"with a chunk of {CHUNK} {statistics.mean(extra[::4]):.1f} us, "
        f"without {statistics.mean(extra[1::4]):.1f} us"
    )


if __name__ == "__main__":
    main()
