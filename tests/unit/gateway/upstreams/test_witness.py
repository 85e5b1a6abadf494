"""Our count beside a provider's: no statement bills more than was seen or leased, and each difference has a name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from accounting.values.types import TOKEN_CLASSES, Usage
from gateway.upstreams.wires.values import Interval, Stated
from gateway.upstreams.witness import Seen, judge, judge_cut, of_bytes, of_count

COUNT = st.integers(0, 10**7)
USAGES = st.builds(Usage, COUNT, COUNT, COUNT, COUNT)
INTERVALS = st.tuples(COUNT, COUNT, COUNT).map(lambda found: Interval(*sorted(found)))


@given(st.none() | st.builds(Stated, USAGES, COUNT), INTERVALS, INTERVALS, COUNT, st.booleans())
def test_a_bill_stays_within_what_was_reserved_and_leased(stated, prompt, output, bound, hides):
    found = judge(stated, prompt, output, bound, hides)
    assert 0 <= found.usage.prompt <= prompt.high
    assert 0 <= found.usage.output <= bound
    assert all(getattr(found.usage, name) >= 0 for name in TOKEN_CLASSES)
    assert (found.drift == "") == (stated is not None and stated.usage == found.usage)


@given(st.none() | st.builds(Stated, USAGES), INTERVALS, COUNT, COUNT)
def test_a_cut_bills_what_was_passed_on_and_no_more_than_the_lease(so_far, prompt, received, bound):
    found = judge_cut(so_far, prompt, received, bound)
    assert found.usage.output == min(received, bound)
    assert found.usage.prompt <= prompt.high
    assert found.drift == "cut"


def test_a_statement_that_is_possible_is_billed_as_it_is():
    stated = Stated(Usage(10, 0, 20, 12))
    assert judge(stated, of_bytes(100, 80), of_bytes(45, 16), 100, False) == judge(
        stated, of_bytes(100, 80), of_bytes(45, 16), 12, False
    )
    assert judge(stated, of_bytes(100, 80), of_bytes(45, 16), 100, False).usage == stated.usage


def test_hidden_reasoning_is_false_usage_unless_the_model_is_declared_so():
    stated = Stated(Usage(uncached=20, output=900), reasoning=880)
    assert judge(stated, of_bytes(100, 80), of_bytes(45, 16), 1000, False).drift == "usage_over"
    assert judge(stated, of_bytes(100, 80), of_bytes(45, 16), 1000, True).usage == stated.usage


def test_a_tokenizer_narrows_what_is_possible():
    seen = Seen(1, lambda text: len(text.split()))
    for word in ("one ", "two ", "three ") * 50:
        seen.add(word)
    assert seen.interval.best == 150
    assert seen.interval == of_count(150, 16)
    assert seen.interval.high < of_bytes(700, 16).high


@given(st.lists(st.text(max_size=50), max_size=20))
def test_any_text_has_at_least_no_and_at_most_a_token_for_each_byte(pieces):
    seen = Seen(1, None)
    for piece in pieces:
        seen.add(piece)
    found = seen.interval
    assert found.low <= found.best <= found.high
    assert seen.num_certain <= seen.num_tokens
