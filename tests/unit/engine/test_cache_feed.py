"""What an engine tells gateways of its cache, from real steps."""

from __future__ import annotations

import itertools

import pytest
from engine_driver import Driver
from fakes import ROOT, ScriptedRunner, generate_request

from cache.tree.hashing import group_hashes
from gateway.routing.links.cache_view import CacheView, Group
from workers.engine.engine import LinkClosed
from workers.engine.reports import cache_feed
from workers.protocol.messages import CacheCommand, CacheEvent, Region

KEY = b"k" * 32
ANNA, BERT = Region(b"a" * 16), Region(b"b" * 16)
ASK = CacheCommand("snapshot", key=KEY)
PROMPTS = [[n, *itertools.islice(itertools.cycle(range(250)), 150 + 40 * n)] for n in range(5)]
NAMES = itertools.count()


def driver(num_blocks: int = 400) -> Driver:
    return Driver(ScriptedRunner(num_blocks=num_blocks, block_size=16, max_model_len=4096))


def serve(drive: Driver, prompt: list[int], region: Region = ANNA, link: int = 1) -> None:
    name = f"r{next(NAMES)}"
    drive.send(generate_request(name, prompt, 2, namespace=(region,)), link=link)
    drive.run()


def events(drive: Driver, link: int = 9) -> list[CacheEvent]:
    return [
        message
        for output in drive.outputs
        for to, message in output.messages
        if to == link and isinstance(message, CacheEvent)
    ]


def heard(drive: Driver, link: int = 9) -> CacheView:
    view = CacheView()
    for event in events(drive, link):
        assert view.apply(event), "a gap"
    return view


def groups(prompt: list[int], region: Region = ANNA, key: bytes = KEY) -> list[Group]:
    return group_hashes(key, ROOT.encode(), [(region.id, -1)], prompt, block_size=16)


def test_whole_groups_are_told_as_the_gateway_hashes_them():
    drive = driver()
    drive.send(ASK, link=9)
    for prompt in PROMPTS:
        serve(drive, prompt)
    view = heard(drive)
    for prompt in PROMPTS:
        assert view.num_tokens(groups(prompt), 0.0) == len(prompt) // 64 * 64 > 0
        assert view.num_tokens(groups(prompt, BERT), 0.0) == 0
        assert view.num_tokens(groups(prompt, key=b"x" * 32), 0.0) == 0


def test_nobody_is_told_who_did_not_ask_and_who_comes_late_gets_a_snapshot_first():
    drive = driver()
    serve(drive, PROMPTS[0])
    assert not events(drive)
    drive.send(ASK, link=9)
    drive.step()
    (snapshot,) = events(drive)
    assert snapshot.reset
    serve(drive, PROMPTS[1])
    drive.send(ASK, link=8)
    drive.step()
    assert heard(drive, 8)._reported == heard(drive, 9)._reported
    assert drive.outputs[-1].status.cache_seq == heard(drive, 8).seq == heard(drive, 9).seq


def test_what_is_evicted_or_dropped_is_taken_back():
    drive = driver(num_blocks=60)
    drive.send(ASK, link=9)
    for prompt in PROMPTS:
        serve(drive, prompt)
    view = heard(drive)
    held = {prompt[0]: view.num_tokens(groups(prompt), 0.0) for prompt in PROMPTS}
    assert held[0] < 128 <= held[4]
    for prompt in PROMPTS:
        cached = drive.cache.match(_path(ANNA), prompt)
        assert cached // 64 * 64 == held[prompt[0]]
    drive.send(CacheCommand("drop", tenant="tenant"))
    drive.step()
    assert len(heard(drive)) == 0


def _path(region: Region):
    from cache.tree.namespaces import PathEntry

    return (PathEntry(region.id, -1),)


def test_a_closed_link_is_told_nothing_more():
    drive = driver()
    drive.send(ASK, link=9)
    serve(drive, PROMPTS[0])
    drive.send(LinkClosed(), link=9)
    drive.step()
    before = len(events(drive))
    serve(drive, PROMPTS[1])
    assert len(events(drive)) == before


def test_another_key_means_other_names_for_everybody():
    drive = driver()
    drive.send(ASK, link=9)
    serve(drive, PROMPTS[0])
    drive.send(CacheCommand("snapshot", key=b"n" * 32), link=8)
    drive.step()
    for link in (8, 9):
        assert heard(drive, link).num_tokens(groups(PROMPTS[0], key=b"n" * 32), 0.0) == 128


def test_frames_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_feed, "MAX_GROUPS_PER_EVENT", 2)
    monkeypatch.setattr(cache_feed, "MAX_SNAPSHOT_GROUPS", 3)
    drive = driver()
    drive.send(ASK, link=9)
    serve(drive, PROMPTS[4])
    serve(drive, PROMPTS[3])
    drive.send(CacheCommand("drop", tenant="tenant"), link=8)
    drive.step()
    changes = [event for event in events(drive) if not event.reset]
    assert len(changes) > 3
    assert all(len(event.inserted) <= 2 and len(event.evicted) <= 2 for event in changes)
    assert len(heard(drive)) == 0
    serve(drive, PROMPTS[4])
    drive.send(ASK, link=7)
    drive.step()
    assert heard(drive, 7).num_tokens(groups(PROMPTS[4]), 0.0) == 192


def test_blocks_that_fill_no_group_tell_nothing():
    drive = Driver(ScriptedRunner(num_blocks=64, block_size=24))
    drive.send(ASK, link=9)
    serve(drive, PROMPTS[0])
    assert not events(drive)
    assert drive.outputs[-1].status.cache_seq == -1
