"""S2: stop strings cost a gateway's loop about the same, whatever they are and however much of them is held back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from gateway.text.stops import StopMatcher, StopStrings

NUM_PIECES = 400
USUAL = ["\nUser:", "\n\n", "</s>", "aab"]
OPEN = "a" * 255
"""All of the last stop string but its end: it is held back, and each other one begins with one of its characters."""
HOSTILE = [*("a" + other * 255 for other in "bcdefghijklmnop"), OPEN + "b"]


def cpu_s(stops: Sequence[str], piece: str) -> float:
    """The processor time of pieces after the first 255 characters, the least of several tries."""
    tries = []
    for _ in range(7):
        matcher = StopMatcher(StopStrings(stops))
        matcher.push(OPEN)
        started = time.thread_time()
        for _ in range(NUM_PIECES):
            matcher.push(piece)
        tries.append(time.thread_time() - started)
    return min(tries)


@pytest.mark.parametrize("size", [1, 16, 128])
def test_s2_stop_strings_that_nearly_match_cost_a_token_about_as_much_as_usual_ones(size: int) -> None:
    # They take 1.2 times as long, and took 150 times as long where each beginning of each stop string was tried.
    assert cpu_s(HOSTILE, "a" * size) < 20 * cpu_s(USUAL, "a" * size)


def test_s2_a_long_stop_string_costs_nothing_before_text_resembles_it() -> None:
    stops = StopStrings(HOSTILE)
    matcher = StopMatcher(stops)
    assert matcher.push("zyxw" * 1000) == ("zyxw" * 1000, None)
    assert stops._num_levels == 0
    assert matcher.push("zyxa") == ("zyx", None)
    assert stops._num_levels <= 4


def test_what_is_held_goes_out_as_soon_as_no_stop_string_can_come_of_it() -> None:
    matcher = StopMatcher(StopStrings(HOSTILE))
    assert matcher.push(OPEN) == ("", None)
    assert matcher.push("a") == ("a", None)
    assert matcher.push("z") == (OPEN + "z", None)
    assert matcher.push(OPEN + "b") == ("", OPEN + "b")
