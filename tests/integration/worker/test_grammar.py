"""A real model of random weights under grammars: outputs obey, and everything else stays as it was."""

from __future__ import annotations

import json
import time
from functools import cache, partial
from itertools import count
from pathlib import Path

import pytest
import torch
from engine_driver import LINK, Driver
from fakes import generate_request
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_grammars import InlineGrammars
from proposing import Informed, InformedTree, speculating
from schemas import SCHEMAS, declared_once, satisfies
from tiny_models import TinyModel
from walks import tokens_of

from gateway.structured.form import StructuredOutputs, form_of
from workers.engine import __main__ as worker
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.grammars import library, mask_time, vocabulary
from workers.engine.grammars.grammar import Automaton, begin
from workers.engine.grammars.grammar_queue import GrammarsWait
from workers.protocol.messages import Cancel, ExtendLease, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

DEMO = Path(__file__).parents[3] / "ops" / "demo_model" / "model"
EOS = 2
VOCABULARY = [b"", b"", b"", *(bytes([i]) for i in range(256)), b'{"', b'":', b"yes", b"true", b"12"]
VOCABULARY += [b""] * (301 - len(VOCABULARY))
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "age"],
}


def grammar(**outputs):
    return form_of(None, StructuredOutputs(**outputs)).grammar


def text_of(tokens):
    return b"".join(VOCABULARY[token] for token in tokens).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns the runner with given settings, which is made once."""
    made = TinyModel.make("llama", tmp_path_factory.mktemp("model"))
    return cache(lambda **settings: made.runner(**{"num_blocks": 96} | settings))


@pytest.fixture(scope="module")
def grammars():
    return InlineGrammars(VOCABULARY)


def driver(model, grammars, lag=0, speculate=None, **settings):
    """Returns a worker that has just started: nothing is left of another one's KV."""
    options = {"grammars": grammars, "max_running": 8, "max_batch_tokens": 32}
    options["speculate"] = speculate
    runner = model(**settings)
    with torch.inference_mode():
        runner.store.tensor.fill_(float("nan"))
    told = {"lag": lag, "device": {}} if lag else {}
    return Driver(runner, **told, **options)


def request(drive, name="r", max_tokens=120, *, sampling=None, **fields):
    sampling = sampling or SamplingParams(seed=3, temperature=1.0)
    root = drive.engine.runner.root
    return generate_request(name, [5, 6, 7], max_tokens, root=root, sampling=sampling, **fields)


WAYS = [{}, {"lag": 1}, {"steps": "device", "max_rows": 8}]


@pytest.mark.parametrize("way", WAYS, ids=["plain", "late", "device"])
def test_choices_of_one_request_obey_each_in_its_own_way(model, grammars, way):
    drive = driver(model, grammars, **way)
    sent = request(drive, num_choices=3, grammar=grammar(json=SCHEMA), seed=9)
    free = request(drive, "free", 9, sampling=SamplingParams(seed=1, temperature=1.0))
    drive.send(sent, free)
    drive.run().check_idle()
    texts = [text_of(drive.tokens[LINK, "r", index]) for index in range(3)]
    assert len(set(texts)) == 3
    for index, text in enumerate(texts):
        value = json.loads(text)
        assert value["kind"] in ("cat", "dog") and 0 <= value["age"] <= 30
        assert drive.finishes[LINK, "r", index] == "stop"
    usage = drive.endings[LINK, "r"].usage
    assert usage.output == sum(len(drive.tokens[LINK, "r", index]) for index in range(3))
    assert len(drive.tokens[LINK, "free", 0]) == 9


def test_a_choice_that_its_grammar_ends_as_the_lease_does_ends_the_request_once(model, grammars, monkeypatch):
    """Of three choices two are paid for. The second ending of the request ended the engine, and with it all others."""
    drive = driver(model, grammars)
    drive.send(request(drive, num_choices=3, lease_bound=2, grammar=grammar(json=SCHEMA)), request(drive, "other", 9))
    for _ in range(8):
        drive.step()
    assert not drive.tokens[LINK, "r", 0]
    monkeypatch.setattr(Automaton, "advance", lambda self, token: setattr(self, "fault", "nothing fits"))
    drive.send(ExtendLease("r", 1, 2, last=True))
    assert drive.run().idle
    assert drive.endings[LINK, "r"].code == "grammar"
    assert (LINK, "other") in drive.endings


def test_slow_masks_of_one_tenant_end_its_requests_and_hold_nobody_up(model, grammars, monkeypatch):
    """Each mask is below the bound of one, and there are many: a step would take a quarter of a second."""
    masks, looks, begun = library.Matcher.mask, [], time.thread_time()

    def slow(matcher):
        looks.append(1)
        until = time.thread_time() + 0.04
        while time.thread_time() < until:
            pass
        return masks(matcher)

    # By the clock of this thread, however little of a core other programs leave to it.
    monkeypatch.setattr(mask_time, "MaskTime", partial(mask_time.MaskTime, time.thread_time))
    drive = driver(model, grammars)
    free = SamplingParams(seed=1, temperature=1.0, ignore_eos=True)
    drive.send(request(drive, "neighbour", 60, sampling=free, tenant="other"))
    with monkeypatch.context() as patched:
        patched.setattr(library.Matcher, "mask", slow)
        for number in range(4):
            drive.send(request(drive, f"r{number}", num_choices=6, grammar=grammar(json=SCHEMA), tenant="hostile"))
            drive.run()
    assert len(drive.tokens[LINK, "neighbour", 0]) == 60
    assert {drive.endings[LINK, f"r{number}"].code for number in range(4)} == {"grammar"}
    allowed_s = mask_time.AT_ONCE_S + mask_time.SHARE * (time.thread_time() - begun)
    assert len(looks) <= allowed_s / (0.04 - mask_time.EACH_S) + 4, "of each request one mask comes too late"


def test_all_ways_of_running_steps_give_the_same_tokens(model, grammars):
    found = []
    for way in WAYS:
        drive = driver(model, grammars, **way)
        params = SamplingParams(
            seed=4, temperature=0.9, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias=((70, 2.0),)
        )
        drive.send(request(drive, num_choices=2, grammar=grammar(json=SCHEMA), sampling=params))
        drive.run().check_idle()
        found.append(dict(drive.tokens))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("way", WAYS, ids=["plain", "late", "device"])
@pytest.mark.parametrize("kind", [Informed, InformedTree])
def test_guesses_within_a_grammar_change_no_token_and_save_steps(model, grammars, way, kind):
    """Wrong ones, ones that the grammar forbids and ones behind its end among them."""
    found, steps = [], []
    params = SamplingParams(seed=4, temperature=0.9)
    answers = {}
    for speculate in (None, speculating(kind(answers, error=0.1), max_proposals=20)):
        drive = driver(model, grammars, speculate=speculate, **way)
        drive.send(request(drive, num_choices=2, grammar=grammar(json=SCHEMA), sampling=params))
        drive.run().check_idle()
        found.append((dict(drive.tokens), drive.finishes))
        steps.append(drive.engine.totals.num_steps)
        answers |= {("r", index): drive.tokens[LINK, "r", index] for index in range(2)}
    assert found[0] == found[1]
    assert drive.engine.totals.num_accepted > 10
    assert steps[1] < 0.8 * steps[0]


@pytest.mark.parametrize("way", WAYS, ids=["plain", "late", "device"])
@pytest.mark.parametrize("num_good", [0, 2])
def test_a_panic_at_a_guess_ends_its_own_request_alone(model, grammars, way, num_good, monkeypatch, caplog):
    """Right guesses before it count no tokens after the request's end."""

    class Panic(BaseException):
        """Like what a library in Rust raises, this is no `Exception`."""

    fork, num_forks = library.Matcher.fork, count()

    def raising(matcher):
        if next(num_forks) == num_good:
            raise Panic
        return fork(matcher)

    params = SamplingParams(seed=4, temperature=0.9)
    answers = {}

    def run():
        speculate = speculating(InformedTree(answers, error=0.0), max_proposals=20) if answers else None
        drive = driver(model, grammars, speculate=speculate, **way)
        drive.send(
            request(drive, grammar=grammar(json=SCHEMA), sampling=params),
            request(drive, "free", 9, sampling=SamplingParams(seed=1, temperature=1.0)),
        )
        drive.run().check_idle()
        return drive

    answers = {(name, 0): run().tokens[LINK, name, 0] for name in ("r", "free")}
    monkeypatch.setattr(library.Matcher, "fork", raising)
    drive = run()
    assert drive.endings[LINK, "r"].code == "grammar"
    assert [record.event for record in caplog.records if record.exc_info] == ["grammar_lost"]
    assert len(drive.tokens[LINK, "free", 0]) == 9


def test_masked_greedy_is_the_best_token_that_the_grammar_allows(model, grammars):
    """Replayed by hand: of the raw logits' order, the first token that is in the mask."""
    drive = driver(model, grammars)
    text = grammar(json=SCHEMA)
    greedy = SamplingParams(seed=0, temperature=0.0, logprobs=300)
    drive.send(request(drive, sampling=greedy, grammar=text))
    drive.run().check_idle()
    automaton = begin(grammars.library.compile(text), (EOS,))
    for delta in drive.records:
        allowed = set(tokens_of(automaton.mask))
        (logprob,) = delta.logprobs
        ranked = [entry.token for entry in logprob.top]
        assert delta.tokens[0] == next(token for token in ranked if token in allowed)
        raw = {entry.token: entry.logprob for entry in logprob.top}
        assert logprob.logprob == raw[delta.tokens[0]], "logprobs are those before the mask"
        if delta.tokens[0] != EOS:
            automaton.advance(delta.tokens[0])


@pytest.fixture(scope="module")
def demo():
    """The demo model under an engine, for one request after the other."""
    runner = ModelRunner(RunnerSettings(str(DEMO), device="cpu", num_blocks=64, max_model_len=512))
    return runner, InlineGrammars(vocabulary.read(DEMO, runner.vocab_size), num_rounds=0)


@pytest.mark.rest
@settings(max_examples=25, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_the_demo_model_says_satisfies_any_schema(demo, schema, seed):
    runner, grammars = demo
    drive = Driver(runner, grammars=grammars, max_running=4, max_batch_tokens=64)
    params = SamplingParams(seed=seed, temperature=1.0)
    text = grammar(json=schema)
    drive.send(request(drive, max_tokens=120, sampling=params, num_choices=2, grammar=text))
    drive.run().check_idle()
    texts = vocabulary.read(DEMO, runner.vocab_size)
    for index in range(2):
        if drive.finishes[LINK, "r", index] == "stop":
            written = b"".join(texts[token] for token in drive.tokens[LINK, "r", index]).decode()
            value = json.loads(written, object_pairs_hook=declared_once(schema))
            assert satisfies(schema, value), written


def test_the_end_of_a_grammar_ends_the_choice_without_a_further_token(model, grammars):
    drive = driver(model, grammars)
    drive.send(request(drive, grammar=grammar(choice=["yes", "no"])))
    drive.run().check_idle()
    assert text_of(drive.tokens[LINK, "r", 0]) in ("yes", "no")
    last = drive.records[-1]
    assert (last.finish, last.stop_token) == ("stop", -1)


def test_an_end_token_is_drawn_only_where_the_text_may_end(model, grammars):
    drive = driver(model, grammars)
    likely = SamplingParams(seed=3, temperature=1.0, logit_bias=((EOS, 60.0),))
    drive.send(request(drive, sampling=likely, grammar=grammar(regex="[0-9]{3,}")))
    drive.run().check_idle()
    *digits, last = drive.tokens[LINK, "r", 0]
    assert last == EOS
    assert text_of(digits).isdigit() and len(text_of(digits)) == 3


def test_min_tokens_holds_back_the_end_as_long_as_something_else_is_allowed(model, grammars):
    drive = driver(model, grammars)
    params = SamplingParams(seed=3, temperature=1.0, logit_bias=((EOS, 60.0),), min_tokens=6)
    drive.send(
        request(drive, "long", sampling=params, grammar=grammar(regex="[0-9]+")),
        request(drive, "short", sampling=params, grammar=grammar(regex="[0-9][0-9]")),
    )
    drive.run().check_idle()
    assert len(drive.tokens[LINK, "long", 0]) == 7
    assert len(text_of(drive.tokens[LINK, "short", 0])) == 2


def test_a_text_cut_by_the_bound_ends_with_length(model, grammars):
    drive = driver(model, grammars)
    drive.send(request(drive, max_tokens=5, grammar=grammar(json=SCHEMA)))
    drive.run().check_idle()
    assert drive.finishes[LINK, "r", 0] == "length"
    assert '{"kind":"cat"'.startswith(text_of(drive.tokens[LINK, "r", 0])[:6])


def test_a_choice_resumed_elsewhere_goes_on_as_if_nothing_had_happened(model, grammars):
    whole = driver(model, grammars)
    text = grammar(json=SCHEMA)
    whole.send(request(whole, grammar=text))
    whole.run()
    tokens = whole.tokens[LINK, "r", 0]
    other = driver(model, grammars)
    cut = len(tokens) // 2
    other.send(request(other, grammar=text, attempt=1, resume=((0, tuple(tokens[:cut])),), num_output_spent=cut))
    other.run()
    assert other.tokens[LINK, "r", 0] == tokens[cut:]


def test_preempted_choices_keep_their_place(model, grammars):
    outputs = []
    for every in (3, 1000):
        drive = driver(model, grammars)
        drive.send(request(drive, num_choices=3, grammar=grammar(json=SCHEMA)))
        for number in range(2000):
            if drive.idle:
                break
            drive.step()
            running = drive.scheduler.running["interactive"]
            if number % every == every - 1 and running:
                drive.scheduler.ranks.preempt(running[-1], drive.now, "blocks")
        drive.check_idle()
        outputs.append((dict(drive.tokens), drive.endings[LINK, "r"].usage.recomputed))
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1] > 0 == outputs[1][1]


@pytest.mark.parametrize("text", ["start: /a/ b", 'start: ""', "start: x\nx: x", "nothing", 'start: "ÿ' * 3])
def test_a_grammar_that_cannot_be_fails_without_a_token_twice(model, grammars, text):
    drive = driver(model, grammars)
    drive.send(request(drive, "first", grammar=text))
    drive.run()
    drive.send(request(drive, "second", grammar=text))
    drive.run().check_idle()
    for name in ("first", "second"):
        ending = drive.endings[LINK, name]
        assert (ending.code, ending.usage.output, ending.usage.prompt) == ("grammar", 0, 0)


def test_a_fault_of_the_compiler_may_be_tried_again(model):
    class FailsOnce(InlineGrammars):
        def _compile(self, text):
            if not self.num_compiled:
                self.num_compiled += 1
                return GrammarsWait("the compiler of grammars failed")
            return super()._compile(text)

    drive = driver(model, FailsOnce(VOCABULARY))
    drive.send(request(drive, "first", grammar=grammar(choice=["yes"])))
    drive.run()
    ending = drive.endings[LINK, "first"]
    assert (ending.code, ending.usage.prompt) == ("overloaded", 0)
    drive.send(request(drive, "second", grammar=grammar(choice=["yes"])))
    drive.run().check_idle()
    assert text_of(drive.tokens[LINK, "second", 0]) == "yes"


def test_nothing_runs_before_its_grammar_is_there_and_others_do_not_wait(model):
    grammars = InlineGrammars(VOCABULARY, num_rounds=6)
    drive = driver(model, grammars)
    drive.send(
        request(drive, grammar=grammar(choice=["yes"])),
        request(drive, "free", 3, sampling=SamplingParams(seed=1, temperature=1.0)),
    )
    for _ in range(5):
        drive.step()
    assert (LINK, "free") in drive.endings
    assert not drive.tokens[LINK, "r", 0]
    drive.run().check_idle()
    assert text_of(drive.tokens[LINK, "r", 0]) == "yes"


@pytest.mark.parametrize("way", ["cancel", "drain", "link"])
def test_an_attempt_may_end_while_its_grammar_compiles(model, way):
    from workers.engine.engine import Drain, LinkClosed

    grammars = InlineGrammars(VOCABULARY, num_rounds=4)
    drive = driver(model, grammars)
    drive.send(request(drive, grammar=grammar(choice=["yes"])))
    drive.step()
    events = {"cancel": Cancel("r"), "drain": Drain(now=True), "link": LinkClosed()}
    drive.send(events[way])
    drive.step()
    assert not drive.engine.attempts
    for _ in range(6):
        drive.step()
    drive.check_idle()
    expected = {"cancel": "cancelled", "drain": "draining"}
    if way in expected:
        ending = drive.endings[LINK, "r"]
        assert expected[way] in (getattr(ending, "code", ""), getattr(ending, "reason", ""))
    assert grammars.num_compiled == 0, "nobody waits for it any more"


def test_a_grammar_is_compiled_while_one_of_two_still_waits_for_it(model):
    grammars = InlineGrammars(VOCABULARY, num_rounds=4)
    drive = driver(model, grammars)
    text = grammar(choice=["yes"])
    drive.send(request(drive, "left", grammar=text), request(drive, "stays", grammar=text))
    drive.step()
    drive.send(Cancel("left"))
    drive.run().check_idle()
    assert text_of(drive.tokens[LINK, "stays", 0]) == "yes"
    assert grammars.num_compiled == 1


def test_a_worker_without_the_library_serves_without_grammars(monkeypatch, caplog):
    monkeypatch.setattr(library, "is_installed", lambda: False)
    assert worker.build_grammars(None, None) is None
    assert "llguidance is missing" in caplog.text


def test_a_grammar_is_compiled_once_for_each_tenant(model):
    grammars = InlineGrammars(VOCABULARY)
    drive = driver(model, grammars)
    for number in range(6):
        fields = {"tenant": "ab"[number % 2], "grammar": grammar(choice=["yes", "no"])}
        drive.send(request(drive, f"r{number}", **fields))
    drive.run().check_idle()
    assert grammars.num_compiled == 2


def test_drafts_are_masked_each_at_its_place_and_leave_the_automaton_alone(grammars):
    automaton = begin(grammars.library.compile(grammar(choice=["yes", "year"])), (EOS,))
    y, e, s, a = (3 + ord(char) for char in "yesa")
    before = automaton.mask
    masks = automaton.tree_masks([y, e, s, a], [-1, 0, 1, 2])
    assert masks[0] == automaton.mask == before
    assert set(tokens_of(masks[1])) == {e}
    assert set(tokens_of(masks[2])) == {s, a}
    assert masks[3:] == [None, None], "behind 'yes' nothing but the end can follow"
    tree = automaton.tree_masks([y, e, s, a, y, e], [-1, 0, 1, 1, 0, 4])
    assert tree == [before, masks[1], masks[2], None, automaton.tree_masks([y, e, a], [-1, 0, 1])[3], None, None]
    assert automaton.tree_masks([y, y], [-1, 0])[2] is None, "the second draft is outside of the grammar"
    for token in (y, e):
        automaton.advance(token)
    assert automaton.mask == masks[2]
