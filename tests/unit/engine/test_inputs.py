"""Requests for vectors in the engine: every input gets the vector of its own tokens, whatever runs beside it, and each of
its tokens is counted once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from engine_driver import LINK, Driver
from fakes import VECTOR_SIZE, ScriptedRunner, encode, generate_request, scripted_vector

from workers.engine.sequences.inputs import MAX_OPEN
from workers.engine.values.abilities import Abilities
from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.probe import Pooled
from workers.protocol.frames import MAX_FRAME_BYTES
from workers.protocol.frames import encode as encode_frame
from workers.protocol.messages import Cancel, Failed, Finished, PoolingParams, SamplingParams, StepFrame

EMBEDS = {"tasks": ("embed",), "vector_size": VECTOR_SIZE, "dimensions": (4,)}
KINDS = {
    "last": Abilities(**EMBEDS, reuses_kv=True),
    "mean": Abilities(**EMBEDS),
    "encoder": Abilities(**EMBEDS, is_whole=True),
}


def driver(kind="last", **options):
    runner = {name: options.pop(name) for name in ("num_blocks", "max_model_len") if name in options}
    return Driver(ScriptedRunner(block_size=4, abilities=KINDS[kind], **{"num_blocks": 128} | runner), **options)


def request(request_id="req_1", inputs=(b"one", b"two"), *, pooling=None, **fields):
    inputs = [list(one) for one in inputs]
    params = {"task": "embed", "lengths": tuple(map(len, inputs))} | (pooling or {})
    tokens = [token for one in inputs for token in one]
    return generate_request(request_id, tokens, 0, pooling=PoolingParams(**params), **fields)


def texts(number, seed=0, longest=60):
    draw = random.Random(seed)
    return [bytes(draw.choices(range(97, 123), k=draw.randint(1, longest))) for _ in range(number)]


def check(drive, inputs, request_id="req_1", probe=None):
    """Every input has its own vector, and the usage is the tokens of all."""
    for index, one in enumerate(inputs):
        assert drive.vectors[LINK, request_id, index] == scripted_vector(one, probe), index
        assert drive.finishes[LINK, request_id, index] == "stop"
    ending = drive.endings[LINK, request_id]
    assert isinstance(ending, Finished), ending
    assert ending.usage.prompt == sum(map(len, inputs))
    assert ending.usage.output == 0
    return ending.usage


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lag", [0, 1])
def test_every_input_gets_the_vector_of_its_own_tokens(kind, lag):
    inputs = texts(150, longest=70)
    drive = driver(kind, lag=lag, max_batch_tokens=32, max_running=16)
    drive.send(request(inputs=inputs))
    usage = check(drive.run(), inputs)
    assert usage.recomputed == 0
    computed = sum(step.num_prefill_tokens for output in drive.outputs for step in output.steps)
    assert usage.cache_write + usage.uncached == computed


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_no_input_is_cut_where_tokens_see_those_after_them_whatever_the_policy(policy):
    drive = driver("encoder", max_batch_tokens=64, max_running=8, policy=policy)
    inputs = texts(20)
    drive.send(request(inputs=inputs))
    drive.run().check_idle()
    check(drive, inputs)
    assert drive.engine.failures.pulse.num_steps == 0, "a step failed"
    assert sum(map(len, drive.runner.steps)) == len(inputs)


def test_an_input_is_computed_whole_where_tokens_see_those_after_them():
    inputs = [bytes(range(97, 97 + n)) for n in (3, 20, 1, 9, 26)]
    drive = driver("encoder", max_batch_tokens=16, max_running=8)
    drive.send(request(inputs=inputs))
    check(drive.run(), inputs)
    rows = [row for step in drive.runner.steps for row in step]
    assert sorted(len(row.tokens) for row in rows) == sorted(map(len, inputs))
    sizes = [[len(row.tokens) for row in step] for step in drive.runner.steps]
    assert all(sum(step) <= 16 or len(step) == 1 for step in sizes), sizes


@pytest.mark.parametrize(("kind", "is_reused"), [("last", True), ("mean", False), ("encoder", False)])
def test_kv_of_another_input_is_used_only_where_the_vector_stays_the_same(kind, is_reused):
    inputs = [b"the same beginning of a text, and then " + bytes([97 + n]) for n in range(3)]
    drive = driver(kind)
    for number, one in enumerate(inputs):
        drive.send(request(f"req_{number}", [one]))
        drive.run()
    usages = [check(drive, [one], f"req_{number}") for number, one in enumerate(inputs)]
    assert [usage.cache_read > 0 for usage in usages] == [False, is_reused, is_reused]
    if kind == "encoder":
        assert drive.cache.num_evictable == 0, "no block of an encoder has KV that anybody could use"


def test_only_some_inputs_of_a_request_wait_at_a_time():
    inputs = texts(500)
    drive = driver()
    drive.send(request(inputs=inputs))
    most = 0
    while not drive.idle:
        drive.step()
        most = max(most, drive.scheduler.num_waiting + drive.scheduler.num_running)
    check(drive, inputs)
    assert most <= MAX_OPEN


def test_another_tenant_is_served_between_the_inputs():
    """One tenant's 2,048 inputs are in line; another tenant's request of one input ends long before them."""
    many, one = texts(2048, longest=20), [b"just one"]
    drive = driver(max_batch_tokens=64, max_running=32)
    drive.send(request("many", many, tenant="greedy"))
    for _ in range(5):
        drive.step()
    drive.send(request("one", one, tenant="modest"))
    num_steps = 0
    while (LINK, "one") not in drive.endings:
        drive.step()
        num_steps += 1
    assert num_steps <= 3
    drive.run()
    check(drive, one, "one")
    check(drive, many, "many")


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_lose_their_blocks_begin_anew(kind):
    """Batch gives way to interactive requests; the vectors are those of a run without anybody else."""
    inputs = texts(30, seed=3, longest=50)
    drive = driver(kind, num_blocks=32, max_batch_tokens=16, max_running=8)
    drive.send(request("batch", inputs, tenant="a", tier="batch"))
    number = 0
    while not drive.idle:
        drive.step()
        if number < 20 and drive.engine.attempts:
            drive.send(request(f"chat_{number}", texts(2, seed=number, longest=60), tenant="b"))
            number += 1
    usage = check(drive, inputs, "batch")
    for n in range(number):
        check(drive, texts(2, seed=n, longest=60), f"chat_{n}")
    records = [step for output in drive.outputs for step in output.steps]
    ended = [ending.usage for ending in drive.endings.values()]
    assert sum(u.cache_write + u.uncached + u.recomputed for u in ended) == sum(r.num_prefill_tokens for r in records)
    assert usage.prompt == sum(map(len, inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_leaves_no_trace_in_a_vector(kind):
    inputs = texts(12, seed=5)
    drive = driver(kind, max_batch_tokens=16, max_running=8)
    drive.send(request("one", inputs[:6], tenant="a"), request("two", inputs[6:], tenant="b"))
    for number in range(400):
        if drive.idle:
            break
        if number == 2:
            drive.runner.fail_next = DeviceOutOfMemory("a large step")
        drive.step()
    check(drive, inputs[:6], "one")
    check(drive, inputs[6:], "two")


def test_an_input_that_the_device_never_holds_fails_alone():
    drive = driver("encoder", device={"max_step_tokens": 30}, lag=0, max_batch_tokens=64, max_running=8)
    drive.send(request("large", [b"x" * 31], tenant="a"), request("small", [b"y" * 20, b"z" * 9], tenant="b"))
    drive.run()
    assert isinstance(drive.endings[LINK, "large"], Failed)
    check(drive, [b"y" * 20, b"z" * 9], "small")


@pytest.mark.parametrize("when", [0, 1, 4])
def test_a_cancel_ends_all_inputs_and_counts_what_was_computed(when):
    drive = driver(max_batch_tokens=16, max_running=8)
    drive.send(request(inputs=texts(300)))
    for _ in range(when):
        drive.step()
    drive.send(Cancel("req_1"))
    drive.run()
    ending = drive.endings[LINK, "req_1"]
    assert isinstance(ending, Finished) and ending.reason == "cancelled"
    computed = sum(step.num_prefill_tokens for output in drive.outputs for step in output.steps)
    assert ending.usage.prompt == computed
    assert drive.scheduler.num_waiting == drive.scheduler.num_running == 0


def test_a_size_that_the_model_allows_reaches_the_runner():
    drive = driver()
    drive.send(request(inputs=[b"text"], pooling={"dimensions": 4}))
    check(drive.run(), [b"text"], probe=Pooled(0, dimensions=4))


FAULTS = {
    "no inputs": {"lengths": ()},
    "an empty input": {"lengths": (0, 6)},
    "too few tokens": {"lengths": (3, 2)},
    "too many tokens": {"lengths": (3, 2**40)},
    "a negative input": {"lengths": (-1, 7)},
    "too many inputs": {"lengths": (1,) * 2049},
    "a size that the model has not": {"dimensions": 5},
    "a negative size": {"dimensions": -1},
    "a task that the model has not": {"task": "score"},
    "labels that nobody uses": {"labels": (1, 2)},
    "one label": {"labels": (1,)},
    "segments beyond the input": {"segments": (4, 0)},
    "too few segments": {"segments": (1,)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_makes_no_sense_is_refused_at_the_intake(fault):
    drive = driver()
    drive.send(request(pooling=FAULTS[fault]), request("good"))
    drive.run()
    ending = drive.endings[LINK, "req_1"]
    assert isinstance(ending, Failed) and ending.code == "internal", ending
    check(drive, [b"one", b"two"], "good")


@pytest.mark.parametrize(
    "fields",
    [{"num_choices": 2}, {"prompt_logprobs": 0}, {"grammar": "start: /a/"}, {"resume": ((0, (1,)),)}, {"pinned": True}],
)
def test_what_only_tokens_have_is_refused_beside_vectors(fields):
    drive = driver()
    drive.send(request(**fields))
    drive.run()
    assert isinstance(drive.endings[LINK, "req_1"], Failed)


def test_an_input_longer_than_the_model_is_refused_and_their_sum_is_not():
    drive = driver(max_model_len=20)
    drive.send(request("sum", [b"a" * 20] * 5), request("long", [b"a", b"a" * 21]))
    drive.run()
    check(drive, [b"a" * 20] * 5, "sum")
    assert drive.endings[LINK, "long"].code == "too_long"


@pytest.mark.parametrize("pooling", [None, "embed"])
def test_a_model_is_asked_for_nothing_but_what_it_can(pooling):
    """Tokens of a model that embeds, vectors of one that generates."""
    drive = driver() if pooling is None else Driver(ScriptedRunner(num_blocks=64, block_size=4))
    drive.send(generate_request("req_1", encode("hello"), 4) if pooling is None else request())
    drive.run()
    assert isinstance(drive.endings[LINK, "req_1"], Failed)
    assert not drive.runner.steps


def test_vectors_of_a_step_that_are_too_many_for_a_frame_come_in_several():
    """1,000 vectors of 4,096 numbers are 16 MiB, as a frame is at most."""
    drive = driver(max_batch_tokens=64, max_running=32)
    drive.send(request(inputs=[b"x" * 400]))
    drive.step()
    outbox, attempt = drive.engine._outbox, drive.attempt("req_1")
    for index in range(1000):
        outbox.vector(attempt, index, bytes(16384))
    frames = [message for _, message in outbox.take(1) if isinstance(message, StepFrame)]
    assert [delta.index for frame in frames for delta in frame.deltas] == list(range(1000))
    assert all(len(encode_frame(frame)) < MAX_FRAME_BYTES // 2 for frame in frames)


def test_vectors_and_tokens_run_in_the_same_steps():
    both = Abilities(tasks=("generate", "embed"), vector_size=VECTOR_SIZE, reuses_kv=True)
    drive = Driver(ScriptedRunner(num_blocks=128, block_size=4, abilities=both), max_batch_tokens=32, max_running=16)
    inputs = texts(20)
    chat = generate_request("chat", encode("hello"), 12, sampling=SamplingParams(seed=1, temperature=0.0))
    drive.send(request("vectors", inputs, tenant="a"), chat)
    drive.run()
    check(drive, inputs, "vectors")
    kinds = Counter(len({type(row.probe) for row in step}) for step in drive.runner.steps)
    assert kinds[2], "no step had both"
    assert drive.endings[LINK, "chat"].usage.output == 12
