"""Replies of Redis as the limiter's link reads them: refusals are replies, but those after which Redis is as gone."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError

from gateway.base.redis_link import reply_reader


def reply(sent: bytes) -> Any:
    reader = reply_reader()
    for byte in sent[:-1]:
        reader.feed(bytes([byte]))
        more = reader.gets()
    reader.feed(sent[-1:])
    found = reader.gets()
    assert found is not more
    return found


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"-ERR no\r\n", ResponseError),
        (b"-OOM command not allowed\r\n", ResponseError),
        (b"-NOSCRIPT No matching script.\r\n", NoScriptError),
        (b"-LOADING Redis is loading the dataset in memory\r\n", redis.ConnectionError),
        (b"-NOAUTH Authentication required.\r\n", redis.ConnectionError),
        (b"-READONLY You can't write against a read only replica.\r\n", redis.ConnectionError),
        (b"-MASTERDOWN Link with MASTER is down\r\n", redis.ConnectionError),
    ],
)
def test_a_refusal_is_a_reply_of_its_kind(sent: bytes, kind: type[Exception]) -> None:
    refusal = reply(sent)
    assert type(refusal) is kind
    assert str(refusal) == sent[1:-2].decode()


def test_a_reply_is_whole_whatever_its_pieces() -> None:
    sent = b"*4\r\n*2\r\n:1\r\n*1\r\n$2\r\n\r\n\r\n$-1\r\n*0\r\n:-12\r\n"
    assert reply(sent) == [[1, [b"\r\n"]], None, [], -12]


@pytest.mark.parametrize("sent", [b"HTTP/1.1 400 Bad Request\r\n", b":many\r\n"])
def test_what_is_no_reply_is_refused(sent: bytes) -> None:
    reader = reply_reader()
    reader.feed(sent)
    with pytest.raises(InvalidResponse):
        reader.gets()
