"""What one rank says is what the other hears, as far as a forward pass needs it."""

from __future__ import annotations

import socket
import threading

import pytest

from workers.engine.parallel.runner import OutOfStep, ParallelRunner, follow
from workers.engine.parallel.wire import Channel, CopyBlocks, Ended, Execute, Leave, Loaded, frame, parts_of, rows_of
from workers.engine.values.abilities import GENERATES
from workers.engine.values.layout import Tree
from workers.engine.values.plan import Collected, Row, RowResult, SampleSpec
from workers.protocol.messages import SamplingParams


@pytest.fixture
def channels():
    first, second = map(Channel, socket.socketpair())
    yield first, second
    first.close()
    second.close()


DRAW = SampleSpec(SamplingParams(7), 7, 4, [1, 2, 3, 4], [])
ROWS = [Row([1, 2, 3, 4], 0, [9, 8, 7], (DRAW, DRAW), 3, 77), Row([5], 8, [3, 2, 1], row_id=6)]


def test_every_message_arrives_as_it_was_sent(channels):
    said = [Execute(parts_of(ROWS, 4)), CopyBlocks([(1, 2), (3, 4)]), Loaded(), Ended("Because.", 78), Leave()]
    for message in said:
        channels[0].send(frame(message))
    assert [channels[1].receive() for _ in said] == said


def test_a_long_step_arrives_whole(channels):
    rows = [Row(list(range(50_000)), 0, list(range(12_500))) for _ in range(4)]
    message = Execute(parts_of(rows, 4))
    sender = threading.Thread(target=channels[0].send, args=(frame(message),))
    sender.start()
    assert channels[1].receive() == message
    sender.join()


def test_a_closed_end_is_heard_even_inside_a_message(channels):
    channels[0].send(frame(Loaded()) + frame(Ended("x" * 100, 2))[:50])
    channels[0].close()
    assert channels[1].receive() == Loaded()
    assert channels[1].receive() is None


def test_rows_keep_what_the_pass_needs_and_only_the_blocks_it_reaches():
    rows = rows_of(parts_of(ROWS, 4))
    assert [(row.tokens, row.start) for row in rows] == [([1, 2, 3, 4], 0), ([5], 8)]
    assert [row.block_table for row in rows] == [[9], [3, 2, 1]]
    assert [bool(row.draws) for row in rows] == [True, False]
    assert [(row.prompt_logprobs, row.next_token) for row in rows] == [(3, 77), (-1, -1)]
    assert [row.row_id for row in rows] == [-1, 6]
    assert DRAW not in rows[0].draws


def test_a_row_with_guesses_reaches_the_head_as_often_as_on_rank_0():
    row = Row([5, 6, 7], 4, [2, 3], (DRAW, DRAW, DRAW), num_proposed=2, layout=Tree((-1, -1)))
    (found,) = rows_of(parts_of([row], 4))
    assert (found.num_proposed, len(found.draws), found.layout) == (2, 3, Tree((-1, -1)))


class Model:
    """Writes down what it was asked; fails when told to."""

    root, block_size, num_blocks, max_model_len = "root", 4, 8, 32
    bytes_per_block = 64
    eos_token_ids, vocab_size, vocabulary, kernels, graphs, takes_trees = (2,), 100, "digest", (), (), True
    abilities = GENERATES

    def __init__(self):
        self.asked = []
        self.broken = False

    def launch(self, rows):
        return Collected(self.execute(rows))

    def execute(self, rows):
        self.asked.append([row.tokens for row in rows])
        if self.broken:
            raise RuntimeError("no memory")
        return [RowResult() for _ in rows]

    def copy_blocks(self, pairs):
        self.asked.append(pairs)

    def move_tokens(self, moves):
        self.asked.append(("move", moves))


class OneRank:
    """In the place of `Ranks`: the other end of a channel."""

    def __init__(self, channel):
        self.channel = channel
        self.asked_for_news = 0

    def send(self, message):
        self.channel.send(frame(message))

    def wait_until_loaded(self):
        assert self.channel.receive() == Loaded()

    def wait_for_news(self):
        self.asked_for_news += 1


def test_a_rank_does_what_rank_0_does_in_the_same_order(channels):
    leading, following = Model(), Model()
    thread = threading.Thread(target=follow, args=(following, channels[1]))
    thread.start()
    runner = ParallelRunner(leading, OneRank(channels[0]))
    runner.execute(ROWS)
    runner.copy_blocks([(1, 2)])
    runner.move_tokens([(9, 8)])
    runner.execute(ROWS[1:])
    channels[0].send(frame(Leave()))
    thread.join(5)
    assert not thread.is_alive()
    assert following.asked == leading.asked == [[[1, 2, 3, 4], [5]], [(1, 2)], ("move", [(9, 8)]), [[5]]]


def test_a_rank_leaves_when_rank_0_is_gone(channels):
    channels[0].close()
    channels[1].send = lambda data: None
    follow(Model(), channels[1])


def test_a_step_that_fails_on_rank_0_alone_is_no_failure_of_one_step(channels):
    """The engine would go on with the next step, and the other ranks with the rest of this one."""
    channels[1].send(frame(Loaded()))
    model, ranks = Model(), OneRank(channels[0])
    runner = ParallelRunner(model, ranks)
    model.broken = True
    with pytest.raises(OutOfStep, match="no memory"):
        runner.execute(ROWS)
    assert not issubclass(OutOfStep, Exception)
    assert ranks.asked_for_news == 1
