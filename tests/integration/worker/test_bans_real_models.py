"""A real model of random weights with bad words and allowed tokens: on device rows, a step late, behind guesses, it says what
it says alone on plain steps; and no word of it is a bad one. float32 on a CPU."""

from __future__ import annotations

import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from proposing import Informed, speculating
from tiny_models import TinyModel

from workers.engine.speculate.lookup import NgramProposer
from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = tuple(range(40, 50))
PAIRS = tuple((token, token + 1) for token in FEW)
NUM_TOKENS = 40
PARAMS = {
    "single": {"allowed_token_ids": FEW, "bad_words": ((43,), (45,))},
    "longer": {"allowed_token_ids": FEW, "bad_words": (*PAIRS, (46, 46, 46), (44, 40, 44))},
    "greedy": {"temperature": 0.0, "min_tokens": 1000, "bad_words": PAIRS},
    "penalised": {"allowed_token_ids": FEW, "bad_words": PAIRS, "frequency_penalty": 0.4},
    "free": {"min_tokens": 1000},
}


def request(name, root):
    params = SamplingParams(**({"seed": 4, "temperature": 0.8, "logprobs": 2} | PARAMS[name]))
    prompt = [*range(60, 70), 41, 42, *range(60, 70), 41]
    return generate_request(name, prompt, NUM_TOKENS, sampling=params, num_choices=2, root=root)


def heard(drive):
    """Tokens, and the raw logprob of each."""
    found = {}
    for delta in drive.records:
        logprobs = [one.logprob for one in delta.logprobs]
        found.setdefault((delta.request_id, delta.index), []).extend(logprobs)
    return dict(drive.tokens), found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def device_runner(model):
    return model.runner(num_blocks=200, steps="device", max_rows=12)


def worker(runner, **options):
    """Returns one that has just started: nothing is left of another one's KV."""
    with torch.inference_mode():
        runner.store.tensor.fill_(float("nan"))
    return Driver(runner, **options)


@pytest.fixture(scope="module")
def alone(model):
    tokens, logprobs = {}, {}
    runner = model.runner(num_blocks=64)
    for name in PARAMS:
        drive = worker(runner)
        drive.send(request(name, runner.root))
        drive.run().check_idle()
        for whole, part in zip((tokens, logprobs), heard(drive), strict=True):
            whole.update(part)
    return tokens, logprobs


def test_no_bad_word_and_nothing_but_allowed_tokens_are_said(alone):
    for (_, name, _), output in alone[0].items():
        allowed, words = (PARAMS[name].get(key) for key in ("allowed_token_ids", "bad_words"))
        assert len(output) == NUM_TOKENS
        assert allowed is None or {*output} <= {*allowed}
        for word in words or ():
            runs = zip(*(output[i:] for i in range(len(word))), strict=False)
            assert word not in runs


@pytest.mark.parametrize(("guesses", "num_accepted"), [("none", 0), ("ngram", 1), ("informed", 99)])
def test_device_rows_and_guesses_change_no_token(device_runner, alone, guesses, num_accepted):
    runner = device_runner
    assert runner.lag == 1
    answers = {(name, index): output for (_, name, index), output in alone[0].items()}
    proposer = {"none": None, "ngram": NgramProposer(), "informed": Informed(answers)}[guesses]
    speculate = speculating(proposer) if proposer else None
    drive = worker(runner, max_running=12, speculate=speculate)
    drive.send(*(request(name, runner.root) for name in PARAMS))
    drive.run().check_idle()
    tokens, logprobs = heard(drive)
    assert tokens == alone[0]
    for key, expected in alone[1].items():
        assert logprobs[key] == pytest.approx(expected, abs=1e-4)
    assert drive.engine.totals.num_accepted >= num_accepted
    assert tokens[LINK, "longer", 0] != tokens[LINK, "single", 0]
