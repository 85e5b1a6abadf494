"""Lookahead decoding: a window that is a tree, n-grams out of it, and the same tokens whatever it guesses."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request
from proposing import speculating

from workers.engine.speculate.lookahead import (
    KEPT_GRAMS,
    LEVELS,
    MOST_GRAMS,
    LookaheadProposer,
    Window,
    advance,
    draft,
    first_levels,
)


def right(successor, proposal, last):
    """What a model that only looks at the token before draws at each place."""
    return [successor[last], *(successor[token] for token in proposal.tokens)]


def test_each_column_goes_on_behind_its_own_token():
    window = Window(first_levels(range(10, 20), 3))
    proposal = draft(window, 5, 40)
    assert proposal.tokens[:3] == (10, 11, 12)
    assert [proposal.path(nodes[-1]) for nodes in window.nodes] == [
        [10, 11, 12],
        [10, 11, 12, 13],
        [10, 11, 12, 13, 14],
    ]


def test_the_window_finds_how_the_text_goes_on_without_having_seen_it():
    """A cycle of 7 tokens in another order than the text: Jacobi iteration finds runs of it, which become n-grams."""
    cycle = [3, 9, 4, 8, 5, 7, 6]
    successor = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    window, last, lengths = Window(first_levels(sorted(cycle), 4)), 3, []
    for _ in range(20):
        proposal = draft(window, last, 60)
        drawn = right(successor, proposal, last)
        nodes, node, token = [], -1, drawn[0]
        while (child := proposal.follow(node, token)) is not None:
            nodes.append(node := child)
            token = drawn[node + 1]
        advance(window, drawn, nodes)
        lengths.append(len(nodes))
        last = token
    assert sum(lengths[:3]) < 3
    assert min(lengths[12:]) >= LEVELS


def test_what_is_kept_and_tried_is_bounded():
    window = Window(first_levels([1, 2, 3], 2))
    for i in range(20):
        window.keep([7, i, i, i])
    assert len(window.grams[7]) == KEPT_GRAMS
    assert window.known(7) == [(19,) * 3, (18,) * 3, (17,) * 3][:MOST_GRAMS]


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 9, 14])
def test_a_small_room_is_not_overdrawn(num_nodes):
    window = Window(first_levels(range(10, 20), 4))
    window.keep([5, 6, 7, 8])
    proposal = draft(window, 5, num_nodes)
    assert len(proposal.tokens) <= num_nodes
    advance(window, [0] * (len(proposal.tokens) + 1), ())
    assert all(len(level) == 4 for level in window.levels)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_window_changes_no_token(lag):
    request = generate_request("r", encode("hello hello"), 40)
    drive = Driver(
        ScriptedRunner(num_blocks=64, block_size=4),
        lag=lag,
        speculate=speculating(LookaheadProposer(), max_proposals=24),
    )
    drive.send(request)
    drive.run().check_idle()
    drive.check_alone(request)
    assert drive.engine.totals.num_proposed > 50
    assert drive.endings[LINK, "r"].usage.output == 40
