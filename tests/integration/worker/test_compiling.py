"""The compiler's child process, real: what it survives, what it does not, and what the worker keeps."""

from __future__ import annotations

import threading
import time

import pytest
from walks import END, LIBRARIES, VOCABULARY, ids

from workers.engine.grammars.compiling import Grammars, Shelf
from workers.engine.grammars.grammar import Automaton, GrammarError, digest

pytestmark = pytest.mark.rest

BOMB = "root ::= " + "(" * 20 + "[a-c]" + "{1,300})" * 20 + "\n"
WIDE = "\n".join(
    ["root ::= " + " | ".join(f"a{i}" for i in range(2000))]
    + [f'a{i} ::= ([a-z]{{0,500}} [^a]{{1,300}} "x{i}")*' for i in range(2000)]
)


@pytest.fixture
def grammars():
    made = []

    def make(name="xgrammar", **limits):
        pytest.importorskip(name)
        made.append(Grammars(lambda: VOCABULARY, name, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait(grammars, *texts, tenant="t", limit_s=50.0):
    """The outcomes, in the order they came."""
    found = []
    for text in texts:
        assert grammars.ask((tenant, digest(text)), text) is None
    end = time.monotonic() + limit_s
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
    end = time.monotonic() + 50
    while ours._backend is None:
        assert time.monotonic() < end, "not warm"
        time.sleep(0.005)
    (child,) = started
    assert child.poll() is None
    (good,) = wait(ours, 'root ::= "yes"')
    assert Automaton(good, ()).mask
    ours.warm()
    wait(ours, 'root ::= "no"')
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
    (good,) = wait(ours, 'root ::= "yes"')
    assert Automaton(good, ()).mask
    assert calls == [0, 1]


def test_a_bomb_ends_the_child_and_the_next_grammar_is_compiled(grammars):
    ours = grammars()
    good, bad = wait(ours, 'root ::= "yes"', BOMB)
    assert Automaton(good, ()).mask
    assert isinstance(bad, GrammarError)
    (again,) = wait(ours, 'root ::= "no"')
    assert Automaton(again, ()).mask
    assert ours.ask(("t", digest('root ::= "yes"')), 'root ::= "yes"') is good
    with pytest.raises(GrammarError, match="too much time or memory"):
        ours.ask(("t", digest(BOMB)), BOMB)


@pytest.mark.parametrize("name", LIBRARIES)
def test_each_library_follows_in_the_worker_what_its_child_came_through(grammars, name):
    ours = grammars(name)
    good, bad = wait(ours, 'root ::= "yes" root | "no"', "root ::= x\nx ::= x")
    automaton = Automaton(good, (END,))
    for token in ids("yesyesno"):
        automaton.advance(token)
    assert automaton.ended and not automaton.fault
    assert isinstance(bad, GrammarError)
    used = {"xgrammar": "XGrammarCompiled", "llguidance": "LLGuidanceCompiled"}
    assert type(good).__name__ == used[name]


def test_what_the_other_library_does_not_refuse_at_once_ends_the_choice_that_follows_it(grammars):
    """It compiles as it goes: a bomb is met by its limits, in the child's walk or later."""
    ours = grammars("llguidance")
    (bad,) = wait(ours, BOMB)
    fault = str(bad)
    if not isinstance(bad, GrammarError):
        automaton = Automaton(bad, ())
        for token in ids("abc" * 60):
            if not automaton.fault:
                automaton.advance(token)
        fault = automaton.fault
    assert fault
    (good,) = wait(ours, 'root ::= "yes"')
    assert Automaton(good, ()).mask


def test_memory_beyond_the_limit_is_refused(grammars):
    ours = grammars(limit_s=20.0, limit_bytes=16 << 20)
    (bad,) = wait(ours, WIDE)
    assert isinstance(bad, GrammarError)
    (good,) = wait(ours, 'root ::= "yes"')
    assert Automaton(good, ()).mask


def test_errors_say_why_and_tell_no_path(grammars):
    undefined, unending, deep = wait(grammars(), 'root ::= "a" b', "root ::= x\nx ::= x", "root ::= " + "(" * 60_000)
    assert "b" in str(undefined) and "/" not in str(undefined)
    assert isinstance(unending, GrammarError) and isinstance(deep, GrammarError)


def test_a_tenant_with_many_grammars_does_not_keep_others_waiting(grammars):
    ours = grammars()
    many = [f'root ::= "{i}"' for i in range(40)]
    for text in many:
        ours.ask(("many", digest(text)), text)
    ours.ask(("one", digest("root ::= [a]")), "root ::= [a]")
    order = []
    end = time.monotonic() + 50
    while len(order) < 41:
        assert time.monotonic() < end
        order += [key[0] for key, _ in ours.take()]
        time.sleep(0.005)
    assert order.index("one") <= 2


def test_bombs_of_one_tenant_keep_a_stranger_waiting_for_one_of_them_at_most(grammars):
    ours = grammars()
    bombs = [f"root ::= x{i}\nx{i} ::= " + BOMB.removeprefix("root ::= ") for i in range(4)]
    for text in bombs:
        ours.ask(("bomber", digest(text)), text)
    found = []
    end = time.monotonic() + 100
    while not found:
        assert time.monotonic() < end
        found += ours.take()
        time.sleep(0.005)
    ours.ask(("stranger", digest("root ::= [a]")), "root ::= [a]")
    order = []
    while "stranger" not in order:
        assert time.monotonic() < end
        order += [key[0] for key, _ in ours.take()]
        time.sleep(0.005)
    assert order.count("bomber") <= 1
    assert sum(ours.drop(("bomber", digest(text))) for text in bombs) >= 1


def test_closing_ends_the_thread_and_the_child(grammars):
    ours = grammars()
    wait(ours, 'root ::= "yes"')
    child = ours._child
    ours.close()
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
