"""The ids of a prompt on the wire: four bytes each, and the numbers of the version before."""

from __future__ import annotations

import struct
from array import array

import msgspec
import pytest

from workers.protocol.frames import FrameError, FrameReader, encode
from workers.protocol.messages import GenerateRequest, SamplingParams

IDS = (0, 1, 255, 70_000, 2**31 - 1)


def request(prompt: object) -> GenerateRequest:
    return GenerateRequest("req_1", "t", "m", "r", (), prompt, SamplingParams(1), 8)


def read(frame: bytes) -> GenerateRequest:
    [message] = FrameReader().feed(frame)
    assert isinstance(message, GenerateRequest)
    return message


def with_prompt(value: object) -> bytes:
    """The frame of a request whose prompt is this msgpack value."""
    fields = msgspec.msgpack.decode(encode(request(array("i", IDS)))[4:]) | {"prompt": value}
    body = msgspec.msgpack.encode(fields)
    return struct.pack(">I", len(body)) + body


def test_a_prompt_is_four_bytes_a_token_and_comes_back_as_it_was() -> None:
    frame = encode(request(array("i", IDS)))
    assert struct.pack("<5i", *IDS) in frame
    assert read(frame).prompt == array("i", IDS)
    many = array("i", range(100_000))
    assert len(encode(request(many))) < 400_200
    assert read(encode(request(many))).prompt == many


def test_numbers_of_the_version_before_are_read() -> None:
    assert read(encode(request(IDS))).prompt == array("i", IDS)
    assert read(with_prompt(list(IDS))).prompt == array("i", IDS)


def test_a_number_that_is_no_id_reaches_the_checks_of_its_request() -> None:
    """It fails its own request there, and not the link with everybody's."""
    assert list(read(with_prompt([1, 2**40])).prompt) == [1, 2**40]


@pytest.mark.parametrize("value", [b"\0" * 7, [2**64 - 1], ["1"], [1.5], {"a": 1}, "text", None])
def test_what_is_no_prompt_is_no_frame(value: object) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(with_prompt(value))
