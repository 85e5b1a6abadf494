"""The ids of a prompt on the wire: four bytes each."""

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


@pytest.mark.parametrize("value", [b"\0" * 7, [1, 2], {"a": 1}, "text", None])
def test_what_is_no_prompt_is_no_frame(value: object) -> None:
    with pytest.raises(FrameError):
        FrameReader().feed(with_prompt(value))
