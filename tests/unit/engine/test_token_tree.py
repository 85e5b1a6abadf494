"""Trees of guesses: what a row says of them, which branch counts, what moves, what grows out of text."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, expected_output, generate_request
from proposing import InformedTree, speculating

from workers.engine.speculate.proposer import Ask
from workers.engine.speculate.suffix import Text
from workers.engine.speculate.tree import TreeProposer, Vote, grow
from workers.engine.speculate.verify import moves, own_path
from workers.engine.values.plan import SampledToken
from workers.engine.values.token_tree import MAX_NODES, ROOT, Grower, Proposal, positions, views

FORKED = Proposal((5, 6, 7, 8, 9), (ROOT, ROOT, 1, 0, 2))
"""5 8 and 6 7 9."""


def test_nodes_stand_at_their_depth_and_see_their_branch():
    assert FORKED.depths == [1, 1, 2, 2, 3]
    assert FORKED.path(4) == [6, 7, 9]
    assert positions(20, FORKED.parents) == [20, 21, 21, 22, 22, 23]
    assert [bin(view) for view in views(FORKED.parents)] == ["0b1", "0b11", "0b101", "0b1101", "0b10011", "0b101101"]
    assert FORKED.trunk() == Proposal.chain([5, 8])
    assert not FORKED.is_chain and Proposal.chain([5, 8]).is_chain
    assert FORKED.cut(3) == Proposal((5, 6, 7), (ROOT, ROOT, 1))


def test_the_last_of_64_tokens_is_the_sign_bit():
    seen = views(Proposal.chain(range(MAX_NODES)).parents)
    assert seen[62] == 2**63 - 1
    assert seen[63] == -1


@pytest.mark.parametrize(
    ("drawn", "nodes", "tokens"),
    [
        ([4, 0, 0, 0, 0, 0], (), [4]),
        ([5, 9, 0, 0, 0, 0], (0,), [5, 9]),
        ([5, 8, 0, 0, 3, 0], (0, 3), [5, 8, 3]),
        ([6, 0, 7, 9, 0, 2], (1, 2, 4), [6, 7, 9, 2]),
        ([6, 0, 1, 9, 0, 2], (1,), [6, 1]),
        ([6, 0, 7, 99, 0, 2], (1, 2), [6, 7, 99]),
    ],
)
def test_draws_choose_the_branch(drawn, nodes, tokens):
    found, kept = own_path(FORKED, [SampledToken(token) for token in drawn], {99})
    assert (found, [one.token for one in kept]) == (nodes, tokens)


def test_an_end_among_the_nodes_ends_the_choice():
    found, kept = own_path(FORKED, [SampledToken(token) for token in (6, 0, 7, 9, 0, 2)], {7})
    assert found == (1,)
    assert [one.token for one in kept] == [6, 7]


def test_a_branch_goes_to_the_places_behind_the_known_token():
    # Position 6 is the known one; blocks of 4: positions 4..7 in block 9, 8..11 in block 3.
    assert moves((1, 2, 4), 6, [1, 9, 3], 4) == [(12, 39), (13, 12), (15, 13)]
    assert moves((0, 1, 2), 6, [1, 9, 3], 4) == []


def test_a_grower_joins_equal_beginnings_and_stops_when_it_is_full():
    grower = Grower(4)
    assert grower.add_path([1, 2]) == [0, 1]
    assert grower.add_path([1, 3, 4, 5]) == [0, 2, 3]
    assert grower.grown() == Proposal((1, 2, 3, 4), (ROOT, 0, 0, 2))


def test_the_trunk_is_the_heaviest_continuation_and_others_fill_up():
    text = array("i", [1, 2, 3, 1, 2, 4, 1, 2, 3, 9])
    votes = [Vote(text, place, 1) for place in (2, 5, 8)]
    tree = grow(votes, 3, 6)
    assert tree.trunk().tokens[:1] == (3,)
    branches = {tuple(tree.path(node)) for node in range(len(tree.tokens))}
    assert {(3,), (4,), (4, 1)} <= branches
    assert len(tree.tokens) == 6
    assert grow(votes, 2, 2).depths == [1, 2]


def test_a_text_that_repeats_is_repeated_on():
    text = array("i", [9, 1, 2, 3, 1, 2, 3])
    assert grow([Vote(text, 4, 1, loops=True)], 7, 7) == Proposal.chain([1, 2, 3, 1, 2, 3, 1])
    assert grow([Vote(text, 4, 1)], 7, 7) == Proposal.chain([1, 2, 3])


def test_a_branch_of_few_votes_is_left_out():
    text = array("i", [7, 8])
    assert grow([Vote(text, 0, 9), Vote(text, 1, 1)], 1, 8) == Proposal.chain([7])


@pytest.mark.parametrize("lag", [0, 1])
def test_trees_change_no_token_and_the_right_branch_is_kept(lag):
    """Behind each accepted branch the scripted model reads its tokens where the moves left them."""
    request = generate_request("r", encode("hello"), 60)
    answer = expected_output(request.prompt, request.sampling, 60)
    runner = ScriptedRunner(num_blocks=64, block_size=4)
    moved = []
    move = runner.move_tokens
    runner.move_tokens = lambda moves: (moved.extend(moves), move(moves))
    proposer = InformedTree({("r", 0): answer}, seed=lag, error=0.1)
    drive = Driver(runner, lag=lag, speculate=speculating(proposer, max_proposals=24))
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)
    totals = drive.engine.totals
    assert len(moved) > 4
    assert totals.num_steps < 40
    assert totals.num_accepted > 30
    usage = drive.endings[LINK, "r"].usage
    assert (usage.output, usage.speculated) == (60, totals.num_proposed - totals.num_accepted)


def test_a_model_that_takes_no_trees_is_given_their_trunks():
    request = generate_request("r", encode("hello"), 60)
    proposer = InformedTree({("r", 0): expected_output(request.prompt, request.sampling, 60)})
    drive = Driver(speculate=speculating(proposer, max_proposals=24, takes_trees=False))
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)
    rows = [row for step in drive.runner.steps for row in step]
    assert not any(row.layout for row in rows)
    assert any(row.num_proposed for row in rows)


def asked(tokens, num_tokens=3, num_nodes=12):
    """Of a sequence that teaches nothing."""
    attempt = SimpleNamespace(message=SimpleNamespace(cache_write=False), path=[SimpleNamespace(region=b"r")])
    sequence = SimpleNamespace(tokens=array("i", tokens), attempt=attempt, handle=object())
    return Ask(sequence, Text(), num_tokens, num_nodes)


def test_a_text_with_two_continuations_is_tried_both_ways():
    text = [11, 12, 13, 5, 11, 12, 14, 6, 11, 12, 13, 7, 11, 12]
    (tree,) = TreeProposer(4).propose([asked(text)])
    branches = {tuple(tree.path(node)) for node in range(len(tree.tokens))}
    assert {(13, 7, 11), (13, 5, 11), (14, 6, 11)} <= branches
    assert tree.trunk().tokens == (13, 7, 11)
