"""Random batch of others never stops while one batch request waits for many places or blocks."""

from __future__ import annotations

import random

from engine_driver import LINK
from fakes import generate_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulation import BlindRunner, paced_driver

from workers.engine.sequences.sequence import Status

MAX_RUNNING = 16
NUM_BLOCKS = 200
LONGEST = 30
"""Output tokens of the longest request."""
MAX_TOKENS = 32
"""Tokens of a step."""


def most_steps(num_choices, length):
    """Returns the steps after which it runs. Others whose tenants were given less go first, what ran then has to end, and so
    has what passed it: as many tokens as its own for each of its choices (`overtaking.py`), of which a step computes at
    least half of what it may."""
    return 8 * LONGEST + 2 * num_choices * length // MAX_TOKENS


def steps_until_it_runs(num_chats, num_choices, length, seed):
    """Returns the steps that the request waits beside so many chats. They leave it its places and blocks."""
    rng = random.Random(seed)
    runner = BlindRunner((0.005, 0.00001, 0.0), num_blocks=NUM_BLOCKS + 1, block_size=4)
    drive = paced_driver(runner, max_batch_tokens=MAX_TOKENS, max_running=MAX_RUNNING)
    drive._check_running = lambda: None
    number = 0

    def send(name, tenant, num_prompt, num_output, tier="batch", **how):
        tokens = [number % 250, number // 250, *[7] * num_prompt]
        drive.send(generate_request(name, tokens, num_output, tenant=tenant, tier=tier, **how))

    def send_others():
        nonlocal number
        here = [attempt.message.tenant for attempt in drive.engine.attempts.values()]
        for tenant, most in (("chat", num_chats), ("a", 8), ("b", 8), ("c", 8)):
            for _ in range(most - here.count(tenant)):
                number += 1
                if tenant == "chat":
                    send(f"chat{number}", "chat", 2, LONGEST, "interactive")
                else:
                    size = rng.randint(0, 40), rng.randint(1, LONGEST)
                    send(f"{tenant}{number}", tenant, *size, num_choices=rng.choice([1, 1, 2, 4]))
        drive.step()

    for _ in range(40):
        send_others()
    send("it", "it", length, 4, num_choices=num_choices)
    most = most_steps(num_choices, length)
    for step in range(most):
        send_others()
        if (LINK, "it") in drive.endings or drive.attempt("it").sequences[0].status is Status.RUNNING:
            return step
    return most


@given(
    num_chats=st.integers(0, 3), num_choices=st.integers(1, 11), length=st.integers(0, 450), seed=st.integers(0, 10**6)
)
@example(num_chats=3, num_choices=11, length=10, seed=2)
@example(num_chats=3, num_choices=1, length=450, seed=1)
@example(num_chats=2, num_choices=5, length=320, seed=67)
@settings(max_examples=15, deadline=None)
def test_a_wide_or_long_request_is_not_starved_by_those_that_pass_it(num_chats, num_choices, length, seed):
    assert steps_until_it_runs(num_chats, num_choices, length, seed) < most_steps(num_choices, length)
