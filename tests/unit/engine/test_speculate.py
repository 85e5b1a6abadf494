"""Proposals: which are found, how many are tried, which draws count, and what a plan may spend on them."""

from __future__ import annotations

import random
from array import array
from itertools import pairwise

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, expected_output, generate_request
from proposing import Informed, speculating

from workers.engine.speculate import ngram
from workers.engine.speculate.acceptance import RETRY_TOKENS, Acceptance
from workers.engine.speculate.lookup import NgramProposer
from workers.engine.speculate.ngram import LONGEST_MATCH, MAX_PLACES, PLAN_TOKENS, NgramIndex, Room, continuation
from workers.engine.speculate.verify import own_path
from workers.engine.values.plan import SampledToken
from workers.engine.values.token_tree import Proposal
from workers.protocol.messages import SamplingParams


def searched(tokens):
    """The place behind the longest match of the last 2 to 4 tokens among the latest places, by looking at them all."""
    end = len(tokens)
    places = [p for p in range(2, end) if list(tokens[p - 2 : p]) == list(tokens[end - 2 :])]
    places = places[::-1][:MAX_PLACES] if end > 2 else []
    for length in range(LONGEST_MATCH, 1, -1):
        for place in places:
            if place >= length and tokens[place - length : place] == tokens[end - length :]:
                return place
    return -1


@pytest.mark.parametrize("num_ids", [2, 3, 8, 40])
def test_the_longest_latest_match_is_found_however_the_text_arrives(num_ids):
    source = random.Random(num_ids)
    for _ in range(30):
        tokens, index = array("i"), NgramIndex()
        for _ in range(source.randrange(60)):
            tokens.extend(source.randrange(num_ids) for _ in range(source.choice([1, 1, 1, 7])))
            index.extend(tokens)
            match = index.find(tokens)
            assert (-1 if match is None else match.place) == searched(tokens)


def test_a_long_text_is_indexed_over_several_plans_and_a_short_one_beside_it_does_not_wait():
    text = array("i", range(3 * PLAN_TOKENS))
    text.extend(text[:9])
    room = Room()
    long, short = NgramIndex(room), NgramIndex(room)
    for num_plans in range(1, 100):
        room.refill()
        long.extend(text)
        short.extend(array("i", [1, 2, 3, 1, 2]))
        assert len(long._before) <= num_plans * PLAN_TOKENS
        assert short.find(array("i", [1, 2, 3, 1, 2])).place == 2
        if len(long._before) == len(text):
            break
        assert long.find(text) is None
    assert 3 < num_plans < 20
    assert long.find(text).place == 9


@pytest.mark.parametrize("lag", [0, 1])
def test_each_plan_takes_some_more_of_a_long_prompt_into_its_index(monkeypatch, lag):
    monkeypatch.setattr(ngram, "PLAN_TOKENS", 80)
    proposer, sizes = NgramProposer(), []
    index = proposer.begin()
    monkeypatch.setattr(proposer, "begin", lambda: index)
    runner = ScriptedRunner(num_blocks=400, block_size=4)
    drive = Driver(runner, lag=lag, speculate=speculating(proposer), max_batch_tokens=400)
    drive.send(generate_request("r", encode("abcdefgh" * 30), 60))
    while not drive.idle:
        drive.step()
        sizes.append(len(index._before))
    assert max(after - before for before, after in pairwise(sizes)) == 40
    assert sizes[-1] > 280
    drive.check_alone(drive.requests[LINK, "r"])


def test_a_text_that_ends_in_a_repetition_is_repeated_on():
    tokens = array("i", [9, 1, 2, 3, 1, 2, 3])
    index = NgramIndex()
    index.extend(tokens)
    first, length = index.find(tokens)
    assert (first, length) == (4, 3)
    assert list(continuation(tokens, first, 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_draws_count_up_to_the_first_that_differs_or_ends():
    drawn = [SampledToken(token) for token in (5, 6, 7, 8)]

    def own(tokens, ends):
        return own_path(Proposal.chain(tokens), drawn, ends)

    assert own((5, 6, 7), set()) == ((0, 1, 2), tuple(drawn))
    assert own((5, 9, 7), set()) == ((0,), tuple(drawn[:2]))
    assert own((9, 6, 7), set()) == ((), tuple(drawn[:1]))
    assert own((5, 6, 7), {6}) == ((0,), tuple(drawn[:2]))


def test_a_text_that_repeats_nothing_is_left_alone_soon_and_tried_again():
    acceptance, length, num_tried = Acceptance(), 100, 0
    while acceptance.num_wanted(length, 8):
        acceptance.observe(3, 0, length)
        length, num_tried = length + 1, num_tried + 1
    assert num_tried == 3
    assert not acceptance.num_wanted(length + RETRY_TOKENS - 2, 8)
    assert acceptance.num_wanted(length + RETRY_TOKENS - 1, 8) == 3


def test_proposals_grow_while_all_are_right():
    acceptance, tried = Acceptance(), []
    for _ in range(4):
        tried.append(acceptance.num_wanted(10, 16))
        acceptance.observe(tried[-1], tried[-1], 10)
    assert tried == [3, 6, 12, 16]
    acceptance.observe(16, 2, 10)
    assert acceptance.num_wanted(10, 16) == 3


def driven(requests, error=0.0, options=None, **settings):
    known = {(r.request_id, 0): expected_output(r.prompt, r.sampling, r.max_tokens) for r in requests}
    proposer = Informed(known, error=error)
    drive = Driver(settings.pop("runner", None), speculate=speculating(proposer, **options or {}), **settings)
    drive.send(*requests)
    return drive, proposer


def test_rejected_proposals_are_told_and_never_billed():
    request = generate_request("r", encode("hello"), 20)
    drive, _ = driven([request], error=1.0)
    drive.run().check_idle()
    usage = drive.endings[LINK, "r"].usage
    totals = drive.engine.totals
    assert usage.speculated == totals.num_proposed > 0
    assert usage.output == 20
    assert totals.num_accepted == 0


def test_a_stop_token_inside_what_was_accepted_ends_the_choice_there():
    prompt, free = encode("hello"), SamplingParams(seed=7, temperature=0.0)
    output = expected_output(prompt, free, 40)
    stop = output[17]
    end = output.index(stop)
    request = generate_request(
        "r", prompt, 40, sampling=SamplingParams(seed=7, temperature=0.0, stop_token_ids=(stop,))
    )
    proposer = Informed({("r", 0): output}, error=0.0)  # goes on behind the stop
    drive = Driver(speculate=speculating(proposer, max_proposals=16))
    drive.send(request)
    drive.run().check_idle()
    assert drive.tokens[LINK, "r", 0] == output[: end + 1]
    assert drive.finishes[LINK, "r", 0] == "stop"
    assert drive.endings[LINK, "r"].usage.output == end + 1


def test_proposals_stay_within_lease_budget_and_length():
    request = generate_request("r", encode("hello"), 30, lease_bound=11)
    drive, _ = driven([request], max_batch_tokens=6, max_running=2)
    for _ in range(60):
        drive.step()
        lease = drive.engine.attempts[LINK, "r"].lease
        assert lease.spent <= lease.bound
    assert len(drive.tokens[LINK, "r", 0]) == 11
    assert max(len(row.tokens) for rows in drive.runner.steps for row in rows) <= 6
    drive, _ = driven([generate_request("r", encode("hello"), 9)])
    drive.run().check_idle()
    assert len(drive.tokens[LINK, "r", 0]) == 9


def test_nobody_loses_blocks_for_a_proposal():
    requests = [generate_request(f"r{i}", encode("hello")[: 3 + i], 8) for i in range(2)]
    runner = ScriptedRunner(num_blocks=8, block_size=4)
    drive, proposer = driven(requests, runner=runner)
    preempt = drive.scheduler.ranks.preempt

    def watched(sequence, now, cause, plan=None):
        assert not plan.proposals
        preempt(sequence, now, cause, plan)

    drive.scheduler.ranks.preempt = watched
    drive.run().check_idle()
    for request in requests:
        drive.check_alone(request)
    assert proposer.num_asked


def test_guesses_take_no_block_that_a_chat_used_just_now():
    request = generate_request("r", encode("hello"), 14, tenant="batch", tier="batch")
    drive, proposer = driven([request], runner=ScriptedRunner(num_blocks=9, block_size=4))
    waiting, drive.inbox[:] = drive.inbox[:], []
    drive.send(generate_request("chat", encode("c" * 24), 1, tenant="chat"))
    drive.run()
    drive.inbox[:] = waiting
    while not proposer.num_asked:
        drive.step()
    assert drive.cache.num_free == 0
    assert drive.cache.usage("chat").num_recent == 6
    assert set(drive.cache.tenants()) == {"chat", "batch"}, "nothing is on nobody's account"
    drive.run().check_idle()
    drive.check_alone(request)


def test_many_rows_are_left_without_proposals():
    requests = [generate_request(f"r{i}", (*encode("hello"), i), 20) for i in range(1, 9)]
    drive, proposer = driven(requests, options={"max_step_tokens": 15})
    for _ in range(10):
        drive.step()
    assert not proposer.num_asked
    drive, proposer = driven(requests, options={"max_step_tokens": 16})
    drive.run().check_idle()
    assert proposer.num_asked
    assert max(len(row.tokens) for row in drive.runner.steps[8]) <= 2


def test_a_penalty_counts_drawn_tokens_only_so_nothing_is_proposed():
    sampling = SamplingParams(seed=1, temperature=0.0, presence_penalty=0.5)
    drive, proposer = driven([generate_request("r", encode("hello"), 12, sampling=sampling)])
    drive.run().check_idle()
    assert not proposer.num_asked
