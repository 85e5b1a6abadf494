"""New weights in a slot: what the old process had cached is missed by reason of its version, within its own walls."""

from __future__ import annotations

from cache.blocks.ownership import IDLE_MS
from cache.prefix_cache import PrefixCache
from cache.tree.namespaces import PathEntry
from workers.engine.reports import predecessor

ANNA = (PathEntry(b"public", 4), PathEntry(b"anna", -1))
BERT = (PathEntry(b"public", 4), PathEntry(b"bert", -1))
TOKENS = [1, 1, 2, 2, 3, 3, 4, 4, 5]


def fill(cache, path, tokens):
    handle = cache.acquire(path, tokens)
    private = cache.allocate(-(-len(tokens) // 2) - handle.num_tree_blocks)
    done = cache.commit(handle, tokens, [*handle.block_ids, *private], len(tokens))
    cache.release(handle, done.block_ids)


def old_life(path):
    cache = PrefixCache(32, 2)
    fill(cache, (PathEntry(b"public", -1),), [1, 1, 2, 2])
    fill(cache, ANNA, TOKENS)
    predecessor.leave(path, cache, "weights 1")


def reason(cache, path, tokens=TOKENS):
    handle = cache.acquire(path, tokens)
    cache.release(handle, handle.block_ids)
    return handle.miss_reason


def test_after_new_weights_the_reason_is_version_and_only_for_who_had_it(tmp_path):
    old_life(tmp_path / "names")
    cache = PrefixCache(32, 2)
    predecessor.take(tmp_path / "names", cache, "weights 2")
    assert reason(cache, ANNA) == "version"
    fill(cache, (PathEntry(b"public", -1),), [1, 1, 2, 2])
    assert reason(cache, ANNA) == "version"
    assert reason(cache, BERT) == "diverged", "another tenant's past is nobody's business"
    assert reason(cache, ANNA, [9] * 9) == "cold"
    assert not (tmp_path / "names").exists()


def test_the_same_weights_need_no_excuse(tmp_path):
    old_life(tmp_path / "names")
    cache = PrefixCache(32, 2)
    predecessor.take(tmp_path / "names", cache, "weights 1")
    assert reason(cache, ANNA) == "cold"


def test_it_is_forgotten_after_an_hour(tmp_path):
    old_life(tmp_path / "names")
    clock = [0]
    cache = PrefixCache(32, 2, now_ms=lambda: clock[0])
    predecessor.take(tmp_path / "names", cache, "weights 2")
    clock[0] = IDLE_MS - 1
    cache.begin_step()
    assert reason(cache, ANNA) == "version"
    clock[0] = IDLE_MS
    cache.begin_step()
    assert reason(cache, ANNA) == "cold"


def test_it_is_forgotten_with_a_purge(tmp_path):
    old_life(tmp_path / "names")
    cache = PrefixCache(32, 2)
    predecessor.take(tmp_path / "names", cache, "weights 2")
    cache.purge("anna")
    assert reason(cache, ANNA) == "cold"


def test_a_damaged_file_or_none_is_no_predecessor(tmp_path):
    cache = PrefixCache(32, 2)
    predecessor.take(tmp_path / "none", cache, "weights 2")
    (tmp_path / "names").write_bytes(b"\xc1")
    predecessor.take(tmp_path / "names", cache, "weights 2")
    assert cache.predecessor is None
