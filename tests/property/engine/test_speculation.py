"""Random histories with a proposer that is right, wrong, short, long or silent: every token, end and bill is the one of
a worker that proposes nothing; the laws of cache, leases and books hold behind each step."""

from __future__ import annotations

import random

from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, expected_output, generate_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proposing import Informed, InformedTree, speculating

from workers.engine.values.sampling_params import choice_seed
from workers.protocol.messages import Cancel, ExtendLease, SamplingParams

TEXT = encode("abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh")
SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(22, 60),
        "max_batch_tokens": st.integers(4, 40),
        "max_running": st.integers(3, 4),
        "lag": st.sampled_from([0, 1]),
        "eos_every": st.sampled_from([0, 13, 5]),
        "max_step_tokens": st.sampled_from([None, None, None, 2, 5]),
        "late": st.booleans(),
        "proposer": st.sampled_from([Informed, InformedTree, InformedTree]),
    }
)


def history(source, count):
    """Requests, and for some of them when they are cancelled."""
    for i in range(count):
        num_choices = source.choice([1, 1, 1, 2])
        max_tokens = source.randrange(1, 24)
        stops = tuple(source.sample(range(97, 120), 3)) if i % 3 == 0 else ()
        yield (
            generate_request(
                f"r{i}",
                (*TEXT[: source.randrange(1, 40)], 97 + source.randrange(3)),
                max_tokens,
                tenant=source.choice("AB"),
                sampling=SamplingParams(seed=i, temperature=float(i % 2), stop_token_ids=stops),
                tier=source.choice(["interactive", "interactive", "batch"]),
                num_choices=num_choices,
                lease_bound=source.randrange(1, max_tokens * num_choices + 1),
            ),
            source.choice([None, None, None, 2, 9]),
        )


def answers(requests, eos_every):
    return {
        (r.request_id, index): expected_output(
            r.prompt, r.sampling, r.max_tokens, seed=choice_seed(r.sampling.seed, index), eos_every=eos_every
        )
        for r in requests
        for index in range(r.num_choices)
    }


def extend_leases(drive):
    for (_, request_id), attempt in list(drive.engine.attempts.items()):
        lease, message = attempt.lease, attempt.message
        total = message.max_tokens * message.num_choices
        if lease.left < message.num_choices and not lease.last:
            bound = min(total, lease.bound + 3 * message.num_choices)
            drive.send(ExtendLease(request_id, lease.seq + 1, bound, last=bound == total))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SHAPES, st.integers(0, 2**32), st.integers(2, 12), st.sampled_from([0.0, 0.2, 1.0]))
def test_proposals_change_no_token_no_end_and_no_bill(shape, seed, most, error):
    source = random.Random(seed)
    arrivals = list(history(source, 8))
    runner = ScriptedRunner(num_blocks=shape["num_blocks"], block_size=4, eos_every=shape["eos_every"])
    known = answers([request for request, _ in arrivals], shape["eos_every"])
    proposer = shape["proposer"](known, seed, error)
    drive = Driver(
        runner,
        lag=shape["lag"],
        device={"max_step_tokens": shape["max_step_tokens"], "late": shape["late"]},
        max_batch_tokens=shape["max_batch_tokens"],
        max_running=shape["max_running"],
        speculate=speculating(proposer, max_proposals=most, max_step_tokens=40),
    )
    drive.eos_every = shape["eos_every"]
    cancels = {}
    for step, (request, cancel_after) in enumerate(arrivals):
        drive.send(request)
        if cancel_after is not None:
            cancels.setdefault(step + cancel_after, []).append(request.request_id)
    for step in range(3000):
        if drive.idle:
            break
        for request_id in cancels.get(step, ()):
            drive.send(Cancel(request_id))
        extend_leases(drive)
        drive.step()
    drive.check_idle()
    for (link, request_id), ending in drive.endings.items():
        request = drive.requests[link, request_id]
        failed = not hasattr(ending, "reason")
        for index in range(request.num_choices):
            exactly = not failed and drive.finishes.get((link, request_id, index)) in ("stop", "length")
            found = drive.tokens[link, request_id, index]
            answer = known[request_id, index]
            stops = [i for i, t in enumerate(answer) if t in request.sampling.stop_token_ids]
            alone = answer[: stops[0] + 1] if stops else answer
            assert found == (alone if exactly else alone[: len(found)])
    if error == 0.0 and proposer.num_asked > 30 and not shape["eos_every"]:
        assert drive.engine.totals.num_accepted > 0
    if error == 1.0 and type(proposer) is Informed:  # other branches may be right by chance
        assert drive.engine.totals.num_accepted == 0


def test_a_proposer_that_is_always_right_saves_most_of_the_steps():
    request = generate_request("r", encode("hello"), 60)
    known = answers([request], 0)
    for lag in (0, 1):
        drive = Driver(
            ScriptedRunner(num_blocks=64, block_size=4),
            lag=lag,
            speculate=speculating(Informed(known, error=0.0), max_proposals=8),
        )
        drive.send(request)
        drive.run().check_idle()
        drive.check_alone(request)
        assert drive.endings[LINK, "r"].usage.output == 60
        assert drive.engine.totals.num_steps < 30
        assert drive.engine.totals.num_accepted > 30
