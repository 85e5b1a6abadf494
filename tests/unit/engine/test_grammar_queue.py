"""Whose grammar is compiled next."""

import pytest

from workers.engine.grammars.grammar_queue import FADE_S, MAX_GRAMMARS, GrammarQueue, GrammarsWait, Job


def job(tenant: str, name: str = "a") -> Job:
    return Job((tenant, name.encode()), name)


def test_whoever_took_little_time_of_late_is_next():
    queue = GrammarQueue()
    for number in range(5):
        queue.push(job("bomber", f"{number}"))
    assert queue.pop(0.0).key[0] == "bomber"
    queue.took("bomber", 20.0, 20.0)
    queue.push(job("stranger"))
    assert [queue.pop(20.0).key[0] for _ in range(2)] == ["stranger", "bomber"]


def test_tenants_that_took_equally_long_take_turns():
    queue = GrammarQueue()
    for tenant in "aabb":
        queue.push(job(tenant))
    order = []
    for number in range(4):
        order.append(queue.pop(number).key[0])
        queue.took(order[-1], 1.0, number)
    assert order == ["a", "b", "a", "b"]


def test_what_was_taken_long_ago_counts_no_more():
    queue = GrammarQueue()
    queue.took("a", 5.0, 0.0)
    queue.took("b", 1.0, 20 * FADE_S)
    for tenant in "ba":
        queue.push(job(tenant))
    assert queue.pop(20 * FADE_S).key[0] == "a"


def test_a_tenant_has_only_so_many_in_the_queue():
    queue = GrammarQueue()
    for number in range(MAX_GRAMMARS):
        queue.push(job("a", f"{number}"))
    with pytest.raises(GrammarsWait):
        queue.push(job("a", "one more"))
    queue.push(job("b"))
    assert len(queue) == MAX_GRAMMARS + 1


def test_what_nobody_waits_for_leaves_the_queue():
    queue = GrammarQueue()
    for name in "xyz":
        queue.push(job("a", name))
    assert queue.drop(("a", b"y")) and not queue.drop(("a", b"y"))
    assert [queue.pop(0.0).text for _ in range(2)] == ["x", "z"]
    assert len(queue) == 0 and not queue.drop(("a", b"x"))
