"""Choices that share a partly filled tail when blocks run out: who copies it, who keeps it, and who may have it next."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request

from cache.blocks.usage import LAST_RESORT
from workers.engine.sequences.sequence import Status
from workers.engine.values.errors import DeviceOutOfMemory


@pytest.fixture
def drive():
    """Four choices of each of two tenants that are about to write to the tails they share, and one free block. Whoever
    lacks a block takes it from tenant a."""
    drive = Driver(ScriptedRunner(num_blocks=64, block_size=4), device={}, lag=0)
    for tenant in "ba":
        drive.send(generate_request(tenant, encode(f"{tenant}23456"), 9, tenant=tenant, num_choices=4, temperature=1.0))
    drive.step()
    drive.scheduler.counters.charge("a", computed=1000)
    drive.held = drive.cache.allocate(drive.cache.available(LAST_RESORT) - 1, reach=LAST_RESORT)
    return drive


def choices(drive, tenant):
    return drive.attempt(tenant).sequences


def check(drive):
    drive.cache.free(drive.held)
    drive.run().check_idle()
    for (_, name), request in drive.requests.items():
        assert drive.endings[LINK, name].reason == "length"
        for index in range(4):
            drive.check_alone(request, index=index)


@pytest.fixture
def chained(drive, monkeypatch):
    """The turns begin with a choice of tenant a. It takes the free block, and then the first choice of b gets the tail that
    was copied."""
    monkeypatch.setattr(drive.scheduler.budget, "num_rows", lambda num_kv_tokens: 7)
    choices(drive, "a")[0].last_step = -2
    return drive


def test_a_tail_that_was_copied_and_given_up_may_be_copied_to_in_the_same_plan(chained):
    taker, *losers = choices(chained, "a")
    mine, theirs = taker.block_ids[-1], choices(chained, "b")[0].block_ids[-1]
    chained.step()
    assert all(loser.status is Status.PREEMPTED for loser in losers)
    assert chained.runner.copies[:2] == [(mine, taker.block_ids[-1]), (theirs, mine)]
    check(chained)


def test_a_copy_that_fails_takes_none_of_those_back_that_were_made_before_it(chained, monkeypatch):
    copy_blocks, made = chained.runner.copy_blocks, []

    def copy(pairs):
        if made:
            raise DeviceOutOfMemory("no room for a copy")
        made.append(pairs)
        copy_blocks(pairs)

    monkeypatch.setattr(chained.runner, "copy_blocks", copy)
    chained.step()
    monkeypatch.undo()
    chained.cache.free(chained.held)
    chained.run().check_idle()
    assert chained.endings[LINK, "b"].code == "internal"
    assert chained.endings[LINK, "a"].reason == "length"
    for index in range(4):
        chained.check_alone(chained.requests[LINK, "a"], index=index)


def test_the_last_owner_of_a_shared_tail_keeps_it(drive):
    """Two choices of b take the two blocks of tenant a. The third asks, the fourth has to go, and so the tail is the
    third's alone."""
    drive.held += drive.cache.allocate(1, reach=LAST_RESORT)
    *takers, owner, loser = choices(drive, "b")
    tail = owner.block_ids[-1]
    drive.step()
    assert loser.status is Status.PREEMPTED
    assert [len(one.output) for one in (*takers, owner)] == [2, 2, 2]
    assert owner.block_ids[-1] == tail
    check(drive)
