"""What a WebSocket of `/v1/responses` remembers between its messages."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.base import errors
from gateway.responses.connection import Connection

OUTPUT = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}


def message(**fields: Any) -> dict[str, Any]:
    return {"type": "response.create", "model": "m", "input": "hi"} | fields


def ended(connection: Connection, response_id: str, kind: str = "completed", **fields: Any) -> dict[str, Any]:
    response = {"id": response_id, "store": False, "output": [OUTPUT], "previous_response_id": None} | fields
    return connection.seen({"type": f"response.{kind}", "response": response})


def test_a_message_is_a_body_that_streams() -> None:
    assert Connection().body_of(message()) == {"model": "m", "input": "hi", "stream": True}


def test_a_message_may_say_what_holds_for_all_of_them() -> None:
    """The SDK of OpenAI's agents says `stream` in each message, and was refused."""
    options = {"include_obfuscation": False}
    body = Connection().body_of(message(stream=True, background=False, generate=True, stream_options=options))
    assert body == {"model": "m", "input": "hi", "stream": True, "stream_options": options}


def test_each_event_of_a_turn_has_the_name_that_its_message_gave() -> None:
    """The lanes of OpenAI's clients wait for events with their name, and got none."""
    connection = Connection()
    assert "stream_id" not in connection.body_of(message(stream_id="a.b-c_1"))
    assert connection.seen({"type": "response.output_text.delta"})["stream_id"] == "a.b-c_1"
    assert ended(connection, "resp_1")["stream_id"] == "a.b-c_1"
    connection.over()
    connection.body_of(message())
    assert "stream_id" not in ended(connection, "resp_2")


def test_the_newest_response_is_gone_on_from_with_all_its_items() -> None:
    connection = Connection()
    connection.body_of(message(store=False))
    ended(connection, "resp_1")
    body = connection.body_of(message(input=[{"role": "user", "content": "on"}], previous_response_id="resp_1"))
    assert "previous_response_id" not in body
    first = {"type": "message", "role": "user", "content": "hi"}
    assert body["input"] == [first, OUTPUT, {"role": "user", "content": "on"}]
    assert ended(connection, "resp_2")["response"]["previous_response_id"] == "resp_1"
    body = connection.body_of(message(previous_response_id="resp_2"))
    assert len(body["input"]) == 5


def test_an_older_response_a_stored_one_and_a_strangers_are_looked_up() -> None:
    connection = Connection()
    for response_id, fields in (("resp_1", {}), ("resp_2", {}), ("resp_3", {"store": True})):
        connection.body_of(message())
        ended(connection, response_id, **fields)
    for response_id in ("resp_1", "resp_3", "resp_9"):
        body = connection.body_of(message(previous_response_id=response_id))
        assert body["previous_response_id"] == response_id
        assert body["input"] == "hi"


@pytest.mark.parametrize("fail", [Connection.failed, lambda connection: ended(connection, "resp_2", "failed")])
def test_a_turn_that_fails_takes_the_response_before_it_with_it(fail: Any) -> None:
    connection = Connection()
    connection.body_of(message())
    ended(connection, "resp_1")
    connection.body_of(message(previous_response_id="resp_1"))
    fail(connection)
    assert connection.body_of(message(previous_response_id="resp_1"))["previous_response_id"] == "resp_1"


def test_a_failure_beside_the_chain_leaves_it() -> None:
    connection = Connection()
    connection.body_of(message())
    ended(connection, "resp_1")
    connection.body_of(message())
    connection.failed()
    assert "previous_response_id" not in connection.body_of(message(previous_response_id="resp_1"))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "type"),
        ({"type": "response.cancel"}, "type"),
        (message(stream=False), "stream"),
        (message(stream="yes"), "stream"),
        (message(background=True), "background"),
        (message(generate=False), "generate"),
        *((message(stream_id=given), "stream_id") for given in ("", "a b", "a\n", "é", "x" * 257, 7)),
    ],
)
def test_what_a_message_cannot_be_is_named(given: Any, param: str) -> None:
    with pytest.raises(errors.ApiError) as found:
        Connection().body_of(given)
    assert (found.value.status, found.value.param) == (400, param)
