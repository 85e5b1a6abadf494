"""The answer of an attempt: which ending is one, and that a piece costs the same however many came before."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.base.upstream_source import UpstreamModel, UpstreamSource
from gateway.upstreams.answer import MAX_CALL_BYTES, Answer, Broken
from gateway.upstreams.wires.values import Ask, CallDelta, Chunk, Interval, Upstream

UPSTREAM = Upstream("mock", UpstreamSource(url="http://127.0.0.1:1/v1", models={"m": UpstreamModel()}))


def answer(**body: Any) -> Answer:
    return Answer(UPSTREAM, "m", Ask("chat", {"messages": []} | body, 1, 5, Interval(0, 1, 100)), None)


@pytest.mark.parametrize(
    ("arguments", "finish", "stop", "is_whole"),
    [
        ('{"text": "aa', "length", None, True),
        ('{"text": "aa', "stop", "bb", True),
        ('{"text": "aa', "stop", [], False),
        ('{"text": "aa', "tool_calls", "bb", False),
        ('{"text": "aa"}', "tool_calls", None, True),
        ("", "stop", None, True),
        ("[]", "stop", None, False),
    ],
)
def test_arguments_that_the_bound_or_a_stop_string_cut_are_no_fault_of_the_provider(
    arguments: str, finish: str, stop: Any, is_whole: bool
) -> None:
    one = answer(stop=stop)
    one.add(Chunk(calls=(CallDelta(0, "c", "write", arguments),)))
    one.add(Chunk(finish=finish))
    if is_whole:
        one.check_whole()
    else:
        with pytest.raises(Broken):
            one.check_whole()


def test_calls_come_one_after_the_other_and_are_bounded() -> None:
    for calls in (
        [CallDelta(1, "c", "write")],
        [CallDelta(0, "c", "", "{}")],
        [CallDelta(0, "c", "write"), CallDelta(2, "d", "write")],
        [CallDelta(0, "c", "write", "x" * MAX_CALL_BYTES), CallDelta(0, arguments="x")],
    ):
        with pytest.raises(Broken):
            answer().add(Chunk(calls=tuple(calls)))


def test_a_piece_of_a_call_is_measured_once() -> None:
    """Each one measured all before it: 16,000 took the loop four seconds."""

    class Piece(str):
        num_measured = 0

        def __len__(self) -> int:
            Piece.num_measured += 1
            return super().__len__()

    one = answer()
    one.add(Chunk(calls=(CallDelta(0, "c", "write"),)))
    for _ in range(500):
        one.add(Chunk(calls=(CallDelta(0, arguments=Piece("word")),)))
    assert Piece.num_measured <= 500
