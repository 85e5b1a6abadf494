"""Both stores keep the same promises: whole values, a bound, an end, drops by region and by owner."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import redis

from workers.engine.tiers.shared_cache.directory import DirectoryStore
from workers.engine.tiers.shared_cache.redis_store import RedisStore
from workers.engine.tiers.shared_cache.store import Bounds, StoreAway


@pytest.fixture(params=["directory", "redis"])
def open_store(request, tmp_path, redis_url):
    opened = []

    def make(num_bytes=100_000, ttl_s=60):
        bounds = Bounds(num_bytes, ttl_s)
        kind = request.param
        store = DirectoryStore(tmp_path, bounds) if kind == "directory" else RedisStore(redis_url, bounds)
        opened.append(store)
        return store

    yield make
    for store in opened:
        store.close()


def test_a_value_is_found_by_another_worker_under_its_region_and_name_only(open_store):
    open_store().put("anna", "r1", "n1", b"value")
    other = open_store()
    assert other.get("r1", "n1") == b"value"
    assert other.get("r1", "n2") is None
    assert other.get("r2", "n1") is None


def test_a_value_written_twice_is_the_second_one(open_store):
    store = open_store()
    store.put("anna", "r", "n", b"first")
    store.put("anna", "r", "n", b"second")
    assert store.get("r", "n") == b"second"


def test_the_oldest_go_when_the_bound_is_reached(open_store):
    store = open_store(num_bytes=16_000)
    for number in range(40):
        store.put("anna", "r", f"n{number}", bytes(1000))
        time.sleep(0.002)
    kept = [number for number in range(40) if store.get("r", f"n{number}") is not None]
    assert kept == list(range(40 - len(kept), 40))
    assert 15 <= len(kept) <= 17  # a directory is looked at after a sixteenth part of the bound


def test_a_value_above_the_bound_is_refused(open_store):
    with pytest.raises(StoreAway):
        open_store(num_bytes=10).put("anna", "r", "n", bytes(11))


def test_a_value_is_gone_after_its_time(open_store):
    store = open_store(ttl_s=1)
    store.put("anna", "r", "n", b"value")
    assert store.get("r", "n") == b"value"
    time.sleep(1.2)
    assert store.get("r", "n") is None


def test_an_owner_is_dropped_with_every_region_it_wrote_in_also_by_another_worker(open_store):
    store = open_store()
    for owner, region in (("anna", "r1"), ("anna", "r2"), ("bert", "r3")):
        store.put(owner, region, "n", b"value")
    open_store().drop_owner("anna")
    assert [store.get(region, "n") for region in ("r1", "r2", "r3")] == [None, None, b"value"]
    store.drop_owner("nobody")
    store.put("anna", "r1", "n", b"again")
    assert store.get("r1", "n") == b"again"


def test_a_value_that_another_worker_puts_while_its_owner_is_dropped_is_found_by_that_workers_own_drop(
    open_store, monkeypatch
):
    """Between the removal of the region and the end of the drop, whatever the store does there."""
    first, second = open_store(), open_store()
    first.put("anna", "r", "n", b"value")
    if isinstance(first, RedisStore):
        drop = first._drop
        monkeypatch.setattr(first, "_drop", lambda *args: drop(*args) and second.put("anna", "r", "n", b"late"))
    else:
        unlink = Path.unlink

        def unlinked(path, **options):
            second.put("anna", "r", "n", b"late")
            unlink(path, **options)

        monkeypatch.setattr(Path, "unlink", unlinked)
    first.drop_owner("anna")
    monkeypatch.undo()
    second.drop_owner("anna")
    assert second.get("r", "n") is None


def test_a_value_written_after_the_mark_of_its_region_was_deleted_is_dropped_with_its_owner(tmp_path, monkeypatch):
    first, second = (DirectoryStore(tmp_path, Bounds(100_000, 60)) for _ in range(2))
    write = second._write

    def first_drops(path, value):
        first.drop_owner("anna")
        path.parent.mkdir(exist_ok=True)
        write(path, value)

    monkeypatch.setattr(second, "_write", first_drops)
    second.put("anna", "r", "n", b"late")
    second.drop_owner("anna")
    assert second.get("r", "n") is None


def test_a_mark_that_is_tidied_away_while_its_region_gets_a_value_is_set_again(tmp_path, monkeypatch):
    first = DirectoryStore(tmp_path, Bounds(100_000, 60), now=lambda: time.time() + 61)
    second = DirectoryStore(tmp_path, Bounds(100_000, 60))
    second.put("anna", "r", "n", b"value")
    (tmp_path / "values" / "r" / "n").unlink()
    unlink = os.unlink

    def unlinked(path, **options):
        if "owners" in str(path):
            second.put("anna", "r", "n", b"value")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlinked)
    first._tidy()
    monkeypatch.undo()
    assert second.get("r", "n") == b"value"
    second.drop_owner("anna")
    assert second.get("r", "n") is None


def test_a_folder_that_another_worker_removes_is_left_to_it(tmp_path):
    store = DirectoryStore(tmp_path, Bounds(100_000, 60))
    (leaving := tmp_path / "values" / ".r.1.1").mkdir()
    store._tidy()
    assert leaving.is_dir()


def test_dropped_bytes_make_room(open_store):
    store = open_store(num_bytes=10_000)
    for number in range(8):
        store.put("anna", "r1", f"n{number}", bytes(1000))
    store.drop_owner("anna")
    for number in range(9):
        store.put("bert", "r2", f"n{number}", bytes(1000))
    assert all(store.get("r2", f"n{number}") for number in range(9))


def test_a_region_whose_values_are_gone_leaves_nothing_behind(tmp_path):
    store = DirectoryStore(tmp_path, Bounds(16_000, 60))
    for number in range(100):
        store.put("anna", f"r{number}", "n", bytes(1000))
    store.put("bert", "once", "n", bytes(10))
    assert len(list((tmp_path / "values").iterdir())) <= 20
    assert len(list((tmp_path / "owners" / "anna").iterdir())) == 100, "whoever marked a region may be about to write"
    DirectoryStore(tmp_path, Bounds(16_000, 3600), now=lambda: time.time() + 61)
    assert {p.name for p in (tmp_path / "values").iterdir()} == {p.name for p in (tmp_path / "owners").glob("*/*")}
    DirectoryStore(tmp_path, Bounds(16_000, 60), now=lambda: time.time() + 3600)
    assert list((tmp_path / "values").iterdir()) == list((tmp_path / "owners").iterdir()) == []
    store.put("anna", "r1", "n", b"again")
    assert store.get("r1", "n") == b"again"


def test_a_dropped_owner_leaves_no_folder(tmp_path):
    store = DirectoryStore(tmp_path, Bounds(16_000, 60))
    store.put("anna", "r", "n", b"value")
    store.drop_owner("anna")
    assert [p.name for p in tmp_path.rglob("*")] in (["values", "owners"], ["owners", "values"])


def test_a_folder_that_another_worker_deletes_under_a_writer_is_made_again(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path, Bounds(16_000, 60))
    write, calls = store._write, []

    def first_too_late(path, value):
        calls.append(path)
        if len(calls) == 1:
            path.parent.rmdir()
        write(path, value)

    monkeypatch.setattr(store, "_write", first_too_late)
    store.put("anna", "r", "n", b"value")
    assert store.get("r", "n") == b"value"


def test_redis_forgets_regions_of_an_owner_whose_values_are_gone(redis_url):
    store = RedisStore(redis_url, Bounds(5000, 60))
    with redis.Redis.from_url(redis_url) as client:
        for number in range(300):
            store.put("anna", f"r{number}", "n", bytes(1000))
        regions = {key.removeprefix(b"hg:kv:region:") for key in client.keys("hg:kv:region:*")}
        named = client.smembers("hg:kv:owner:anna")
        assert len(regions) == 5
        assert regions <= named, "a region with a value could not be dropped with its owner"
        assert len(named) < 60


def test_a_server_that_is_not_there_says_so(tmp_path):
    store = RedisStore(f"unix://{tmp_path}/nothing.sock", Bounds(1000, 60))
    for call in (lambda: store.get("r", "n"), lambda: store.put("o", "r", "n", b""), lambda: store.drop_owner("o")):
        with pytest.raises(StoreAway):
            call()


def test_books_of_redis_agree_with_its_values(redis_url):
    store = RedisStore(redis_url, Bounds(5000, 60))
    for number in range(20):
        store.put(f"o{number % 3}", f"r{number % 3}", f"n{number % 7}", bytes(100 * (number % 11)))
    store.drop_owner("o1")
    with redis.Redis.from_url(redis_url) as client:
        entries = client.keys("hg:kv:entry:*")
        total = sum(client.strlen(key) for key in entries)
        assert int(client.get("hg:kv:bytes")) == total <= 5000
        assert client.zcard("hg:kv:order") == client.hlen("hg:kv:sizes") == len(entries)
        assert all(client.ttl(key) > 0 for key in entries)


def test_a_directory_never_shows_half_a_value_and_nobody_else_may_read_it(tmp_path):
    store = DirectoryStore(tmp_path, Bounds(100_000, 60))
    store.put("anna", "r", "n", b"value")
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file() and p.name == "n")
    assert os.stat(path).st_mode & 0o077 == 0
    assert os.stat(path.parent).st_mode & 0o077 == 0
    assert [p.name for p in path.parent.iterdir()] == ["n"]


def test_a_redis_that_became_a_replica_is_left(own_redis):
    """Its connection stayed on the demoted server, so that nothing was stored until the worker was started again."""
    store = RedisStore(own_redis.url, Bounds(100_000, 60))
    store.put("anna", "r", "n", b"value")
    with redis.Redis.from_url(own_redis.url) as client:
        before = {one["id"] for one in client.client_list()} - {str(client.client_id())}
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreAway):
            store.put("anna", "r", "n", b"value")
        assert before
        assert not before & {one["id"] for one in client.client_list()}
    store.close()
