"""A real model of random weights goes on with requests of a worker that was lost: the tokens, finish reasons and logprobs
are those of the attempt that nobody interrupted, and the counts have only what is new. float32 on a CPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import msgspec
import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from inline_grammars import InlineGrammars
from proposing import Informed, speculating
from tiny_models import TinyModel

from workers.engine.engine import LinkClosed
from workers.engine.model.heads import Heads
from workers.engine.speculate.draft import DraftProposer
from workers.engine.speculate.heads import HeadsProposer
from workers.engine.speculate.lookahead import LookaheadProposer
from workers.engine.speculate.lookup import NgramProposer
from workers.engine.speculate.suffix import SuffixProposer
from workers.engine.speculate.tree import TreeProposer
from workers.engine.tiers.shared_cache.directory import DirectoryStore
from workers.engine.tiers.shared_cache.opening import open_tier
from workers.engine.tiers.shared_cache.store import Bounds
from workers.protocol.messages import ExtendLease, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")
later = functools.partial(pytest.param, marks=pytest.mark.rest)

NUM_TOKENS = 24
PROMPT = [*range(60, 76), 41, 42, 43, 90, 41, 42, 43]
VOCABULARY = [b"", b"", b"", *(bytes([i]) for i in range(256)), *([b""] * 42)]
FEW = tuple(range(40, 50))
STOPS = tuple(range(30, 46))


def params(**given):
    return SamplingParams(**({"seed": 5, "temperature": 1.0, "min_tokens": 1000} | given))


KINDS = {
    "greedy": {"sampling": params(temperature=0.0)},
    "sampled": {"sampling": params()},
    "filtered": {"sampling": params(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01)},
    "logprobs": {"sampling": params(logprobs=3)},
    "named logprobs": {"sampling": params(logprobs=0, logprob_token_ids=(7, 9))},
    "presence": {"sampling": params(temperature=0.0, presence_penalty=1.5)},
    "frequency": {"sampling": params(temperature=0.8, frequency_penalty=0.9)},
    "repetition": {"sampling": params(temperature=0.7, repetition_penalty=1.5, logprobs=1)},
    "biased": {"sampling": params(temperature=0.8, logit_bias=((7, 9.0), (8, 9.0)))},
    "banned": {
        "sampling": params(
            allowed_token_ids=FEW, bad_words=((43,), *((token, token + 1) for token in FEW), (44, 40, 44), (46, 46))
        )
    },
    "least": {"sampling": params(min_tokens=9, logit_bias=((2, 60.0),))},
    "stopped": {"sampling": params(seed=8, min_tokens=3, stop_token_ids=STOPS)},
    "choices": {"sampling": params(min_tokens=2, stop_token_ids=STOPS, logprobs=1), "num_choices": 4},
    "penalised choices": {"sampling": params(frequency_penalty=0.6, presence_penalty=0.2), "num_choices": 3},
    "banned choices": {
        "sampling": params(allowed_token_ids=FEW, bad_words=tuple((token, token + 1) for token in FEW)),
        "num_choices": 2,
    },
    "grammar": {"sampling": SamplingParams(seed=8), "grammar": "start: /<[a-z]{9,15}( [0-9]{1,4})?>/"},
    "characters": {"sampling": SamplingParams(seed=8), "grammar": "start: /[\\u00e4-\\u00fc\\u20ac]{5,12}/"},
    "grammar choices": {
        "sampling": SamplingParams(seed=9, logprobs=0),
        "grammar": "start: /<[a-z]{4,9}( [0-9]{1,4})?>/",
        "num_choices": 3,
    },
    "gathered": {"sampling": params(), "gather": True},
    "batch": {"sampling": params(), "tier": "batch"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes each model and runner once. `answer` is what an uninterrupted request gets from it."""

    @functools.cache
    def model(name):
        return TinyModel.make(name, tmp_path_factory.mktemp(name))

    @functools.cache
    def runner(name="llama", **settings):
        return model(name).runner(**{"num_blocks": 400} | settings)

    @functools.cache
    def answer(kind, name="llama", **settings):
        drive = driver(runner(name, **settings))
        drive.send(request(drive, kind))
        drive.run().check_idle()
        return heard(drive, kind)

    return SimpleNamespace(runner=runner, answer=answer)


def driver(runner, kind=Driver, **options):
    """Returns a worker that has just started: nothing is left of another one's KV."""
    with torch.inference_mode():
        store = runner.store.tensor if runner.store.scales is None else runner.store.scales
        store.fill_(float("nan"))
    options = {"grammars": InlineGrammars(VOCABULARY, 0), "max_running": 16} | options
    return kind(runner, **options)


def request(drive, kind, name=None, max_tokens=NUM_TOKENS, **fields):
    return generate_request(name or kind, PROMPT, max_tokens, root=drive.runner.root, **KINDS[kind] | fields)


def heard(drive, name):
    """Returns the tokens, the logprobs and the finish reason of each choice that a gateway received."""
    found = {}
    for delta in drive.records:
        if delta.request_id == name:
            tokens, logprobs, _ = found.get(delta.index, ((), (), None))
            found[delta.index] = (*tokens, *delta.tokens), (*logprobs, *delta.logprobs), delta.finish
    return found


def resumed(drive, kind, answer, cut, **fields):
    """Returns the request as it goes on after `cut` tokens of each choice that has so many, and more."""
    open_choices = tuple((index, tokens[:cut]) for index, (tokens, *_) in answer.items() if len(tokens) > cut)
    num_spent = sum(min(cut, len(tokens)) for tokens, *_ in answer.values())
    more = {"attempt": 1, "resume": open_choices, "num_output_spent": num_spent}
    return request(drive, kind, f"{kind}/{cut}", **more | fields)


def cuts(answer):
    longest = max(len(tokens) for tokens, *_ in answer.values())
    return sorted({1, longest // 2, longest - 1})


def check(drive, sent, answer, num_lost=0):
    """Compares what came after the resume with the rest of the answer, and looks at the counts. `num_lost` tokens were
    computed again because the sequence lost its blocks here."""
    ending, found = drive.endings[LINK, sent.request_id], heard(drive, sent.request_id)
    is_rounded = drive.runner.store.scales is not None  # a last bit of a sum may move a stored number to its neighbour
    assert set(found) == {index for index, _ in sent.resume}
    for index, handed in sent.resume:
        tokens, logprobs, finish = answer[index]
        assert handed + found[index][0] == tokens
        assert found[index][2] == finish
        rest = logprobs[len(handed) :]
        assert len(found[index][1]) == len(rest)
        for one, other in zip(found[index][1], rest, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-2 if is_rounded else 1e-4)
            assert is_rounded or [top.token for top in one.top] == [top.token for top in other.top]
    usage = ending.usage
    assert usage.output == sum(len(tokens) for tokens, *_ in found.values())
    assert usage.prompt == len(sent.prompt)
    if not (sent.cache_read or num_lost):
        num_handed = sum(len(handed) - 1 for _, handed in sent.resume)
        assert usage.recomputed == num_handed + len(sent.prompt) * (len(sent.resume) - 1)
        assert usage.cache_read == 0


def check_resumes(drive, answers, *, preempts=0, extends=False, **fields):
    """Lets a resume of each answer run from each cut, all at once. So many times somebody loses the blocks; with
    `extends` a lease allows nothing at first, and then seven tokens more at a time."""
    sent = []
    for kind, answer in answers.items():
        for cut in cuts(answer):
            one = resumed(drive, kind, answer, cut, **fields)
            bound = one.num_output_spent if extends else one.lease_bound
            sent.append(msgspec.structs.replace(one, lease_bound=bound))
    drive.send(*sent)
    number = 0
    while not drive.idle:
        drive.step()
        running = drive.scheduler.all_running
        if number < preempts and running:
            drive.scheduler.ranks.preempt(running[number % len(running)], drive.now, "blocks")
            number += 1
        for (_, name), attempt in drive.engine.attempts.items():
            if extends and attempt.lease.left < 1:
                drive.send(ExtendLease(name, attempt.lease.seq + 1, attempt.lease.bound + 7))
    drive.check_idle()
    assert number == preempts
    for one in sent:
        check(drive, one, answers[one.request_id.split("/")[0]], preempts)
    return drive


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cached", [False, later(True)], ids=["uncached", "cached"])
def test_a_resumed_request_goes_on_as_if_nothing_had_happened(models, kind, cached):
    drive = driver(models.runner())
    check_resumes(drive, {kind: models.answer(kind)}, cache_read=cached, cache_write=cached)


MANY = ("greedy", "filtered", "repetition", "choices", "penalised choices", "banned choices", "grammar choices")


def answers(models, name="llama", kinds=MANY, **settings):
    return {kind: models.answer(kind, name, **settings) for kind in kinds}


WAYS = {
    "late": ({}, {"lag": 1, "device": {}}),
    "device": ({"steps": "device", "max_rows": 16}, {}),
    "chunks": ({}, {"max_batch_tokens": 7, "max_running": 5}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("preempts", [9, later(0)])
def test_many_resumes_at_once_go_on_and_so_they_do_where_they_lose_their_blocks(models, way, preempts):
    settings, options = WAYS[way]
    check_resumes(driver(models.runner(**settings), **options), answers(models), preempts=preempts)


@pytest.mark.parametrize("way", ["device", later("late"), later("chunks")])
def test_a_lease_that_is_spent_grows_after_the_resume(models, way):
    settings, options = WAYS[way]
    check_resumes(driver(models.runner(**settings), **options), answers(models), extends=True)


def proposers(models):
    runner = models.runner()
    weight = runner.loaded.model.get_input_embeddings().weight
    told = answers(models)
    known = {
        (f"{kind}/{cut}", index): tokens
        for kind, answer in told.items()
        for cut in cuts(answer)
        for index, (tokens, *_) in answer.items()
    }
    return {
        "informed": lambda: Informed(known),
        "ngram": NgramProposer,
        "suffix": lambda: SuffixProposer(4),
        "tree": lambda: TreeProposer(4),
        "lookahead": LookaheadProposer,
        "draft": lambda: DraftProposer(models.runner(num_blocks=401)),
        "heads": lambda: HeadsProposer(Heads(3, weight.shape[1], runner.vocab_size).to(weight.dtype)),
    }


@pytest.mark.parametrize("way", ["device", later("late"), later("plain")])
@pytest.mark.parametrize("kind", ["informed", *map(later, ("ngram", "suffix", "tree", "lookahead", "draft", "heads"))])
def test_guesses_after_a_resume_change_no_token(models, kind, way):
    settings, options = WAYS.get(way, ({}, {}))
    runner = models.runner(**settings)
    speculate = speculating(proposers(models)[kind](), max_step_tokens=80, counts_guesses=runner.lag == 0)
    drive = driver(runner, **options, speculate=speculate, max_batch_tokens=80)
    check_resumes(drive, answers(models), preempts=5)
    assert drive.engine.totals.num_proposed > 0


FORMATS = [
    ("llama", {"kv_dtype": "int8"}),
    ("gemma2", {}),
    later("mistral", {}),
    later("gemma3", {}),
    later("gpt_oss", {}),
    later("qwen3_moe", {}),
    later("gpt2", {}),
    later("gemma2", {"kv_dtype": "int8"}),
    later("llama", {"kv_dtype": "fp8"}),
    later("llama", {"kv_dtype": "int8", "quant": "int4"}),
]


@pytest.mark.parametrize(("name", "settings"), FORMATS, ids=str)
def test_windows_and_rounded_numbers_change_no_token_after_a_resume(models, name, settings):
    drive = driver(models.runner(name, **settings), max_batch_tokens=20)
    check_resumes(drive, answers(models, name, **settings), preempts=5)


# --- what other workers and the worker itself left ---


def test_a_request_whose_link_alone_was_lost_is_read_from_the_cache(models):
    drive, answer = driver(models.runner()), models.answer("sampled")
    drive.send(request(drive, "sampled"), link=2)
    while len(drive.tokens[2, "sampled", 0]) < 19:
        drive.step()
    drive.send(LinkClosed(), link=2)
    drive.step()
    sent = resumed(drive, "sampled", answer, 17)
    drive.send(sent)
    drive.run()
    check(drive, sent, answer)
    usage = drive.endings[LINK, sent.request_id].usage
    assert usage.cache_read == len(PROMPT)
    assert usage.recomputed < drive.cache.block_size


class WithHost(Driver):
    """A worker whose host tier is the runner's own."""

    def _host(self, options):
        return self.runner.host_blocks(256 * self.runner.store.shape.bytes_per_block)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_host_tier_changes_no_token_after_a_resume(models, preempt):
    drive = driver(models.runner(), WithHost, host={"num_slots": 1}, preempt=preempt)
    told = answers(models)
    check_resumes(drive, told, preempts=9)
    counts = drive.scheduler.restores.counts
    assert (counts.num_swapped_in > 0) == (preempt == "swap")


def test_kv_that_another_worker_left_changes_no_token_after_a_resume(models, tmp_path):
    """The second worker reads the prompt from the store. Output that nobody asked for twice is not there."""
    prompt = [(7 * i) % 290 + 3 for i in range(140)]
    found = []
    for number in range(2):
        runner = models.runner()
        drive = driver(runner, WithHost, host={"num_slots": 1})
        store = DirectoryStore(tmp_path, Bounds(1 << 28, 60))
        secret = b"secret of this deployment......."
        tier = open_tier(store, secret, runner, drive.cache, drive.host, drive.scheduler.forecast)
        drive.engine.share(tier)
        try:
            for again in range(1 if number else 3):
                whole = generate_request(
                    f"r{again}", prompt, 80, sampling=KINDS["repetition"]["sampling"], root=runner.root
                )
                if number:
                    more = {"attempt": 1, "resume": ((0, tuple(found[:70])),), "num_output_spent": 70}
                    whole = msgspec.structs.replace(whole, **more)
                drive.send(whole)
                while not drive.idle or tier._pinned or tier._fetches:
                    drive.step(0.0)
            found.extend(drive.tokens[LINK, "r0", 0])
        finally:
            tier.close()
    assert found[80:] == found[70:80]
    usage = drive.endings[LINK, "r0"].usage
    assert (usage.cache_read, usage.recomputed) == (128, 69)


# --- prompt logprobs, the end of the context, divided characters ---


def test_logprobs_of_the_prompt_are_sent_once(models):
    """The gateway has them already when it hands a request over."""
    drive, answer = driver(models.runner()), models.answer("logprobs")
    drive.send(request(drive, "logprobs", prompt_logprobs=2))
    drive.run().check_idle()
    assert heard(drive, "logprobs")[0][0] == answer[0][0]
    assert len(drive.prompt_logprobs[LINK, "logprobs"]) == len(PROMPT)
    check_resumes(drive, {"logprobs": answer}, prompt_logprobs=-1)
    assert not drive.prompt_logprobs[LINK, "logprobs/1"]


@pytest.mark.parametrize("kind", ["sampled", "choices"])
def test_an_answer_that_fills_the_context_is_resumed_before_its_last_token(models, kind):
    """Every token but one of the context is there already."""
    settings = {"max_model_len": len(PROMPT) + NUM_TOKENS}
    told = {}
    for fields in ({}, {"cache_read": False}):
        drive = driver(models.runner(**settings))
        if not told:
            drive.send(request(drive, kind, max_tokens=500))
            drive.run().check_idle()
            told = {kind: heard(drive, kind)}
            assert "length" in {finish for *_, finish in told[kind].values()}
            assert max(len(tokens) for tokens, *_ in told[kind].values()) == NUM_TOKENS
        check_resumes(drive, told, max_tokens=500, **fields)


def test_a_character_may_be_divided_between_two_workers(models):
    """A grammar follows bytes. Somewhere a cut lies inside a character."""
    ((tokens, *_),) = models.answer("characters").values()
    text = b"".join(VOCABULARY[token] for token in tokens)
    inside = [at for at in range(1, len(text)) if text[at] & 0xC0 == 0x80]
    assert len(inside) > 4
    drive = driver(models.runner())
    sent = [resumed(drive, "characters", models.answer("characters"), cut) for cut in inside]
    drive.send(*sent)
    drive.run().check_idle()
    for one in sent:
        check(drive, one, models.answer("characters"))
