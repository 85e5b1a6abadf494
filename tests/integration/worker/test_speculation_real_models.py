"""Real models of random weights, float32 on a CPU: with proposals a gateway hears the tokens it hears without, greedy and
sampled, on plain steps and on device rows; and what is drawn behind proposals is distributed as the model says."""

from __future__ import annotations

import functools
import random
from functools import partial

import pytest
from engine_driver import Driver
from fakes import generate_request
from proposing import Informed, InformedTree, speculating
from tiny_models import TinyModel

from cache.prefix_cache import PrefixCache
from workers.engine.model.heads import Heads
from workers.engine.settings import WorkerSettings
from workers.engine.speculate.draft import DraftProposer
from workers.engine.speculate.heads import HeadsProposer
from workers.engine.speculate.lookahead import LookaheadProposer
from workers.engine.speculate.lookup import NgramProposer
from workers.engine.speculate.tree import TreeProposer
from workers.engine.speculate.verify import own_path
from workers.engine.techniques import speculation
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row, SampleSpec
from workers.engine.values.token_tree import Proposal
from workers.protocol.messages import ExtendLease, SamplingParams

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.rest]

PARAMS = [
    {"temperature": 0.0, "min_tokens": 1000},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.8, "top_k": 20, "frequency_penalty": 0.7},
    {"temperature": 0.0, "logprobs": 0, "min_tokens": 9, "logit_bias": ((9, 4.0),)},
    {"temperature": 1.2, "min_p": 0.05, "logit_bias": ((7, 9.0), (8, 9.0)), "ignore_eos": True},
]


def requests(root, seed):
    """Prompts share a beginning and repeat a phrase."""
    source = random.Random(seed)
    shared = [source.randrange(3, 300) for _ in range(24)]
    for i in range(8):
        phrase = [source.randrange(3, 300) for _ in range(4)]
        prompt = shared[: source.randrange(24)] + phrase * (1 + i % 4)
        stops = tuple(source.sample(range(3, 300), 9)) if i % 2 else ()
        params = SamplingParams(seed=source.getrandbits(64), stop_token_ids=stops, **PARAMS[i % 5])
        num_choices = source.choice([1, 1, 2])
        yield generate_request(
            f"r{i}",
            prompt,
            source.randrange(8, 36),
            sampling=params,
            tenant="ab"[i % 2],
            num_choices=num_choices,
            lease_bound=5 if i % 3 == 0 else 36 * num_choices,
            root=root,
        )


def play(runner, seed, lag, speculate):
    told = {} if runner.lag else {"lag": lag, "device": {}}
    drive = Driver(runner, **told, max_batch_tokens=17, max_running=4, speculate=speculate)
    drive.num_forced = 0
    for request in requests(runner.root, seed):
        drive.send(request)
        drive.step()
    for round_ in range(2000):
        if drive.idle:
            break
        drive.step()
        running = drive.scheduler.ranks.running["interactive"]
        if round_ % 11 == 5 and running:  # somebody loses its blocks in the middle of its guesses
            drive.scheduler.ranks.preempt(running[-1], drive.now, "blocks")
            drive.num_forced += 1
        for (_, request_id), attempt in list(drive.engine.attempts.items()):
            lease = attempt.lease
            if round_ % 3 == 0 and lease.bound < attempt.message.max_tokens * 2:
                drive.send(ExtendLease(request_id, lease.seq + 1, lease.bound + 9))
    drive.check_idle()
    logprobs = {}
    for delta in drive.records:
        logprobs.setdefault((delta.request_id, delta.index), []).extend(delta.logprobs)
    # An attempt's own reason is that of its last choice, and which one that is may change.
    usage = {key: (e.usage.prompt, e.usage.output) for key, e in drive.endings.items()}
    return drive, logprobs, (dict(drive.tokens), drive.finishes, usage)


PROPOSERS = {
    "ngram": lambda answers, seed, runner: NgramProposer(),
    "tree": lambda answers, seed, runner: TreeProposer(4),
    "lookahead": lambda answers, seed, runner: LookaheadProposer(),
    "heads": lambda answers, seed, runner: HeadsProposer(random_heads(runner)),
    "informed": lambda answers, seed, runner: Informed(answers, seed),
    "informed tree": lambda answers, seed, runner: InformedTree(answers, seed),
}


def random_heads(runner):
    weight = runner.loaded.model.get_input_embeddings().weight
    return Heads(3, weight.shape[1], runner.vocab_size).to(weight.dtype)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A tiny model and what a gateway hears of it without proposals, made once."""

    @functools.cache
    def played(name, seed):
        model = TinyModel.make(name, tmp_path_factory.mktemp(name))
        _, logprobs, off = play(model.runner(num_blocks=24), seed, 0, None)
        return model, logprobs, off

    return played


def check_near(found, expected):
    assert found.keys() == expected.keys()
    for key, run in expected.items():
        for one, other in zip(found[key], run, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize(("name", "seed"), [("llama", 1), ("qwen3", 2), ("gemma2", 3)])
@pytest.mark.parametrize("steps", ["plain", "lagged", "device"])
@pytest.mark.parametrize("kind", PROPOSERS)
def test_proposals_change_no_token_of_a_real_model(without, kind, name, seed, steps):
    model, expected, off = without(name, seed)
    settings = {"steps": "device", "max_rows": 4} if steps == "device" else {}
    answers = {(rid, index): tokens for (_, rid, index), tokens in off[0].items()}
    runner = model.runner(num_blocks=24, **settings)
    proposer = PROPOSERS[kind](answers, seed, runner)
    takes_trees = runner.takes_trees
    assert takes_trees == (name != "gemma2")  # its windows know places, not branches
    speculate = speculating(proposer, max_step_tokens=40, takes_trees=takes_trees, counts_guesses=runner.lag == 0)
    drive, logprobs, on = play(runner, seed, int(steps == "lagged"), speculate)
    assert on == off
    check_near(logprobs, expected)
    totals = drive.engine.totals
    assert totals.num_proposed > totals.num_accepted
    assert totals.num_accepted > 20 or not isinstance(proposer, Informed)
    assert drive.num_forced >= 3


@pytest.mark.parametrize("lag", [0, 1])
def test_a_draft_model_changes_no_token_whatever_it_is(tmp_path, lag):
    """The model as its own draft is nearly always right, through prefix hits, forks and lost blocks; another model hardly
    ever is."""
    model = TinyModel.make("llama", tmp_path / "target")
    other = TinyModel.make("qwen3", tmp_path / "other")
    runner = model.runner(num_blocks=20)
    _, expected, off = play(runner, 3, 0, None)
    shares = []
    for draft in (model.runner(num_blocks=20), other.runner(num_blocks=20)):
        speculate = speculating(DraftProposer(draft), max_step_tokens=40)
        drive, logprobs, on = play(runner, 3, lag, speculate)
        assert on == off
        check_near(logprobs, expected)
        totals = drive.engine.totals
        assert totals.num_proposed > 30
        assert drive.num_forced >= 3
        shares.append(totals.num_accepted / totals.num_proposed)
    assert shares[0] > 0.95 > 0.5 > shares[1]


def told(model, draft):
    return WorkerSettings(
        model=str(model.directory),
        threads=1,
        engine_device="cpu",
        engine_block_size=4,
        engine_speculate="draft",
        engine_draft_model=str(draft),
    )


def test_a_worker_is_built_with_the_draft_model_it_is_told(tmp_path):
    model = TinyModel.make("llama", tmp_path)
    runner = model.runner(num_blocks=40)
    built = partial(speculation, told(model, model.directory), runner)
    drive = Driver(runner, speculate=built)
    params = SamplingParams(seed=3, ignore_eos=True)
    drive.send(generate_request("r", range(3, 20), 30, sampling=params, root=runner.root))
    drive.run().check_idle()
    totals = drive.engine.totals
    assert totals.num_accepted == totals.num_proposed > 20
    assert totals.num_steps < 12


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    model = TinyModel.make("llama", tmp_path)
    runner = model.runner(num_blocks=40)
    runner.vocab_size += 1
    with pytest.raises(ModelError, match="301 tokens, the model 302"):
        speculation(told(model, model.directory), runner, PrefixCache(40, 4))


def chi_square(counts, probabilities, number):
    """Statistic and degrees of freedom; what is expected fewer than 8 times is one class."""
    expected = {t: p * number for t, p in probabilities.items() if p * number >= 8}
    rest = number - sum(expected.values())
    seen = {t: counts.get(t, 0) for t in expected}
    classes = [(seen[t], expected[t]) for t in expected]
    if rest >= 8:
        classes.append((number - sum(seen.values()), rest))
    return sum((o - e) ** 2 / e for o, e in classes), len(classes) - 1


def check_distribution(tokens, probabilities):
    """At the 1 in 10,000 level, by the normal approximation of Wilson and Hilferty."""
    counts = {token: tokens.count(token) for token in set(tokens)}
    assert set(counts) <= set(probabilities), "drawn outside of what the filters keep"
    statistic, freedom = chi_square(counts, probabilities, len(tokens))
    spread = 2 / (9 * freedom)
    assert freedom > 1
    assert statistic < freedom * (1 - spread + 3.72 * spread**0.5) ** 3


def test_what_follows_a_proposal_is_distributed_as_direct_sampling(tmp_path):
    """One-hot proposals of a likely token: the first token, accepted or drawn instead, and the one behind an accepted
    proposal, against the model's own probabilities at that place."""
    model = TinyModel.make("llama", tmp_path)
    runner, prompt, top_k = model.runner(num_blocks=48), [5, 17, 93, 41, 200], 12
    warm = 8.0  # the tiny model's logits are far apart

    def probabilities(tokens):
        asked = SamplingParams(seed=1, temperature=0.0, logprobs=top_k)
        draw = SampleSpec(asked, 1, len(tokens), tokens, ())
        (result,) = runner.execute([Row(tokens, 0, [1, 2], (draw,), row_id=0)])
        best = result.drawn[0].logprob.top
        weights = {one.token: 2.718281828459045 ** (one.logprob / warm) for one in best}
        total = sum(weights.values())
        return {token: weight / total for token, weight in weights.items()}

    first = probabilities(prompt)
    proposal = max(first, key=first.__getitem__)
    second = probabilities([*prompt, proposal])
    params = SamplingParams(seed=0, temperature=warm, top_k=top_k)
    runner.execute([Row(prompt[:-1], 0, [1, 2], row_id=0)])
    firsts, seconds = [], []
    for begin in range(0, 6000, 200):
        rows = []
        for seed in range(begin, begin + 200):
            draws = tuple(SampleSpec(params, seed, len(prompt) + i, prompt, [proposal][:i]) for i in range(2))
            rows.append(Row([prompt[-1], proposal], 4, [1, 2], draws, num_proposed=1, row_id=0))
        for result in runner.execute(rows):
            _, own = own_path(Proposal.chain([proposal]), result.drawn, set())
            firsts.append(own[0].token)
            seconds += [drawn.token for drawn in own[1:]]
    check_distribution(firsts, first)
    check_distribution(seconds, second)
    assert len(seconds) == firsts.count(proposal) > 600
    with pytest.raises(AssertionError):
        check_distribution(firsts, second)
