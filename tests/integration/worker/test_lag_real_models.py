"""A real model of random weights behind a device that answers one step late: every token and count that a gateway
hears is the one it hears without lag. Steps differ in who shares them, so logprobs are equal to rounding there, and to
the last bit where a request is alone. float32 on a CPU."""

from __future__ import annotations

import random

import pytest
from engine_driver import Driver
from fakes import generate_request
from tiny_models import TinyModel

from workers.protocol.messages import Cancel, ExtendLease, SamplingParams

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.rest]

PARAMS = [
    {"temperature": 0.0, "min_tokens": 1000},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "top_k": 20, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 0, "min_tokens": 9},
    {"temperature": 1.2, "min_p": 0.05, "logit_bias": ((7, 2.0),), "ignore_eos": True},
]


def requests(root, seed):
    source = random.Random(seed)
    shared = [source.randrange(3, 300) for _ in range(24)]
    for i in range(9):
        stops = tuple(source.sample(range(3, 300), 9)) if i % 2 else ()
        params = SamplingParams(seed=source.getrandbits(64), stop_token_ids=stops, **PARAMS[i % 5])
        prompt = shared[: source.randrange(24)] + [source.randrange(3, 300) for _ in range(1 + i)]
        num_choices = source.choice([1, 1, 2])
        yield generate_request(
            f"r{i}",
            prompt,
            source.randrange(4, 36),
            sampling=params,
            tenant="ab"[i % 2],
            tier=("interactive", "batch")[i % 4 == 3],
            num_choices=num_choices,
            lease_bound=3 if i % 3 == 0 else 36 * num_choices,
            prompt_logprobs=1 if i == 4 else -1,
            root=root,
        )


def play(runner, seed, lag, **device):
    """Requests arrive while others run, leases grow late, one request is cancelled before it runs."""
    told = {} if runner.lag else {"lag": lag, "device": device}
    drive = Driver(runner, **told, max_batch_tokens=13, max_running=5)
    drive.num_forced = 0
    for number, request in enumerate(requests(runner.root, seed)):
        drive.send(request)
        if number == 5:
            drive.send(Cancel(request.request_id))
        drive.step()
    for round_ in range(2000):
        if drive.idle:
            break
        drive.step()
        running = drive.scheduler.ranks.running["interactive"]
        if round_ % 13 == 7 and running:  # with a step of its in flight or not
            drive.scheduler.ranks.preempt(running[-1], drive.now, "blocks")
            drive.num_forced += 1
        for (_, request_id), attempt in list(drive.engine.attempts.items()):
            lease = attempt.lease
            if round_ % 5 == 0 and lease.bound < attempt.message.max_tokens * 2:
                drive.send(ExtendLease(request_id, lease.seq + 1, lease.bound + 4))
    drive.check_idle()
    logprobs = {}
    for delta in drive.records:
        logprobs.setdefault((delta.request_id, delta.index), []).extend(delta.logprobs)
    usage = {key: (e.reason, e.usage.prompt, e.usage.output) for key, e in drive.endings.items()}
    return drive, logprobs, (dict(drive.tokens), drive.finishes, usage)


def check_near(found, expected):
    assert found.keys() == expected.keys()
    for key, run in expected.items():
        for one, other in zip(found[key], run, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert len(one.top) == len(other.top)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [24, 80])
def test_one_step_late_changes_no_token(tmp_path, seed, num_blocks):
    runner = TinyModel.make("llama", tmp_path).runner(num_blocks=num_blocks)
    _, expected, at_once = play(runner, seed, lag=0)
    drive, logprobs, late = play(runner, seed, lag=1)
    assert late == at_once
    check_near(logprobs, expected)
    assert drive.runner.num_late > 40
    assert drive.engine.totals.num_lag_discarded > 0
    assert drive.num_forced >= 3


@pytest.mark.parametrize(("name", "seed"), [("llama", 1), ("qwen3", 2), ("gemma2", 3)])
def test_device_rows_and_tokens_fed_back_change_no_token(tmp_path, name, seed):
    """The way of a GPU worker under the real engine, its step of lag included."""
    model = TinyModel.make(name, tmp_path)
    settings = {"num_blocks": 24, "steps": "device", "max_rows": 5}
    _, expected, at_once = play(model.runner(num_blocks=24), seed, lag=0)
    drive, logprobs, late = play(model.runner(**settings), seed, lag=1)
    assert late == at_once
    check_near(logprobs, expected)
    assert drive.runner.lag == 1
    assert drive.engine.totals.num_lag_discarded > 0


def test_a_device_short_of_memory_changes_no_token(tmp_path):
    runner = TinyModel.make("qwen3", tmp_path).runner(num_blocks=60)
    _, expected, plenty = play(runner, 5, lag=0)
    for lag in (0, 1):
        drive, logprobs, short = play(runner, 5, lag=lag, max_step_tokens=5, late=bool(lag))
        assert short == plenty
        check_near(logprobs, expected)
        assert drive.runner.num_out_of_memory > 0


def test_a_request_by_itself_is_the_same_to_the_last_bit_of_its_logprobs(tmp_path):
    runner = TinyModel.make("llama", tmp_path).runner(num_blocks=60)
    for params in PARAMS:
        heard = []
        for lag in (0, 1):
            drive = Driver(runner, lag=lag, device={}, max_batch_tokens=13, max_running=5)
            sampling = SamplingParams(seed=11, **params | {"logprobs": 4})
            drive.send(generate_request("r", range(3, 40), 30, sampling=sampling, root=runner.root))
            drive.run().check_idle()
            heard.append(drive.records)
        assert heard[0] == heard[1]
        assert drive.runner.num_late > 20 or len(heard[1]) < 20
