"""Where the messages of a WebSocket end, whatever the parts in which their bytes come."""

from __future__ import annotations

from random import Random

import pytest

from gateway.intake.messages import Frames, FramingTooLarge


def frame(first: int, num_bytes: int) -> bytes:
    """A masked frame, as a client sends it."""
    if num_bytes < 126:
        size = bytes([0x80 | num_bytes])
    else:
        size = b"\xfe" + num_bytes.to_bytes(2, "big") if num_bytes < 2**16 else b"\xff" + num_bytes.to_bytes(8, "big")
    return bytes([first]) + size + bytes(4) + b"\x81" * num_bytes


STREAM = [frame(0x81, 300), frame(0x89, 5), frame(0x01, 70_000), frame(0x8A, 0), frame(0x00, 0), frame(0x80, 7)]


@pytest.mark.parametrize("seed", range(20))
def test_messages_end_where_they_do_in_whatever_parts_they_come(seed: int) -> None:
    rng, frames, data = Random(seed), Frames(), b"".join(STREAM) + frame(0x81, 50)[:-10]
    while data:
        size = rng.choice([1, 2, 3, 7, 100, 5000, 40_000])
        frames.feed(data[:size])
        data = data[size:]
    assert (frames.num_ended, frames.num_bytes, frames.is_between) == (2, 40, False)
    frames.feed(b"\x81" * 10)
    assert (frames.num_ended, frames.num_bytes, frames.is_between) == (3, 0, True)


@pytest.mark.parametrize("tiny", [frame(0x00, 0), frame(0x81, 1), frame(0x89, 0)])
def test_thousands_of_tiny_frames_at_once_are_refused(tiny: bytes) -> None:
    frames = Frames()
    frames.feed(frame(0x01, 0))
    with pytest.raises(FramingTooLarge):
        frames.feed(tiny * 3000)


def test_parts_of_some_size_are_taken_without_end() -> None:
    frames = Frames()
    frames.feed(frame(0x01, 0))
    for _ in range(1000):
        frames.feed(frame(0x00, 100) * 10)
    assert frames.num_bytes == 1_000_000
