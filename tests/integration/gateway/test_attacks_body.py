"""Attacks by JSON, unicode and parameters (security.md section 8, B), all on one gateway."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from gateways import MODEL, RunningGateway, running_gateway
from load import stretched
from redis_db import emptied

from gateway.intake.body_checker import BODY_CHECKER

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, BATCHES = "/v1/chat/completions", "/v1/messages/batches"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def long_gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """For a model with a long context; without a worker."""
    home = tmp_path_factory.mktemp("long")
    async with running_gateway(home, emptied(redis_socket, 2), max_model_len=2**20) as gateway:
        yield gateway


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2} | more


def said(content: Any, **more: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": content}], **more)


async def post(gateway: RunningGateway, body: Any, path: str = CHAT, limit_s: float = 20) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    timeout = aiohttp.ClientTimeout(total=limit_s)
    async with (
        gateway.session() as session,
        session.post(
            path, data=io.BytesIO(data), headers={"content-type": "application/json"}, timeout=timeout
        ) as answer,
    ):
        return answer.status, await answer.json()


async def refused(gateway: RunningGateway, body: Any, path: str = CHAT) -> dict[str, Any]:
    status, reply = await post(gateway, body, path)
    assert status == 400, reply
    error: dict[str, Any] = reply["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"messages":['])
async def test_attack_B01_nesting_is_cut_off_early(shared_gateway: RunningGateway, opening: bytes) -> None:
    started = time.perf_counter()
    assert (await refused(shared_gateway, opening * 100_000))["code"] == "invalid_json"
    assert time.perf_counter() - started < stretched(0.5)


async def test_attack_B02_doubled_keys_and_floods_of_parts_are_refused(shared_gateway: RunningGateway) -> None:
    doubled = b'{"model":"scripted","model":"other","messages":[{"role":"user","content":"x"}]}'
    assert (await refused(shared_gateway, doubled))["code"] == "invalid_json"
    inner = b'{"model":"scripted","messages":[{"role":"user","role":"system","content":"x"}]}'
    assert (await refused(shared_gateway, inner))["code"] == "invalid_json"
    many = [{"role": "user", "content": "x"}] * 90_000
    await refused(shared_gateway, chat(messages=many))
    keys = {f"k{i}": 1 for i in range(200_000)}
    status, _ = await post(shared_gateway, chat(**keys))
    assert status in {200, 400}


async def test_s2_large_bodies_are_checked_in_a_process_of_their_own(shared_gateway: RunningGateway) -> None:
    number = shared_gateway.app[BODY_CHECKER].num_checked
    broken = json.dumps(said("x" * 100_000)).encode()[:-1]
    while not number["process"]:
        assert (await refused(shared_gateway, broken))["code"] == "invalid_json"
    before = number["process"], number["gateway"]
    assert (await refused(shared_gateway, broken))["code"] == "invalid_json"
    assert (await refused(shared_gateway, said(["x"] * 30_000)))["param"] == "messages[0].content[0]"
    sound = json.dumps(chat()).encode()[:-1]
    status, reply = await post(shared_gateway, sound + b" " * 100_000 + b', "n": 1}')
    assert (status, reply["usage"]["completion_tokens"]) == (200, 2)
    assert (number["process"], number["gateway"]) == (before[0] + 3, before[1])


async def test_s2_a_large_message_batch_is_checked_as_any_other_body(shared_gateway: RunningGateway) -> None:
    """Its values were counted nowhere: one call over a million lists held the gateway up."""
    number = shared_gateway.app[BODY_CHECKER].num_checked

    def batch(num_requests: int, *messages: Any) -> dict[str, Any]:
        params = {"model": MODEL, "max_tokens": 2, "messages": messages}
        return {"requests": [{"custom_id": f"request-{n}", "params": params} for n in range(num_requests)]}

    before = sum(number.values())
    status, reply = await post(shared_gateway, batch(1_000, {"role": "user", "content": "hi"}), BATCHES)
    assert (status, reply.get("request_counts", {}).get("processing")) == (200, 1_000)
    status, reply = await post(shared_gateway, batch(1, *[[]] * 60_000), BATCHES)
    assert (status, reply["error"].get("code")) == (400, "too_many_values")
    assert sum(number.values()) == before + 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", b"9" * 1_000_000),
        ("temperature", b"1e400"),
        ("temperature", b"NaN"),
        ("temperature", b"Infinity"),
        ("seed", b"-0"),
        ("n", b"true"),
        ("n", b'"5"'),
        ("n", b"1.0"),
        ("max_tokens", b'"2"'),
        ("stream", b"1"),
        ("seed", b"18446744073709551616"),
    ],
)
async def test_attack_B03_numbers_that_are_none_are_refused(
    shared_gateway: RunningGateway, field: str, value: bytes
) -> None:
    body = json.dumps(chat()).encode()[:-1].replace(f'"{field}": 2'.encode(), b'"x": 2')
    await refused(shared_gateway, body + b', "' + field.encode() + b'": ' + value + b"}")


@pytest.mark.parametrize(
    "content",
    [b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d x"', b'"\xc0\xaf"', b'"\xff"', b'"\xed\xa0\x80"', b'"a\nb"'],
)
async def test_attack_B04_broken_unicode_is_refused(shared_gateway: RunningGateway, content: bytes) -> None:
    body = b'{"model":"scripted","max_tokens":1,"messages":[{"role":"user","content":' + content + b"}]}"
    assert (await refused(shared_gateway, body))["code"] == "invalid_json"


@pytest.mark.parametrize(
    "content", ["\u202e\x00", "e" + "\u0301" * 200, "🎉" * 100, "\ufeffx", "\u2028", "\ud83c\udf89"]
)
async def test_attack_B04_odd_unicode_is_counted_alike(shared_gateway: RunningGateway, content: str) -> None:
    status, reply = await post(shared_gateway, said(content))
    assert status == 200
    _, tokens = await post(
        shared_gateway, {"model": MODEL, "messages": [{"role": "user", "content": content}]}, "/tokenize"
    )
    assert reply["usage"]["prompt_tokens"] == tokens["count"]
    assert (await refused(shared_gateway, b"\xef\xbb\xbf" + json.dumps(chat()).encode()))["code"] == "invalid_json"


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63, 10**30, 1.5, "1", True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_attack_B05_output_bounds_that_are_none_are_refused(
    shared_gateway: RunningGateway, field: str, value: Any
) -> None:
    await refused(shared_gateway, chat(**{field: value}))


async def test_attack_B05_a_bound_of_null_is_the_default(shared_gateway: RunningGateway) -> None:
    status, _ = await post(shared_gateway, chat(max_tokens=2, max_completion_tokens=None))
    assert status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": -1},
        {"n": 129},
        {"n": 10**6},
        {"best_of": 9},
        {"logprobs": True, "top_logprobs": 21},
        {"top_logprobs": 3},
        {"logprobs": 5},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"999": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {str(i): 0 for i in range(2000)}},
        {"stop": ["a"] * 10_000},
        {"stop": "a" * 1_000_000},
        {"stop": ["a"] * 17},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"temperature": 2.1},
        {"temperature": -0.1},
        {"temperature": "hot"},
        {"seed": 2**100},
        {"seed": 2**63},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-45},
        {"logit_bias": {str(2**31): 1}},
        {"logit_bias": {str(2**70): 1}},
        {"stop_token_ids": [2**31]},
        {"stop_token_ids": [2**64 - 1]},
        {"min_tokens": 2**31},
        {"top_k": 2**31},
        {"stop_token_ids": [259]},
        {"stop_token_ids": [-1]},
        {"min_tokens": -1},
        {"cache_salt": "x" * 1025},
        {"bad_words": "x"},
        {"bad_words": [1]},
        {"bad_words": [""]},
        {"bad_words": ["x" * 101]},
        {"bad_words": ["x"] * 129},
        {"bad_words": ["x", None]},
        {"allowed_token_ids": [259]},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": ["1"]},
        {"allowed_token_ids": [1.5]},
        {"allowed_token_ids": [1] * 16_385},
        {"allowed_token_ids": [120], "bad_words": ["x"]},
        {"stream_options": {"include_usage": True}},
        {"service_tier": "gold"},
        {"service_tier": "flex"},
        {"metadata": {"k": 1}},
        {"metadata": {str(i): "v" for i in range(17)}},
        {"store": "yes"},
        {"user": 7},
        {"priority": "high"},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
async def test_attack_B06_parameters_out_of_range_are_refused(
    shared_gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    await refused(shared_gateway, chat(**fields))


@pytest.mark.parametrize(
    "key",
    [
        "0000000000002147483648",
        "00000000000000000000007",
        "1" * 30,
        "1" * 60_000,
        str(2**31),
        str(2**64),
        "259",
        "07",
        "00",
        "",
        "-1",
        "+7",
        "7 ",
        " 7",
        "7.0",
        "1e1",
        "0x7",
        "1_0",
        "\u0667",
        "\u00b2",
        "\uff17",
        "7\x00",
    ],
    ids=lambda key: ascii(key[:24]),
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_s1_a_bias_for_what_is_no_token_id_is_refused(
    shared_gateway: RunningGateway, path: str, key: str
) -> None:
    """S1: the first twelve characters were checked, and all of them were sent."""
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2} if path != CHAT else chat()
    error = await refused(shared_gateway, body | {"logit_bias": {key: 1}}, path)
    assert (error["param"], error["code"]) == ("logit_bias", "invalid_value")


async def test_s1_a_token_has_one_bias_however_its_id_is_spelled(shared_gateway: RunningGateway) -> None:
    await refused(shared_gateway, chat(logit_bias={"7": 100, "07": 100}))
    status, reply = await post(shared_gateway, chat(logit_bias={"0": 1, "7": 100, "258": -100}))
    assert status == 200, reply


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([None], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "root", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            "messages[0].content[0]",
        ),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "odd"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        (
            [{"role": "user", "content": "x"}, {"role": "tool", "content": "", "tool_call_id": 5}],
            "messages[1].tool_call_id",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "../x", "arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
async def test_attack_B07_messages_that_are_none_are_refused_by_path(
    shared_gateway: RunningGateway, messages: Any, param: str
) -> None:
    error = await refused(shared_gateway, chat(messages=messages))
    assert error["param"] == param


async def test_empty_messages_are_allowed(shared_gateway: RunningGateway) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "call_1"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": []},
        {"role": "system", "content": ""},
    ]
    status, reply = await post(shared_gateway, chat(messages=messages))
    assert status == 200, reply


async def test_attack_B08_the_context_is_a_wall_with_numbers(shared_gateway: RunningGateway) -> None:
    limit = 2048
    base = len("user: ") + len("\nassistant:") + 2
    for length, bound, expected in [
        (limit - base - 2, 2, 200),
        (limit - base - 1, 2, 400),
        (limit - base, None, 400),
        (limit * 10, None, 400),
    ]:
        status, reply = await post(shared_gateway, said("x" * length, max_tokens=bound))
        assert status == expected, (length, bound, reply)
        if expected == 400:
            assert reply["error"]["code"] == "context_length_exceeded"
            assert str(limit) in reply["error"]["message"]


@pytest.mark.parametrize("text", ["a" * 4_000_000, " " * 4_000_000, "<|eos" * 800_000, "é<" * 500_000])
async def test_attack_B09_tokenizing_megabytes_does_not_block_the_loop(
    shared_gateway: RunningGateway, text: str
) -> None:
    worst = 0.0
    done = False

    async def measure() -> None:
        nonlocal worst
        while not done:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            worst = max(worst, time.perf_counter() - before - 0.005)

    body = json.dumps(said(text)).encode()
    # The client's own work is measured away: it writes from a thread.
    watch = asyncio.create_task(measure())
    status = await asyncio.to_thread(_post_from_a_thread, shared_gateway, body)
    done = True
    await watch
    assert status == 400
    assert worst < stretched(0.25)


def _post_from_a_thread(gateway: RunningGateway, body: bytes, path: str = CHAT) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=20)
    headers = {"authorization": f"Bearer {gateway.keys.api_key}", "content-type": "application/json"}
    connection.request("POST", path, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


async def test_attack_B10_fields_that_would_steer_us_have_no_effect(shared_gateway: RunningGateway) -> None:
    steering = {
        "tenant_id": "other",
        "api_base": "http://x",
        "base_url": "http://x",
        "extra_headers": {"a": "b"},
        "user_api_key": "x",
        "request_id": "req_" + "0" * 32,
        "price": 0,
        "tier": "batch",
    }
    status, reply = await post(shared_gateway, chat(temperature=0, priority=9, **steering))
    assert status == 200
    assert reply["headgate"]["request_id"] != steering["request_id"]
    assert reply["headgate"]["tier"] == "interactive"
    assert reply["headgate"]["charge_micro_units"] > 0
    _, plain = await post(shared_gateway, chat(temperature=0))
    assert plain["choices"] == reply["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"tools": [{"type": "web_search", "web_search": {}}]},
        {"messages": [{"role": "user", "content": "x", "chat_template": "{{ 1 }}"}]},
        {"functions": [{"name": "f"}]},
        {"audio": {"voice": "x"}},
        {"modalities": ["audio"]},
        {"web_search_options": {}},
        {"suffix": "x"},
        {"guided_json": {}},
        {"logits_processors": ["x"]},
        {"reasoning_effort": "high"},
        {"best_of": 2},
        {"stop_regex": "x"},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_attack_B11_what_cannot_be_honoured_is_refused_by_name(
    shared_gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    assert (await refused(shared_gateway, chat(**fields)))["code"] == "unsupported_parameter"


async def test_neutral_values_of_such_fields_are_taken(shared_gateway: RunningGateway) -> None:
    neutral = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "chat_template": None,
        "functions": None,
        "service_tier": "auto",
        "metadata": {"a": "b"},
    }
    status, reply = await post(shared_gateway, chat(**neutral))
    assert status == 200
    assert reply["service_tier"] == "default"
    assert reply["metadata"] == {"a": "b"}


@pytest.mark.parametrize("text", ["{{ 7*7 }}", "{% raw %}", "{{ ''.__class__ }}", "{# x #}"])
async def test_attack_B12_template_syntax_in_text_is_text(shared_gateway: RunningGateway, text: str) -> None:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": text, "name": text}]}
    _, tokens = await post(shared_gateway, fields, "/tokenize")
    _, back = await post(shared_gateway, {"model": MODEL, "tokens": tokens["tokens"]}, "/detokenize")
    assert f"user: {text}<|eos|>" in back["prompt"]
    status, _ = await post(shared_gateway, chat(model=text))
    assert status == 404


@pytest.mark.parametrize("token", ["<|bos|>", "<|eos|>", "<|pad|>"])
async def test_attack_B13_control_tokens_in_text_stay_text(shared_gateway: RunningGateway, token: str) -> None:
    halves = [token[:4], token[4:]]
    plain = [{"role": "user", "content": "x"}]
    _, reference = await post(shared_gateway, {"model": MODEL, "messages": plain}, "/tokenize")
    num_control = sum(one >= 256 for one in reference["tokens"])
    for content in (
        token,
        f"a{token}{token}b",
        f" {token} ",
        [{"type": "text", "text": half} for half in halves],
        [{"type": "text", "text": f"a{halves[0]}"}, {"type": "text", "text": f"{halves[1]}b"}],
    ):
        fields = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        _, tokens = await post(shared_gateway, fields, "/tokenize")
        assert sum(one >= 256 for one in tokens["tokens"]) == num_control
        _, back = await post(shared_gateway, {"model": MODEL, "tokens": tokens["tokens"]}, "/detokenize")
        assert token in back["prompt"]
    for prompt in (token, f"x{token}"):
        _, tokens = await post(shared_gateway, {"model": MODEL, "prompt": prompt}, "/tokenize")
        assert all(one < 256 for one in tokens["tokens"])


async def test_completions_refuse_what_is_not_theirs(shared_gateway: RunningGateway) -> None:
    base = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    path = "/v1/completions"
    for fields in (
        {"prompt": []},
        {"prompt": ""},
        {"prompt": [[]]},
        {"prompt": [300]},
        {"prompt": [-1]},
        {"prompt": [[1], "a"]},
        {"prompt": None},
        {"prompt": {"a": 1}},
        {"prompt": [True]},
        {"max_tokens": 0},
        {"logprobs": 21},
        {"suffix": "x"},
        {"messages": [{"role": "user", "content": "x"}]},
        {"best_of": 129},
        {"prompt": ["x"] * 200},
        {"n": 8, "prompt": ["x"] * 17},
        {"echo": "yes"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ):
        await refused(shared_gateway, base | fields, path)
    status, _ = await post(shared_gateway, base | {"best_of": 1}, path)
    assert status == 200


async def test_bodies_that_are_no_object_are_refused(shared_gateway: RunningGateway) -> None:
    for body in (b"", b"[]", b'"x"', b"1", b"null", b"{", b"{}x", b'{"model": }', b"{'a': 1}"):
        error = await refused(shared_gateway, body)
        assert error["code"] in {"invalid_json", "missing_required_parameter"}
    error = await refused(shared_gateway, {"messages": []})
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "function_call", {"name": "f"}),
        ("/v1/completions", "functions", [{"name": "f"}]),
        ("/v1/completions", "function_call", {"name": "f"}),
        ("/v1/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
        ("/v1/completions", "tool_choice", "required"),
    ],
)
async def test_o10_tools_are_refused_with_the_name_of_what_is_offered(
    shared_gateway: RunningGateway, path: str, field: str, value: Any
) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    async with (
        shared_gateway.session() as session,
        session.post(path, json={"model": MODEL, "max_tokens": 1, **asked, field: value}) as answer,
    ):
        error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["code"]) == (400, field, "unsupported_parameter")
    hint = "Use 'tools'" if field == "functions" else "Use 'tool_choice'" if "chat" in path else "Use"
    if "chat" not in path and field in ("tools", "tool_choice"):
        hint = "Use /v1/chat/completions instead."
    assert error["message"].startswith(f"The parameter '{field}' is not supported. {hint}")


LARGEST: dict[str, tuple[str, dict[str, Any]]] = {
    "members": (CHAT, chat(x={f"k{i}": 1 for i in range(95_000)})),
    "ids": ("/v1/completions", {"model": MODEL, "prompt": [255] * 390_000}),
    "messages": (CHAT, chat(messages=[{"role": "user", "content": "x"}] * 10_000)),
    "ids to text": ("/detokenize", {"model": MODEL, "tokens": [65] * 390_000}),
    "text to ids": ("/tokenize", {"model": MODEL, "prompt": "a" * 390_000}),
}


@pytest.mark.parametrize("shape", LARGEST)
async def test_s2_the_largest_bodies_allowed_keep_nobody_waiting(long_gateway: RunningGateway, shape: str) -> None:
    """The loop's lag beside what the same request takes: on the code before, most of it stood still."""
    path, fields = LARGEST[shape]
    body = json.dumps(fields).encode()
    assert await _part_that_stood_still(long_gateway, path, body) < 0.5


async def _part_that_stood_still(gateway: RunningGateway, path: str, body: bytes) -> float:
    """Of the request's time the longest for which the loop did not run; the best of some."""
    parts: list[float] = []
    for _ in range(5):
        done, gaps = asyncio.Event(), [0.0]

        async def measure(done: asyncio.Event = done, gaps: list[float] = gaps) -> None:
            while not done.is_set():
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                gaps.append(time.perf_counter() - before)

        watch = asyncio.create_task(measure())
        started = time.perf_counter()
        status = await asyncio.to_thread(_post_from_a_thread, gateway, body, path)
        took = time.perf_counter() - started
        done.set()
        await watch
        assert status in {200, 400, 503}
        parts.append(max(gaps) / took)
        if parts[-1] < 0.5:
            break
    return min(parts)
