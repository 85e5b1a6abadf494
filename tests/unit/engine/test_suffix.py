"""The suffix index: what a region computed before is proposed to that region, and to nobody else."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request
from proposing import speculating

from workers.engine.speculate import suffix
from workers.engine.speculate.suffix import RegionIndex, SuffixProposer
from workers.protocol.messages import CacheCommand, Region

PROMPT = encode("tell me the same thing again")
A, B, PUBLIC = (Region(bytes([i]) * 16) for i in range(3))


def ask(request_id, region, tenant, prompt=PROMPT, **fields):
    return generate_request(request_id, prompt, 40, tenant=tenant, namespace=(region,), **fields)


def proposed(drive, request):
    """Proposals and accepted ones of a request that runs by itself."""
    totals = drive.engine.totals
    before = totals.num_proposed, totals.num_accepted
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)
    return totals.num_proposed - before[0], totals.num_accepted - before[1]


def driver(lag=0):
    return Driver(ScriptedRunner(num_blocks=200, block_size=4), lag=lag, speculate=speculating(SuffixProposer(4)))


@pytest.mark.parametrize("lag", [0, 1])
def test_a_region_that_hears_the_same_again_is_served_in_fewer_steps(lag):
    drive = driver(lag)
    _, at_first = proposed(drive, ask("r1", A, "a"))
    num_steps = drive.engine.totals.num_steps
    _, again = proposed(drive, ask("r2", A, "a"))
    assert again > 12 > at_first
    assert drive.engine.totals.num_steps - num_steps < 0.7 * num_steps


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_what_another_region_computed_changes_no_proposal(tenant):
    """Paired: the same request with and without the same text in another region, of another tenant or the same one."""
    alone = proposed(driver(), ask("r", B, tenant))
    after_another, twice = driver(), driver()
    for drive in (after_another, twice):
        proposed(drive, ask("r1", A, "a"))
    assert proposed(after_another, ask("r", B, tenant)) == alone
    assert proposed(twice, ask("r", A, "a")) != alone


def test_the_shared_public_part_teaches_no_tenant_about_the_other():
    end = 16
    first, second = ((Region(PUBLIC.id, end), region) for region in (A, B))  # a public region, then the tenant's own
    request = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.0}
    alone = proposed(driver(), generate_request("r", **request, namespace=second))
    drive = driver()
    proposed(drive, generate_request("r1", **request, namespace=first))
    assert proposed(drive, generate_request("r", **request, namespace=second)) == alone


def test_what_may_not_be_written_teaches_nothing():
    alone = proposed(driver(), ask("r", A, "a"))
    drive = driver()
    proposed(drive, ask("r1", A, "a", cache_write=False))
    assert proposed(drive, ask("r", A, "a")) == alone


def test_what_a_tenant_that_is_purged_taught_is_forgotten():
    alone = proposed(driver(), ask("r", A, "a"))
    drive = driver()
    proposed(drive, ask("r1", A, "a"))
    drive.send(CacheCommand("drop", tenant="tenant"), link=LINK)
    drive.step()
    assert proposed(drive, ask("r", A, "a")) == alone


def test_what_regions_keep_is_bounded_in_each_and_in_all(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_TOKENS", 20)
    monkeypatch.setattr(suffix, "ALL_TOKENS", 30)
    proposer, most = SuffixProposer(4), Counter()
    drive = Driver(ScriptedRunner(num_blocks=400, block_size=4), speculate=speculating(proposer))
    for number in range(8):
        drive.send(ask(f"r{number}", region := Region(bytes([number]) * 16), f"t{number}"))
        while not drive.idle:
            drive.step()
            sizes = [len(known.tokens) for known in proposer._regions.values()]
            most |= Counter(each=max(sizes, default=0), all=sum(sizes))
        assert region.id in proposer._regions, "those that were taught longest ago go first"
    assert 15 < most["each"] <= 20 < most["all"] <= 30


def test_most_of_the_latest_longest_matches_decide():
    index = RegionIndex()
    for number, text in enumerate(([1, 2, 3, 7, 7], [1, 2, 3, 8, 9], [1, 2, 3, 8, 5], [9, 2, 3, 4])):
        index.teach((number, 0), array("i", text))
    length, places = index.find(array("i", [0, 1, 2, 3]))
    assert (length, len(places)) == (3, 3)
    assert index.continuation(places, 5) == [8, 5]  # the latest of equal counts; then its text ends


def test_a_text_that_comes_in_pieces_is_one_text():
    index = RegionIndex()
    index.teach((1, 0), array("i", [1, 2, 3]))
    index.teach((1, 0), array("i", [4, 5]))
    index.teach((2, 0), array("i", [6]))
    length, places = index.find(array("i", [2, 3]))
    assert length == 2
    assert index.continuation(places, 5) == [4, 5]
