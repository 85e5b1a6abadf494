"""All techniques at once: every way of decoding, with and without the cache, in one batch, under chunked prefill, forced
preemption and speculation in such cells that every pair of these meets; each request has the tokens that it has alone with all of it off.
Formats of numbers and kinds of layers go through the cell that has most of it on."""

from __future__ import annotations

import random

import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from inline_grammars import InlineGrammars
from proposing import speculating
from tiny_models import GREEDY, TinyModel

from cache.blocks.usage import SHARED
from workers.engine.speculate.lookup import NgramProposer
from workers.protocol.messages import BeamParams, SamplingParams

pytestmark = pytest.mark.rest

NUM_TOKENS = 10
VOCABULARY = [b"", b"", b"", *(bytes([i]) for i in range(256)), *([b""] * 42)]
GRAMMAR = "start: /<[a-z]{4,9}( [0-9]{1,4})?>/"
SAMPLED = SamplingParams(seed=5, temperature=1.0, top_p=0.9, stop_token_ids=tuple(range(40, 60)))
LOOPING = SamplingParams(seed=6, temperature=0.9, logit_bias=((7, 40.0),), min_tokens=1000)
PENALISED = SamplingParams(seed=7, temperature=0.7, frequency_penalty=0.6, min_tokens=1000)
FEW = tuple(range(40, 50))
BANNED = SamplingParams(
    seed=10,
    temperature=0.9,
    min_tokens=1000,
    allowed_token_ids=FEW,
    bad_words=((43,), *((token, token + 1) for token in FEW), (44, 40, 44), (46, 46)),
)

DECODING = {
    "greedy": {"sampling": GREEDY},
    "sampled": {"sampling": SAMPLED},
    "looping": {"sampling": LOOPING},
    "penalised": {"sampling": PENALISED},
    "parallel": {"sampling": SAMPLED, "num_choices": 3},
    "banned": {"sampling": BANNED},
    "parallel-banned": {"sampling": BANNED, "num_choices": 3},
    "grammar": {"sampling": SamplingParams(seed=8), "grammar": GRAMMAR},
    "parallel-grammar": {"sampling": SamplingParams(seed=9), "grammar": GRAMMAR, "num_choices": 2},
    "beam": {
        "sampling": SamplingParams(seed=0, stop_token_ids=(11, 12, 13)),
        "num_choices": 3,
        "beams": BeamParams(0.8),
    },
}
CELLS = [(20, False, False), (20, True, True), (512, False, True), (512, True, False)]
FORMATS = [
    ("llama", {"kv_dtype": "int8", "quant": "int4"}),
    ("llama", {"kv_dtype": "fp8", "quant": "w8a8"}),
    ("llama", {"kv_dtype": "int8", "quant": "llm_int8"}),
    ("llama", {"quant": "fp8"}),
    ("gemma2", {"kv_dtype": "int8"}),
    ("gpt_oss", {}),
    ("mixtral", {"quant": "int8"}),
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel.make("llama", tmp_path_factory.mktemp("llama"))


def prompt(kind: str) -> list[int]:
    """A shared beginning, then a phrase of its own, twice."""
    source = random.Random(kind)
    phrase = [source.randrange(3, 259) for _ in range(4)]
    return [*range(60, 76), *phrase, 90, *phrase]


def request(kind: str, name: str, root: str, **fields):
    return generate_request(name, prompt(kind), NUM_TOKENS, root=root, **DECODING[kind], **fields)


def choices(drive: Driver, name: str, kind: str) -> list[list[int]]:
    number = DECODING[kind].get("num_choices", 1)
    return [drive.tokens[LINK, name, index] for index in range(number)]


def each_alone(model, **settings):
    found = {}
    for kind in DECODING:
        runner = model.runner(num_blocks=96, **settings)
        drive = Driver(runner, grammars=InlineGrammars(VOCABULARY, 0))
        drive.send(request(kind, "alone", runner.root, cache_read=False, cache_write=False))
        drive.run().check_idle()
        found[kind] = choices(drive, "alone", kind)
        assert all(found[kind])
    return found


@pytest.fixture(scope="module")
def alone(model):
    return each_alone(model)


@pytest.mark.parametrize(("num_batch_tokens", "preempts", "speculates"), CELLS)
def test_alone_is_together(model, alone, num_batch_tokens, preempts, speculates):
    """Half of the cells run on a device that is one step late."""
    check_together(model, alone, num_batch_tokens, preempts, speculates)


@pytest.mark.parametrize(("name", "settings"), FORMATS, ids=str)
def test_alone_is_together_with_rounded_numbers_windows_sinks_and_experts(name, settings, tmp_path):
    model = TinyModel.make(name, tmp_path)
    num_batch_tokens, preempts, speculates = CELLS[1]
    alone = each_alone(model, **settings)
    check_together(model, alone, num_batch_tokens, preempts, speculates, **settings)


def check_together(model, alone, num_batch_tokens, preempts, speculates, **settings):
    runner = model.runner(num_blocks=160, **settings)
    drive = Driver(
        runner,
        lag=int(speculates),
        device={},
        max_batch_tokens=num_batch_tokens,
        max_running=6 if num_batch_tokens == 20 else 40,
        grammars=InlineGrammars(VOCABULARY),
        speculate=speculating(NgramProposer()) if speculates else None,
    )
    source = random.Random(num_batch_tokens + 2 * preempts + speculates)
    names = {f"{kind}/{cached}": (kind, cached) for kind in DECODING for cached in (True, False)}
    waiting = [
        request(kind, name, runner.root, cache_read=cached, cache_write=cached)
        for name, (kind, cached) in names.items()
    ]
    source.shuffle(waiting)
    while waiting or not drive.idle:
        drive.send(*waiting[:3])
        del waiting[:3]
        drive.step()
        running = drive.scheduler.running["interactive"]
        if preempts and running and source.random() < 0.3:
            drive.scheduler.ranks.preempt(source.choice(running), drive.now, "blocks")
            drive.cache.free(drive.cache.allocate(drive.cache.available(SHARED) // 2))
    drive.check_idle()
    for name, (kind, _) in names.items():
        assert choices(drive, name, kind) == alone[kind], name
    totals = drive.engine.totals
    assert totals.num_cached_tokens > 0
    assert (totals.num_recomputed > 0) >= preempts
    assert (totals.num_proposed > 0) == speculates
