"""The host tier with real models of random weights: what was restored or swapped gives the tokens of `generate`."""

from __future__ import annotations

import functools

import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from tiny_models import GREEDY, TinyModel

from workers.engine.kv.offload import HostStore

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 30
PROMPT = [(7 * i) % 290 + 3 for i in range(37)]


class WithHost(Driver):
    """A driver whose host tier is the runner's own."""

    def __init__(self, runner, num_slots=64, **options):
        self.real = runner.host_blocks(num_slots * runner.store.shape.bytes_per_block)
        super().__init__(runner, host={"num_slots": 1}, **options)

    def _host(self, options):
        return self.real


def ask(drive, name, prompt, **fields):
    fields.setdefault("root", drive.runner.root)
    drive.send(generate_request(name, prompt, NUM_TOKENS, sampling=GREEDY, **fields))


def flood(drive):
    for number in range(3):
        prompt = [(11 * i + number) % 250 + 3 for i in range(60)]
        ask(drive, f"flood{number}{len(drive.endings)}", prompt, tenant="flood")
        drive.run()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_restored_prefix_gives_the_same_tokens(tmp_path, kv_dtype):
    runner = TinyModel.make("llama", tmp_path).runner(num_blocks=30, kv_dtype=kv_dtype)
    drive = WithHost(runner)
    assert isinstance(drive.engine.scheduler.restores._mover, HostStore)
    for number in range(3):
        ask(drive, f"r{number}", PROMPT)
        drive.run()
    flood(drive)
    runner.store.tensor.view(torch.uint8).fill_(255)  # NaN, if anybody read what was given back
    drive.cache.drop(b"flood".ljust(16, b"\0"))
    ask(drive, "again", PROMPT)
    drive.run().check_idle()
    assert drive.endings[LINK, "again"].usage.cache_read == 36
    assert drive.tokens[LINK, "again", 0] == drive.tokens[LINK, "r0", 0]


def ask_five(drive):
    """At first the later ones fit, then the earlier ones have grown."""
    for number in range(5):
        ask(drive, f"r{number}", PROMPT[number : number + 15], cache_write=number > 1)
    drive.run().check_idle()


@pytest.fixture(scope="module")
def with_room(tmp_path_factory):
    """Gives a model, and the tokens of the five with room for all of their KV."""

    @functools.cache
    def made(name):
        model = TinyModel.make(name, tmp_path_factory.mktemp(name))
        drive = Driver(model.runner(num_blocks=200))
        ask_five(drive)
        return model, drive.tokens

    return made


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("preempt", ["auto", "recompute", "swap"])
def test_preemption_gives_the_same_tokens_in_each_mode(with_room, name, preempt):
    model, tokens = with_room(name)
    drive = WithHost(model.runner(num_blocks=24), preempt=preempt, max_batch_tokens=16, max_running=8)
    ask_five(drive)
    assert drive.tokens == tokens
    assert drive.engine.totals.num_preempted > 0
    if preempt == "swap":
        assert drive.scheduler.restores.counts.num_swapped_in > 0
        assert drive.engine.totals.num_recomputed == 0
