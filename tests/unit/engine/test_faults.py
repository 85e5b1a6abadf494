"""A worker believes no gateway: what a message holds is looked at before anything computes with it (the class of S1)."""

import msgspec
import pytest
from engine_driver import LINK, Driver
from fakes import VOCAB_SIZE, encode, generate_request

from workers.engine.step import faults
from workers.protocol.messages import (
    AdapterCommand,
    BeamParams,
    CacheCommand,
    CacheProbe,
    CacheProbed,
    CacheRange,
    Cancel,
    ExtendLease,
    PoolingParams,
    Region,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")
OTHER = 2
SAMPLING = [
    ("seed", [-1, 2**64]),
    ("temperature", [-0.1, 101.0, NAN, INF, -INF, 1e308]),
    ("top_k", [-1, 2**31, 2**63]),
    ("top_p", [-0.1, 1.1, NAN, INF]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("presence_penalty", [NAN, INF, 1e30]),
    ("frequency_penalty", [NAN, -INF, -1e30]),
    ("repetition_penalty", [0.0, -1.0, 1e-45, NAN, INF]),
    ("logit_bias", [((VOCAB_SIZE, 1.0),), ((2**31, 1.0),), ((-1, 1.0),), ((1, NAN),), ((1, INF),), ((1, 1.0),) * 1025]),
    ("logprobs", [-2, 1001, 2**62]),
    ("logprob_token_ids", [(-1,), (VOCAB_SIZE,), (2**63,), (1,) * 1001]),
    ("stop_token_ids", [(-1,), (VOCAB_SIZE,), (2**63,), (1,) * 1025]),
    ("min_tokens", [-1, 9, 2**31]),
    ("bad_words", [((),), ((-1,),), ((1, VOCAB_SIZE),), ((1,) * 1025,), ((1,),) * 1025]),
    ("allowed_token_ids", [(-1,), (VOCAB_SIZE,), (1,) * (VOCAB_SIZE + 1)]),
]
REQUEST = [
    ("request_id", ["", "x" * 257]),
    ("tenant", ["", "x" * 257]),
    ("model", ["x" * 257]),
    ("adapter", ["x" * 257]),
    ("traceparent", ["x" * 257]),
    ("grammar", ["x" * (2**20 + 1)]),
    ("namespace", [(), (Region(b""),), (Region(b"x" * 65),), (Region(b"a", -2), Region(b"b")), (Region(b"a"),) * 17]),
    ("prompt", [(), (-1,), (VOCAB_SIZE,), (2**63,)]),
    ("max_tokens", [-1, 2**31, 2**64 - 1]),
    ("lease_bound", [-1, 2**53 + 1, 2**64 - 1]),
    ("lease_seq", [-1, 2**63]),
    ("attempt", [-1, 2**31]),
    ("num_choices", [0, -1, 2**31]),
    ("weight", [0.0, -1.0, NAN, INF, 1e-300, 1e300]),
    ("cache_floor_blocks", [-1, 2**31]),
    ("cache_quota_blocks", [2**31, -(2**63)]),
    ("output_priority", [-2, 101]),
    ("prompt_logprobs", [-2, 1001]),
    ("num_output_spent", [-1, 2**63]),
    (
        "retention",
        [
            (CacheRange(priority=101),),
            (CacheRange(-1),),
            (CacheRange(end=-2),),
            (CacheRange(ttl_s=-1),),
            (CacheRange(ttl_s=2**40),),
            (CacheRange(),) * 65,
        ],
    ),
    ("resume", [((0, (VOCAB_SIZE,)),), ((1, (1,)),), ((-1, (1,)),), ((0, (1,)), (0, (2,))), ((0, (1,) * 8),)]),
    (
        "pooling",
        [
            PoolingParams("embed", ()),
            PoolingParams("embed", (0,)),
            PoolingParams("embed", (2**63,)),
            PoolingParams("embed", (1,)),  # tokens are asked for beside
        ],
    ),
    ("beams", [BeamParams(NAN), BeamParams(INF), BeamParams(10.1)]),
]


def flat(table):
    return [(name, value) for name, values in table for value in values]


@pytest.mark.parametrize(("name", "value"), flat(REQUEST), ids=lambda one: repr(one)[:30])
def test_a_request_with_such_a_field_is_refused(name, value):
    request = msgspec.structs.replace(generate_request(), **{name: value})
    assert faults.of_request(request, VOCAB_SIZE)


@pytest.mark.parametrize(("name", "value"), flat(SAMPLING), ids=lambda one: repr(one)[:30])
def test_a_request_with_such_a_parameter_is_refused(name, value):
    sampling = msgspec.structs.replace(SamplingParams(1), **{name: value})
    request = msgspec.structs.replace(generate_request(), sampling=sampling)
    assert faults.of_request(request, VOCAB_SIZE)


@pytest.mark.parametrize("fields", [{"num_choices": 2}, {"num_choices": 2, "beams": BeamParams(1.0)}], ids=repr)
def test_tokens_of_one_choice_alone_are_gathered(fields):
    """An attempt gathers in one place: tokens of two choices would mix there."""
    assert faults.of_request(generate_request(gather=True, **fields), VOCAB_SIZE)
    assert not faults.of_request(generate_request(**fields), VOCAB_SIZE)
    assert not faults.of_request(generate_request(gather=True), VOCAB_SIZE)


def test_every_number_of_the_wire_has_a_bound_here():
    """A new field is refused at its extremes, or is named in this file."""
    named = {name for name, _ in [*REQUEST, *SAMPLING]}
    free = {"root", "sampling", "tier", "cache_read", "cache_write", "pinned", "ignore_eos", "gather"}
    fields = {*generate_request().__struct_fields__, *SamplingParams.__struct_fields__}
    assert fields - free == named


@pytest.mark.parametrize(
    "message",
    [
        ExtendLease("r", -1, 9),
        ExtendLease("r", 1, -9),
        ExtendLease("r", 1, 2**64 - 1),
        ExtendLease("", 1, 9),
        Cancel(""),
        Cancel("x" * 1000),
        CacheProbe(2**64 - 1, "scripted@1", (Region(b"a"),), (1,)),
        CacheProbe(1, "scripted@1", (), (1,)),
        CacheProbe(1, "scripted@1", (Region(b"a"),), (2**40,)),
        CacheProbe(1, "scripted@1", (Region(b"a", -5), Region(b"b")), (1,)),
        CacheCommand("drop"),
        CacheCommand("drop", b"region"),
        CacheCommand("unpin", b"x" * 65),
        CacheCommand("snapshot", key=b"k" * 1000),
        AdapterCommand("unload", ""),
        AdapterCommand("unload", "x" * 1000),
        AdapterCommand("unload", "a", "/p" * 5000),
        AdapterCommand("load", "", "/a"),
        AdapterCommand("load", "x" * 257, "/a"),
        AdapterCommand("load", "a"),
        AdapterCommand("load", "a", "here"),
        AdapterCommand("load", "a", "/a\0b"),
        AdapterCommand("load", "a", "/" * 4097),
    ],
    ids=repr,
)
def test_a_malformed_message_is_left_aside_and_nobody_hears_of_it(message):
    assert faults.of_other(message, VOCAB_SIZE)
    drive = Driver()
    mine = generate_request("r", encode("the quick brown fox"), 12, lease_bound=4)
    drive.send(mine)
    for _ in range(3):
        drive.step()
    drive.send(message)
    drive.send(message, link=OTHER)
    drive.step()
    assert not [m for output in drive.outputs for _, m in output.messages if isinstance(m, CacheProbed)]
    drive.send(ExtendLease("r", 1, 12))
    drive.run().check_idle()
    drive.check_alone(mine)
    again = generate_request("again", encode("the quick brown fox"), 3)
    drive.send(again)
    drive.run()
    assert drive.endings[LINK, "again"].usage.cache_read > 0, "somebody's cache was dropped"


def test_a_sound_request_has_no_fault():
    assert not faults.of_request(generate_request(), VOCAB_SIZE)
    assert not faults.of_other(ExtendLease("r", 1, 9), VOCAB_SIZE)
