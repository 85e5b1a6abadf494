"""Workers that share KV: what one computed another one reads, within the same walls, and nothing that is not sound."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import redis
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request
from load import stretched

from workers.engine.tiers.shared_cache import shared, store_thread
from workers.engine.tiers.shared_cache.directory import DirectoryStore
from workers.engine.tiers.shared_cache.opening import identity_of, open_tier
from workers.engine.tiers.shared_cache.redis_store import RedisStore
from workers.engine.tiers.shared_cache.shared import READ_GROUPS
from workers.engine.tiers.shared_cache.store import Bounds, StoreAway
from workers.engine.values.plan import LoadedAdapter
from workers.protocol.messages import CacheCommand, Region

SECRET = b"secret of this deployment......."
BOUNDS = Bounds(1 << 24, 60)
TEXT = encode("the quick brown fox jumps over the lazy dog " * 5)[:200]
PUBLIC = b"public region..."


@pytest.fixture(params=["directory", "redis"])
def open_store(request, tmp_path, redis_url):
    kind = request.param
    return lambda: DirectoryStore(tmp_path, BOUNDS) if kind == "directory" else RedisStore(redis_url, BOUNDS)


@pytest.fixture
def worker(open_store):
    """Makes workers of one model, each with its own thread of the store."""
    opened = []

    def make(store=None, secret=SECRET, root="model@1", num_slots=256, num_blocks=200, **options):
        runner = ScriptedRunner(num_blocks=num_blocks, block_size=4, root=root)
        drive = Driver(runner, host={"num_slots": num_slots}, **options)
        engine = drive.engine
        tier = open_tier(store or open_store(), secret, runner, drive.cache, drive.host, engine.scheduler.forecast)
        engine.share(tier)
        opened.append(tier)
        return drive

    yield make
    for tier in opened:
        tier.close()


def ask(drive, name, prompt=TEXT, **fields):
    fields.setdefault("root", drive.runner.root)
    drive.send(generate_request(name, prompt, 4, **fields))
    while not drive.idle:
        drive.step(0.0)
    drive.check_alone(drive.requests[LINK, name])
    return drive.endings[LINK, name]


def settle(drive):
    """Until the store's thread has nothing left to do."""
    tier, deadline = drive.engine.shared, time.monotonic() + stretched(10)
    while tier._pinned or tier.store_thread._drops or tier._fetches:
        assert time.monotonic() < deadline
        drive.step(0.0)
        time.sleep(0.001)


def fill(drive, name="fill", **fields):
    for number in range(3):
        ask(drive, f"{name}{number}", **fields)
    settle(drive)
    assert drive.engine.shared.store_thread.counts.num_written > 0


def test_another_worker_reads_it_for_the_same_tenant_and_not_for_another(worker):
    fill(worker(), tenant="anna")
    second = worker()
    bert = ask(second, "b", tenant="bert")
    anna = ask(second, "a", tenant="anna")
    assert bert.usage.cache_read == 0
    assert anna.usage.cache_read == anna.cache.cached_tokens == 192
    assert anna.usage.cache_write + anna.usage.uncached == 8
    assert second.engine.shared.store_thread.counts.num_found == 3
    second.check_idle()
    names = [event.name for event in anna.timeline]
    assert names[:5] == ["queued", "fetching", "fetched", "matched", "restored"]


def test_another_worker_reads_it_under_an_adapter_of_the_same_weights_only(worker):
    def with_adapters():
        drive = worker()
        drive.runner.adapters = {"poet": LoadedAdapter(1, b"p" * 16), "clerk": LoadedAdapter(2, b"c" * 16)}
        return drive

    fill(with_adapters(), adapter="poet")
    second = with_adapters()
    assert ask(second, "none").usage.cache_read == ask(second, "clerk", adapter="clerk").usage.cache_read == 0
    assert ask(second, "poet", adapter="poet").usage.cache_read == 192
    second.check_idle()


def test_a_public_prompt_is_shared_with_every_tenant_and_stays_when_one_is_purged(worker):
    def path(own):
        return (Region(PUBLIC, 130), Region(own.ljust(16, b"\0")))

    first = worker()
    fill(first, tenant="operator", prompt=TEXT[:132], namespace=(Region(PUBLIC),))
    fill(first, "own", tenant="anna", namespace=path(b"anna"))
    second = worker()
    assert ask(second, "b", tenant="bert", namespace=path(b"bert")).usage.cache_read == 128
    assert ask(second, "a", tenant="anna", namespace=path(b"anna")).usage.cache_read == 192
    second.send(CacheCommand("drop", tenant="bert"))
    second.step()
    assert second.cache.host.num_of("") == 32
    third = worker()
    assert ask(third, "c", tenant="carl", namespace=path(b"carl")).usage.cache_read == 128


def test_a_long_prompt_comes_in_several_rounds(worker):
    text = encode("0123456789abcdef" * 80)
    options = {"num_slots": 400, "num_blocks": 500}
    fill(worker(**options), prompt=text)
    second = worker(**options)
    assert ask(second, "again", prompt=text).usage.cache_read == 1280 > READ_GROUPS * 64
    assert second.engine.shared.store_thread.counts.num_found == 20


def test_b7_what_came_is_copied_in_bounded_parts_and_steps_go_on_between_them(worker, monkeypatch):
    """20 groups of 16 blocks, room for 20 blocks in a step: two groups, which the second one ends."""
    text = encode("0123456789abcdef" * 80)
    options = {"num_slots": 400, "num_blocks": 500}
    fill(worker(**options), prompt=text)
    second = worker(**options)
    monkeypatch.setattr(shared, "TAKEN_BYTES", 20 * second.host.bytes_per_slot)
    copied, write = [], second.host.write
    monkeypatch.setattr(second.host, "write", lambda *given: copied.append(0) or write(*given))
    second.send(
        generate_request("other", encode("xyz"), 40, tenant="bert", root="model@1"),
        generate_request("a", text, 4, root="model@1"),
    )
    per_step, num_others = [], 0
    while second.engine.shared.num_waiting or not per_step:
        before = len(copied)
        steps = len(second.step(0.0).steps)
        per_step.append(len(copied) - before)
        num_others += bool(per_step[-1]) and steps
        time.sleep(0.001)
    assert max(per_step) == 32
    assert sum(per_step) == 320
    assert num_others >= 9, "the other request's tokens came between the parts"
    while not second.idle:
        second.step(0.0)
    assert second.endings[LINK, "a"].usage.cache_read == 1280
    second.check_idle()


def test_what_is_before_a_group_is_searched_for_once_for_a_prompt(worker, monkeypatch):
    """It was searched for from the first block on for each group, so a prompt took time with the square of its length."""
    text = encode("0123456789abcdef" * 80)
    options = {"num_slots": 400, "num_blocks": 500}
    fill(worker(**options), prompt=text)
    second = worker(**options)
    searched, before = [], second.engine.shared._before
    monkeypatch.setattr(second.engine.shared, "_before", lambda *given: searched.append(0) or before(*given))
    assert ask(second, "again", prompt=text).usage.cache_read == 1280
    assert len(searched) == 1


def test_b7_a_purge_between_two_parts_leaves_the_rest(worker, monkeypatch):
    text = encode("0123456789abcdef" * 80)
    options = {"num_slots": 400, "num_blocks": 500}
    fill(worker(**options), prompt=text, tenant="anna")
    second = worker(**options)
    monkeypatch.setattr(shared, "TAKEN_BYTES", 1)
    second.send(generate_request("a", text, 4, tenant="anna", root="model@1"))
    while not in_host(second, "anna"):
        second.step(0.0)
    assert in_host(second, "anna") == 16
    second.send(CacheCommand("drop", tenant="anna"))
    second.step(0.0)
    assert in_host(second, "anna") == 0
    while not second.idle:
        second.step(0.0)
    settle(second)
    assert second.endings[LINK, "a"].usage.cache_read == 0


def test_what_the_device_has_is_not_fetched_again(worker):
    fill(worker(), tenant="anna")
    second = worker()
    ask(second, "short", prompt=TEXT[:120], tenant="anna", cache_read=False)
    assert ask(second, "long", tenant="anna").usage.cache_read == 192
    assert second.engine.shared.store_thread.counts.num_found == 2


@pytest.mark.parametrize(
    ("fields", "secret", "root"),
    [
        ({"namespace": (Region(b"another region.."),)}, SECRET, "model@1"),
        ({}, SECRET, "model@2"),
        ({}, b"secret of another deployment....", "model@1"),
        ({"cache_read": False}, SECRET, "model@1"),
        ({"prompt": (*TEXT[:10], 1, *TEXT[11:])}, SECRET, "model@1"),
    ],
    ids=["region", "root", "secret", "opt-out", "tokens"],
)
def test_every_part_of_the_identity_is_a_wall(worker, fields, secret, root):
    fill(worker(), tenant="anna")
    second = worker(secret=secret, root=root)
    assert ask(second, "a", tenant="anna", **fields).usage.cache_read == 0


def test_adapter_and_layout_are_part_of_the_identity():
    runner = ScriptedRunner(root="model@1")
    plain = identity_of(SECRET, runner, SimpleNamespace(layout="a"))
    assert plain != identity_of(SECRET, runner, SimpleNamespace(layout="b"))
    assert plain == identity_of(SECRET, runner, SimpleNamespace(layout="a"))


def test_what_opts_out_of_writing_is_nowhere(worker):
    first = worker()
    for number in range(3):
        ask(first, f"r{number}", tenant="anna", cache_write=False)
    settle(first)
    assert first.engine.shared.store_thread.counts.num_written == 0
    assert first.cache.host.num_of("anna") == 0


class Tampered:
    """A store whose values somebody changed."""

    def __init__(self, store, change):
        self._store, self._change = store, change

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, region, name):
        data = self._store.get(region, name)
        return None if data is None else self._change(data)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:200] + b"\xff" + data[201:], "corrupted"),
        (lambda data: b"another program's value".ljust(300), "foreign"),
    ],
)
def test_what_is_not_sound_is_refused_counted_and_computed(worker, open_store, change, fault):
    fill(worker(), tenant="anna")
    second = worker(Tampered(open_store(), change))
    assert ask(second, "a", tenant="anna").usage.cache_read == 0
    assert second.engine.shared.store_thread.counts.refused == {fault: 1}


def test_a_group_of_another_prefix_under_the_right_name_is_refused(worker, open_store):
    """As if somebody had copied it there."""
    first = worker()
    fill(first, tenant="anna")
    values = {}

    class Swapped(Tampered):
        def get(self, region, name):
            values.setdefault(name, self._store.get(region, name))
            return next((v for n, v in values.items() if n != name and v), values[name])

    store = Swapped(open_store(), None)
    other = (7, *TEXT[1:])
    fill(first, "other", tenant="anna", prompt=other)
    second = worker(store)
    ask(second, "warm", tenant="anna", prompt=TEXT[:70])
    assert ask(second, "a", tenant="anna", prompt=other).usage.cache_read == 0
    assert second.engine.shared.store_thread.counts.refused["corrupted"] >= 1


class Away:
    def get(self, region, name):
        raise StoreAway("no answer")

    put = drop_owner = get

    def close(self):
        pass


def test_a_store_that_is_away_costs_nothing_but_time(worker):
    drive = worker(Away())
    for number in range(3):
        ask(drive, f"r{number}", tenant="anna")
    assert drive.endings[LINK, "r2"].usage.cache_read == 196
    assert drive.engine.shared.store_thread.counts.num_away > 0
    settle(drive)
    drive.check_idle()


class Slow(Tampered):
    def get(self, region, name):
        time.sleep(0.05)
        return self._store.get(region, name)


def test_steps_go_on_while_a_store_is_slow(worker, open_store):
    fill(worker(), tenant="anna")
    second = worker(Slow(open_store(), None))
    second.send(
        generate_request("other", encode("xyz"), 40, tenant="bert", root="model@1"),
        generate_request("a", TEXT, 4, tenant="anna", root="model@1"),
    )
    second.step(0.0)
    assert second.engine.shared.num_waiting == 1
    num_steps = 0
    while second.engine.shared.num_waiting:
        num_steps += len(second.step(0.0).steps)
        time.sleep(0.001)
    assert num_steps > 10
    while not second.idle:
        second.step(0.0)
    assert second.endings[LINK, "a"].usage.cache_read == 192
    second.check_idle()


def test_an_attempt_waits_for_the_store_no_longer_than_its_limit(worker, open_store):
    second = worker(Slow(open_store(), None))
    second.send(generate_request("a", TEXT, 4, root="model@1"))
    second.step(0.0)
    second.step(3.0)
    assert second.engine.shared.num_waiting == 0
    second.run()
    assert second.endings[LINK, "a"].usage.uncached + second.endings[LINK, "a"].usage.cache_write == 200


def test_what_is_asked_for_and_not_taken_in_is_bounded_and_the_rest_is_computed(worker, open_store, monkeypatch):
    """Three groups of 16 blocks each are asked for, and the bound has room for one request."""
    prompts = [(number, *TEXT[1:]) for number in range(3)]
    first = worker()
    for number, prompt in enumerate(prompts):
        fill(first, f"fill{number}-", prompt=prompt)
    second = worker(Slow(open_store(), None))
    monkeypatch.setattr(shared, "UNTAKEN_BYTES", 90 * second.host.bytes_per_slot)
    second.send(*[generate_request(f"r{i}", prompt, 4, root="model@1") for i, prompt in enumerate(prompts)])
    second.step(0.0)
    assert second.engine.shared.num_waiting == 1
    assert second.engine.shared.store_thread.counts.num_dropped == 2
    while not second.idle:
        second.step(0.0)
    assert sorted(ending.usage.cache_read for ending in second.endings.values()) == [0, 0, 192]
    second.check_idle()


# --- purge: every tier ---


def in_device(drive, tenant):
    return drive.cache.usage(tenant).num_blocks


def in_host(drive, tenant):
    return drive.cache.host.num_of(tenant)


def in_shared(drive, tenant, worker):
    fresh = worker()
    return ask(fresh, f"probe-{tenant}-{time.monotonic_ns()}", tenant=tenant).usage.cache_read


def test_a_purge_leaves_nothing_in_any_tier_and_others_theirs(worker):
    drive = worker()
    fill(drive, "anna", tenant="anna")
    fill(drive, "bert", tenant="bert")
    tiers = {
        "device": lambda tenant: in_device(drive, tenant),
        "host": lambda tenant: in_host(drive, tenant),
        "shared": lambda tenant: in_shared(drive, tenant, worker),
    }
    assert all(count("anna") and count("bert") for count in tiers.values())
    drive.send(CacheCommand("drop", tenant="anna"))
    drive.step()
    settle(drive)
    assert {name: count("anna") for name, count in tiers.items()} == dict.fromkeys(tiers, 0)
    assert all(count("bert") for count in tiers.values())


def test_a_purge_that_the_store_does_not_answer_is_tried_again_and_nothing_is_read_meanwhile(worker, open_store):
    drive = worker()
    fill(drive, tenant="anna")

    class Flaky(Tampered):
        num_refused = 0

        def drop_owner(self, owner):
            if self.num_refused < 1:
                self.num_refused += 1
                raise StoreAway("not now")
            self._store.drop_owner(owner)

    second = worker(Flaky(open_store(), None))
    second.send(CacheCommand("drop", tenant="anna"))
    second.step()
    assert ask(second, "a", tenant="anna").usage.cache_read == 0
    settle(second)
    assert ask(worker(), "b", tenant="anna").usage.cache_read == 0


class Faulty:
    """A store that raises what no store should, once in each call."""

    def __init__(self, store):
        self._store = store
        self.raised = set()

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def once(*given):
            if name != "close" and name not in self.raised:
                self.raised.add(name)
                raise MemoryError(name)
            return call(*given)

        return once


def test_a_fault_in_a_job_ends_no_thread_and_a_purge_is_tried_again(worker, open_store, monkeypatch):
    monkeypatch.setattr(store_thread, "RETRY_S", 0.05)
    fill(worker(), tenant="anna")
    store = Faulty(open_store())
    second = worker(store)
    assert ask(second, "a", tenant="anna").usage.cache_read == 0
    settle(second)
    time.sleep(0.1)
    for number in range(3):
        ask(second, f"b{number}", tenant="anna", prompt=TEXT[::-1])
    settle(second)
    second.send(CacheCommand("drop", tenant="anna"))
    second.step()
    settle(second)
    assert store.raised == {"get", "put", "drop_owner"}
    assert second.engine.shared.store_thread.counts.num_away >= 3
    assert ask(worker(), "c", tenant="anna").usage.cache_read == 0
    second.check_idle()


def test_a_value_that_cannot_be_opened_for_want_of_memory_is_not_found(worker, monkeypatch):
    fill(worker(), tenant="anna")
    second = worker()

    def unseal(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store_thread, "unseal", unseal)
        assert ask(second, "a", tenant="anna").usage.cache_read == 0
    settle(second)
    second.check_idle()


def test_what_was_read_before_a_purge_is_not_taken_in_after_it(worker, open_store):
    fill(worker(), tenant="anna")
    second = worker(Slow(open_store(), None))
    second.send(generate_request("a", TEXT, 4, tenant="anna", root="model@1"))
    second.step(0.0)
    second.send(CacheCommand("drop", tenant="anna"))
    while not second.idle:
        second.step(0.0)
    assert second.endings[LINK, "a"].usage.cache_read == 0
    assert in_host(second, "anna") == 0


def test_nothing_readable_lies_in_redis(redis_url, worker):
    drive = worker(RedisStore(redis_url, BOUNDS))
    fill(drive, tenant="anna")
    with redis.Redis.from_url(redis_url) as client:
        keys = b" ".join(client.keys("*"))
    assert b"anna" not in keys
    assert keys
