"""Replies of Redis, however the network has cut them."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import NoScriptError, ResponseError

from gateway.base.redis_link import Replies

SENT = (
    b"+OK\r\n$5\r\na\r\nb:\r\n:-12\r\n$-1\r\n*0\r\n*-1\r\n$0\r\n\r\n"
    b"*3\r\n*2\r\n:1\r\n*1\r\n$2\r\n\r\n\r\n$-1\r\n+PONG\r\n-ERR no\r\n"
)
MEANT = [b"OK", b"a\r\nb:", -12, None, [], None, b"", [[1, [b"\r\n"]], None, b"PONG"]]


@pytest.mark.parametrize("num_bytes", [*range(1, 12), len(SENT)])
def test_replies_are_whole_whatever_the_pieces(num_bytes: int) -> None:
    replies = Replies()
    for begin in range(0, len(SENT), num_bytes):
        replies.feed(SENT[begin : begin + num_bytes])
    *values, refusal = replies.whole
    assert values == MEANT
    assert type(refusal) is ResponseError
    assert str(refusal) == "ERR no"


def test_a_reply_that_is_not_whole_is_not_told() -> None:
    replies = Replies()
    replies.feed(b"*2\r\n$3\r\nabc\r\n$3\r\nab")
    assert replies.whole == []
    replies.feed(b"c\r\n")
    assert replies.whole == [[b"abc", b"abc"]]


def test_a_script_that_redis_does_not_know_is_named_as_such() -> None:
    replies = Replies()
    replies.feed(b"-NOSCRIPT No matching script.\r\n")
    assert isinstance(replies.whole[0], NoScriptError)


@pytest.mark.parametrize(
    "told", [b"-LOADING Redis is loading the dataset in memory\r\n", b"-NOAUTH Authentication.\r\n"]
)
def test_a_redis_that_cannot_be_used_is_as_one_that_is_gone(told: bytes) -> None:
    with pytest.raises(redis.ConnectionError):
        Replies().feed(told)


@pytest.mark.parametrize("sent", [b"HTTP/1.1 400 Bad Request\r\n", b":many\r\n", b"$x\r\n"])
def test_what_is_no_reply_is_refused(sent: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Replies().feed(sent)
