"""The compiler's child process, real: what it survives, what it does not, and what the worker keeps."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from load import stretched
from walks import END, VOCABULARY, ids, of_rules, tokens_of

from gateway.structured.form import StructuredOutputs, form_of
from workers.engine.grammars import compiling
from workers.engine.grammars import library as library_module
from workers.engine.grammars.compiling import Grammars, Shelf
from workers.engine.grammars.grammar import Automaton, digest
from workers.engine.grammars.grammar_queue import GrammarsWait
from workers.engine.grammars.library import GrammarError

pytestmark = pytest.mark.rest


def of_schema(schema):
    return form_of(None, StructuredOutputs(json=schema)).grammar


def bomb(last="c"):
    """Patterns that each need to remember the last letters, all at once: it takes the library half a minute."""
    return of_schema({"type": "string", "allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}{last}"} for i in range(1, 16)]})


BOMB = bomb()
WIDE = of_schema({"enum": [{"a": i} for i in range(5000)]})


@pytest.fixture
def grammars():
    made = []

    def make(**limits):
        made.append(Grammars(lambda: VOCABULARY, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait(grammars, *texts, tenant="t", limit_s=50.0):
    """The outcomes, in the order they came."""
    found = []
    for text in texts:
        assert grammars.ask((tenant, digest(text)), text) is None
    end = time.monotonic() + stretched(limit_s)
    while len(found) < len(texts):
        assert time.monotonic() < end, "no answer"
        found += [outcome for _, outcome in grammars.take()]
        time.sleep(0.005)
    return found


def test_the_first_grammar_finds_a_compiler_that_was_started_beforehand(grammars):
    ours, started = grammars(), []
    start = ours._started
    ours._started = lambda: started.append(start()) or started[-1]
    ours.warm()
    end = time.monotonic() + stretched(50)
    while ours._library is None:
        assert time.monotonic() < end, "not warm"
        time.sleep(0.005)
    (child,) = started
    assert child.poll() is None
    (good,) = wait(ours, 'start: "yes"')
    assert Automaton(good, ()).mask
    ours.warm()
    wait(ours, 'start: "no"')
    assert started == [child] and child.poll() is None


def test_a_compiler_that_cannot_be_started_beforehand_is_tried_again_by_the_first_grammar(grammars):
    ours, calls = grammars(), []
    vocabulary = ours._vocabulary

    def read():
        calls.append(len(calls))
        if len(calls) == 1:
            raise OSError("no such file")
        return vocabulary()

    ours._vocabulary = read
    ours.warm()
    (good,) = wait(ours, 'start: "yes"')
    assert Automaton(good, ()).mask
    assert calls == [0, 1]


def test_a_bomb_ends_the_child_and_the_next_grammar_is_compiled(grammars):
    ours = grammars()
    good, bad = wait(ours, 'start: "yes"', BOMB)
    assert Automaton(good, ()).mask
    assert isinstance(bad, GrammarError)
    (again,) = wait(ours, 'start: "no"')
    assert Automaton(again, ()).mask
    assert ours.ask(("t", digest('start: "yes"')), 'start: "yes"') is good
    with pytest.raises(GrammarError, match="too much time or memory"):
        ours.ask(("t", digest(BOMB)), BOMB)


def killed(ours, patch):
    """Kills the child before it reads the question, as a kernel without memory does."""
    said = ours._said

    def say(child, message, limit_s):
        if isinstance(message, str):
            child.kill()
            child.wait()
        return said(child, message, limit_s)

    patch.setattr(ours, "_said", say)


def stopped(ours, patch):
    """Stops the child, which then answers no sooner than on a machine that is busy with other things."""
    said = ours._said

    def say(child, message, limit_s):
        if isinstance(message, str):
            child.send_signal(signal.SIGSTOP)
        return said(child, message, limit_s)

    patch.setattr(ours, "_said", say)
    patch.setattr(compiling, "ANSWER_S", 0.2)


def unstartable(ours, patch):
    def start():
        raise OSError("no more processes")

    ours._end_child()
    patch.setattr(ours, "_started", start)


def without_a_spare(ours, patch):
    ours._end_child()
    ours._spare = Future()
    ours._spare.set_exception(RuntimeError("the compiler of grammars does not start"))


class Panic(BaseException):
    """Like what a library in Rust raises, this is no `Exception`."""


def panicking(ours, patch):
    def compiled(text):
        raise Panic

    patch.setattr(ours._library, "compile", compiled)


@pytest.mark.parametrize("fault", [killed, stopped, unstartable, without_a_spare, panicking])
def test_a_fault_of_the_compiler_is_no_verdict_about_the_grammar(grammars, monkeypatch, fault):
    ours, text = grammars(), 'start: "no"'
    wait(ours, 'start: "yes"')
    with monkeypatch.context() as patch:
        fault(ours, patch)
        (failed,) = wait(ours, text)
        assert isinstance(failed, GrammarsWait)
    (good,) = wait(ours, text)
    assert Automaton(good, ()).mask


def test_a_panic_before_the_first_grammar_is_survived(grammars, monkeypatch):
    ours = grammars()
    with monkeypatch.context() as patch:
        panicked = threading.Event()

        def loaded():
            panicked.set()
            raise Panic

        patch.setattr(ours, "_loaded", loaded)
        ours.warm()
        assert panicked.wait(50)
    (good,) = wait(ours, 'start: "yes"')
    assert Automaton(good, ()).mask


def test_the_worker_follows_what_its_child_came_through(grammars):
    good, bad = wait(grammars(), of_rules('root ::= "yes" root | "no"'), "start: x\nx: x")
    automaton = Automaton(good, (END,))
    for token in ids("yesyesno"):
        automaton.advance(token)
    assert automaton.ended and not automaton.fault
    assert isinstance(bad, GrammarError)


DEEPEST = """
from test_compiling import Grammars, GrammarError, VOCABULARY, of_rules, wait

ours, deepest, refused = Grammars(lambda: VOCABULARY), 50, 4000
while refused - deepest > 16:
    depth = (deepest + refused) // 2
    (outcome,) = wait(ours, of_rules(chain := "\\n".join(
        f'{"root" if i == 0 else f"r{i}"} ::= "a" r{i + 1} | "b" r{i + 1}' for i in range(depth)
    ) + f'\\nr{depth} ::= "c" | root'))
    deepest, refused = (deepest, depth) if isinstance(outcome, GrammarError) else (depth, refused)
ours.close()
print(deepest)
"""


@pytest.mark.parametrize("stack_bytes", [resource.RLIM_INFINITY, 8 << 20], ids=["unlimited", "8MiB"])
def test_a_grammar_too_deep_for_a_stack_ends_the_child_and_never_the_worker(stack_bytes):
    limit = partial(resource.setrlimit, resource.RLIMIT_STACK, (stack_bytes, resource.RLIM_INFINITY))
    folders = [str(Path(__file__).parent), *sys.path]
    worker = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {folders}\n{DEEPEST}"],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=stretched(60),
    )
    assert worker.returncode == 0, worker.stderr[-2000:]
    assert 300 < int(worker.stdout) < 3900, "the depth does not depend on the limits of the process"


def test_a_grammar_whose_states_are_many_is_compiled_anew_for_the_next_choice(grammars, monkeypatch):
    monkeypatch.setattr(library_module, "_MAX_MASKS", 3)
    ours, text = grammars(), "start: /[a-z]+/"
    (first,) = wait(ours, text)
    key = ("t", digest(text))
    assert ours.ask(key, text) is first
    automaton = Automaton(first, (END,))
    for token in ids("abc"):
        automaton.advance(token)
    assert first.is_spent
    (second,) = wait(ours, text)
    assert second is not first and not second.is_spent
    automaton.advance(*ids("d"))
    assert not automaton.fault, "a choice that has begun goes on"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 499, "minimum": -(10**17), "maximum": 10**17},
        {"type": "number", "multipleOf": 1e-8, "minimum": 1e-20, "maximum": 99999999999.95},
        {"type": "array", "items": {"type": "number", "multipleOf": 3600, "exclusiveMinimum": -0.5}, "maxItems": 10000},
        {"type": "string", "pattern": "(a|b)*a(a|b){12}c", "minLength": 9000, "maxLength": 10000},
        {"type": "string", "pattern": "((a{1,10000}){1,10000}b){1,10000}", "minLength": 3},
        {"type": "string", "format": "email", "pattern": "^\\w+([.-]?\\w+)*@\\w+(\\.\\w{2,})+$", "minLength": 6},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(8)]} for i in range(4)]},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(2)]} for i in range(14)]},
        {"type": "object", "properties": {f"p{i}": {"type": "array", "maxItems": 10000 - i} for i in range(500)}},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"properties": {"x": {"allOf": [{"$ref": "#/$defs/a"}, {"maxItems": 3}]}}}},
        },
        {"enum": [{"a": i} for i in range(5000)]},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_a_hostile_schema_is_decided_within_the_limits(grammars, schema):
    """Each is compiled or refused soon, and its masks take no longer than a step may."""
    ours = grammars()
    wait(ours, 'start: "yes"')
    began = time.monotonic()
    (outcome,) = wait(ours, of_schema(schema))
    assert time.monotonic() - began < stretched(12)
    if isinstance(outcome, GrammarError):
        return
    automaton, rng = Automaton(outcome, (END,)), random.Random(0)
    for _ in range(200):
        if automaton.fault or automaton.ended:
            break
        began = time.thread_time()
        automaton.advance(rng.choice([token for token in tokens_of(automaton.mask) if token != END]))
        assert time.thread_time() - began < stretched(0.2)
    assert "time" not in automaton.fault


def test_memory_beyond_the_limit_is_refused(grammars):
    ours = grammars(limit_s=20.0, limit_bytes=8 << 20)
    (bad,) = wait(ours, WIDE)
    assert isinstance(bad, GrammarError) and not isinstance(bad, GrammarsWait)
    (good,) = wait(ours, 'start: "yes"')
    assert Automaton(good, ()).mask


def test_errors_say_why_and_tell_no_path(grammars):
    undefined, unending, deep = wait(grammars(), 'start: "a" b', "start: x\nx: x", "start: " + "(" * 60_000)
    assert "b" in str(undefined) and "/" not in str(undefined)
    assert isinstance(unending, GrammarError) and isinstance(deep, GrammarError)


def test_a_tenant_with_many_grammars_does_not_keep_others_waiting(grammars):
    ours = grammars()
    many = [f'start: "{i}"' for i in range(40)]
    for text in many:
        ours.ask(("many", digest(text)), text)
    ours.ask(("one", digest("start: /a/")), "start: /a/")
    order = []
    end = time.monotonic() + stretched(50)
    while len(order) < 41:
        assert time.monotonic() < end
        order += [key[0] for key, _ in ours.take()]
        time.sleep(0.005)
    assert order.index("one") <= 2


def test_bombs_of_one_tenant_keep_a_stranger_waiting_for_one_of_them_at_most(grammars):
    ours = grammars()
    bombs = [bomb(letter) for letter in "cdef"]
    for text in bombs:
        ours.ask(("bomber", digest(text)), text)
    found = []
    end = time.monotonic() + 100
    while not found:
        assert time.monotonic() < end
        found += ours.take()
        time.sleep(0.005)
    ours.ask(("stranger", digest("start: /a/")), "start: /a/")
    order = []
    while "stranger" not in order:
        assert time.monotonic() < end
        order += [key[0] for key, _ in ours.take()]
        time.sleep(0.005)
    assert order.count("bomber") <= 1
    assert sum(ours.drop(("bomber", digest(text))) for text in bombs) >= 1


def test_closing_ends_the_thread_and_the_child(grammars):
    ours = grammars()
    wait(ours, 'start: "yes"')
    child = ours._child
    ours.close()
    assert threading.stack_size() == 0, "other threads have the stack of the system"
    assert child.poll() is not None
    assert not any(thread.name == "grammars" for thread in threading.enumerate())


class Sized:
    def __init__(self, num_bytes):
        self.num_bytes = num_bytes


def test_what_is_kept_is_bounded_for_each_tenant_and_in_all():
    shelf = Shelf(tenant_limits=(3, 100), limits=(5, 1000))
    for number in range(5):
        shelf.put(("a", bytes([number])), Sized(1))
    assert [shelf.get(("a", bytes([n]))) is not None for n in range(5)] == [False, False, True, True, True]
    shelf.put(("a", b"big"), Sized(99))
    assert shelf.get(("a", bytes([4]))) is not None and shelf.size == (2, 100)
    for number in range(5):
        shelf.put((f"t{number}", b""), GrammarError("no"))
    assert shelf.size == (5, 0)
    assert shelf.get(("a", b"big")) is None
    shelf.put(("t0", b""), Sized(5000))
    assert shelf.get(("t0", b"")) is not None, "the newest one stays"


def test_a_grammar_that_grew_is_dropped():
    shelf = Shelf(tenant_limits=(3, 100), limits=(5, 150))
    first, second, other = Sized(10), Sized(10), Sized(50)
    for key, outcome in ((("a", b"1"), first), (("a", b"2"), second), (("b", b"1"), other)):
        shelf.put(key, outcome)
    first.num_bytes = 95
    shelf.trim()
    assert shelf.get(("a", b"1")) is None and shelf.get(("a", b"2")) is second
    second.num_bytes = 140
    shelf.trim()
    assert shelf.size == (1, 140), "what was used last stays, and all together fit"


def test_masks_add_to_the_size_of_a_grammar(grammars):
    (compiled,) = wait(grammars(), "start: /a*/")
    before, matcher = compiled.num_bytes, compiled.start()
    for _ in range(10):
        matcher.mask()
    assert before < compiled.num_bytes <= before + 10 * 16384
