"""Whatever a gateway's link carries, others' streams stay what they are: every field of every message at any value,
against the real engine with a real model, two streams beside it.

Of the class of S1. The hour of it, over HTTP, is tests/chaos/test_hostile_soak.py.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

import pytest
from fakes import generate_request, scripted_engine
from hostile import messages
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from inline_grammars import InlineGrammars
from tiny_models import TinyModel

from cache import invariants
from cache.blocks.usage import LAST_RESORT
from workers.engine.engine import LinkClosed
from workers.protocol.frames import encode
from workers.protocol.messages import Failed, Finished, SamplingParams, StepFrame

MINE, THEIRS = 1, 2
VOCAB_SIZE, NUM_TOKENS = 301, 14
MAX_ROUNDS = 3000


@pytest.fixture(
    scope="module",
    params=[pytest.param("plain", id="at-once"), pytest.param("device", id="one-step-late", marks=pytest.mark.rest)],
)
def runner(request, tmp_path_factory):
    """On the device's way a step is in flight while the next one is planned."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = TinyModel.make("llama", tmp_path_factory.mktemp("model"))
    yield model.runner(num_blocks=200, steps=request.param, max_rows=12)
    torch.set_num_threads(before)


class World:
    """An engine, what it tells the victims' link, and whether its laws hold."""

    def __init__(self, runner):
        vocabulary = [bytes([i]) if i < 256 else b"" for i in range(VOCAB_SIZE)]
        self.now = 1000.0
        self.engine = scripted_engine(
            runner, max_batch_tokens=40, max_running=12, clock=lambda: self.now, grammars=InlineGrammars(vocabulary)
        )
        self.tokens = defaultdict(list)
        self.endings = {}
        self.answered = []

    def step(self, *events):
        self.now += 0.01
        for link, message in self.engine.step(events).messages:
            encode(message)  # or it would end the link
            if isinstance(message, Finished | Failed) and link == THEIRS:
                self.answered.append(message.request_id)
            if link != MINE:
                continue
            if isinstance(message, StepFrame):
                for delta in message.deltas:
                    self.tokens[delta.request_id, delta.index] += delta.tokens
            elif isinstance(message, Finished | Failed):
                self.endings[message.request_id] = message
        scheduler = self.engine.scheduler
        held = [*scheduler.all_running, *scheduler.block_tables._leaving]
        invariants.check(self.engine.cache, [sequence.handle for sequence in held])

    def run(self, until):
        for _ in range(MAX_ROUNDS):
            if until():
                return
            self.step()
        raise AssertionError("it never ends")


def victims(root):
    how = [
        SamplingParams(seed=0, temperature=0.0, min_tokens=NUM_TOKENS),
        SamplingParams(seed=5, temperature=1.0, top_p=0.9, frequency_penalty=0.5, logprobs=0),
    ]
    return [
        generate_request(
            f"victim {i}",
            [*range(3, 30 + 9 * i)],
            NUM_TOKENS,
            tenant=f"victim {i}",
            sampling=sampling,
            root=root,
            num_choices=1 + i,
        )
        for i, sampling in enumerate(how)
    ]


@pytest.fixture(scope="module")
def undisturbed(runner):
    world = World(runner)
    world.step(*[(MINE, request) for request in victims(runner.root)])
    world.run(lambda: len(world.endings) == 2)
    assert len(world.tokens) == 3
    return dict(world.tokens)


@settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # a seed has nothing to be shrunk
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32), place=st.integers(0, 8))
def test_s1_no_message_changes_a_strangers_tokens_or_ends_the_engine(runner, undisturbed, seed, place):
    world, rng = World(runner), Random(seed)
    for i in range(12):
        if i == place:
            world.step(*[(MINE, request) for request in victims(runner.root)])
        world.step(*[(THEIRS, message) for message in messages(rng, VOCAB_SIZE, runner.root)])
    world.run(lambda: len(world.endings) == 2)
    assert {type(ending) for ending in world.endings.values()} == {Finished}
    assert world.tokens == undisturbed
    world.step((THEIRS, LinkClosed()))
    world.run(lambda: not (world.engine.attempts or world.engine.num_in_flight))
    cache = world.engine.cache
    assert cache.available(LAST_RESORT) + cache.num_pinned == cache.num_blocks - 1, "a block leaked"
