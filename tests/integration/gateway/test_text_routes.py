"""Parameters of chat and completions that change text: n, stop strings, logprobs, echo, lists of prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from byte_model import chat_text
from fakes import ScriptedRunner, ScriptedWorker, decode, encode, expected_output
from gateways import MODEL, RunningGateway

from accounting.tenants import tenants
from accounting.values.types import Limits
from gateway.base.app_keys import DATABASE
from workers.protocol.messages import SamplingParams

GREEDY = SamplingParams(seed=0, temperature=0.0)
MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]


def chat_prompt(messages: list[Any]) -> list[int]:
    parts = chat_text(messages).removeprefix("<|bos|>").split("<|eos|>")
    ids = [256]
    for i, part in enumerate(parts):
        ids += ([257] if i else []) + list(part.encode())
    return ids


@pytest.mark.asyncio(loop_scope="module")
async def test_n_choices_differ_and_a_seed_repeats_them(shared_gateway: RunningGateway) -> None:
    async def texts() -> list[str | None]:
        async with shared_gateway.client() as client:
            answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, n=3, seed=5)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 36
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = await texts()
    assert len(set(first)) == 3
    assert await texts() == first


@pytest.mark.asyncio(loop_scope="module")
async def test_streamed_choices_open_in_index_order_and_each_ends_once(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=6, n=2, seed=5, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].index for chunk in chunks[:2]] == [0, 1]
    ends = [chunk for chunk in chunks if chunk.choices[0].finish_reason]
    assert sorted(chunk.choices[0].index for chunk in ends) == [0, 1]
    assert all(not chunk.choices[0].delta.content for chunk in ends)


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_have_tokens_bytes_and_alternatives(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    assert all(entry.bytes == list(entry.token.encode()) for entry in logprobs.content)
    assert all(entry.logprob < 0 for entry in logprobs.content)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("prompt", ["a prompt", "a prompt " * 80])  # the logprobs of the long one travel in parts
async def test_completions_echo_scores_the_prompt_aligned_with_its_text(
    shared_gateway: RunningGateway, prompt: str
) -> None:
    async with shared_gateway.client() as client:
        answer = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, temperature=0, echo=True, logprobs=2
        )
    choice = answer.choices[0]
    assert choice.text == prompt + decode(expected_output(list(prompt.encode()), GREEDY, 4))
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == list(range(len(choice.text)))
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value is not None for value in logprobs.token_logprobs[1:])
    assert len({len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.top_logprobs or [])}) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_streamed_prompts_are_echoed_with_their_logprobs_as_each_of_them_begins(
    shared_gateway: RunningGateway,
) -> None:
    """The long one is still in prefill when the short one has its first token."""
    prompts, fields = ["a prompt", "a prompt " * 200], {"max_tokens": 40, "temperature": 0, "echo": True, "logprobs": 1}
    async with shared_gateway.client() as client:
        whole = await client.completions.create(model=MODEL, prompt=prompts, **fields)
        stream = await client.completions.create(model=MODEL, prompt=prompts, stream=True, **fields)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert chunks[0].index == 0
    for index, choice in enumerate(whole.choices):
        parts = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            found = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name) or []]
            assert found == getattr(choice.logprobs, name)


@pytest.mark.asyncio(loop_scope="module")
async def test_echo_without_output_only_scores(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="abc", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "abc"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_streamed_completions_echo_in_front_once(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        stream = await client.completions.create(
            model=MODEL, prompt=["ab", "cd"], max_tokens=3, temperature=0, echo=True, stream=True
        )
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts[0] == "ab" + decode(expected_output(list(b"ab"), GREEDY, 3))
    assert texts[1] == "cd" + decode(expected_output(list(b"cd"), GREEDY, 3))


@pytest.mark.asyncio(loop_scope="module")
async def test_long_output_goes_on_past_its_first_lease(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=500, temperature=0, n=1
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 500
    assert answer.choices[0].message.content == decode(expected_output(chat_prompt(MESSAGES), GREEDY, 500))


@pytest.mark.asyncio(loop_scope="module")
async def test_models_tokenize_and_detokenize(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        models = await client.models.list()
        one = await client.models.retrieve(MODEL)
    assert [model.id for model in models.data] == [MODEL]
    assert one.owned_by == "headgate"
    async with shared_gateway.session() as session:
        async with session.post("/tokenize", json={"model": MODEL, "messages": MESSAGES}) as answer:
            tokenized = await answer.json()
        assert tokenized["tokens"] == chat_prompt(MESSAGES)
        assert tokenized["count"] == len(tokenized["tokens"])
        async with session.post("/detokenize", json={"model": MODEL, "tokens": list("né".encode())}) as answer:
            assert await answer.json() == {"prompt": "né"}
        async with session.post("/tokenize", json={"model": MODEL, "prompt": "<|eos|>"}) as answer:
            assert (await answer.json())["tokens"] == list(b"<|eos|>")
        async with session.get("/v1/models/no/such") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "model_not_found"


@pytest.mark.asyncio(loop_scope="module")
async def test_more_ids_than_the_context_holds_become_no_text(shared_gateway: RunningGateway) -> None:
    """Two megabytes of ids became seven times as much text."""
    async with shared_gateway.session() as session:
        for number, status in ((2048, 200), (2049, 400)):
            async with session.post("/detokenize", json={"model": MODEL, "tokens": [65] * number}) as answer:
                assert answer.status == status
                told = await answer.json()
        assert told["error"]["code"] == "context_length_exceeded"


@pytest.mark.asyncio(loop_scope="module")
async def test_ignored_fields_are_named_in_a_header(shared_gateway: RunningGateway) -> None:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 2,
        "tenant_id": "x",
        "api_base": "http://x",
        "user": "u",
        "store": True,
        "ünï": 1,
    }
    async with shared_gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        assert answer.headers["x-headgate-ignored"] == "tenant_id, api_base"


@pytest.mark.asyncio(loop_scope="module")
async def test_ignored_fields_of_tokenizing_are_named_and_known_ones_refused(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.session() as session:
        body = {"model": MODEL, "prompt": "x", "zebra": 1, "temperature": 0.5}
        async with session.post("/tokenize", json=body) as answer:
            assert answer.status == 200
            assert answer.headers["x-headgate-ignored"] == "zebra"
        async with session.post("/tokenize", json={"model": MODEL, "content": "x"}) as answer:
            assert answer.status == 400
            assert "'prompt'" in (await answer.json())["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_last_message_is_continued(shared_gateway: RunningGateway) -> None:
    open_ended: list[Any] = [*MESSAGES, {"role": "assistant", "content": "it is "}]
    expected = chat_prompt(MESSAGES) + list(b" it is ")
    body = {"model": MODEL, "messages": open_ended, "continue_final_message": True}
    async with shared_gateway.session() as session:
        async with session.post("/tokenize", json=body) as answer:
            assert (await answer.json())["tokens"] == expected
        closed = {"model": MODEL, "messages": open_ended, "add_generation_prompt": False, "return_token_strs": False}
        async with session.post("/tokenize", json=closed) as answer:
            reply = await answer.json()
            assert reply["tokens"][: len(expected)] == expected
            assert reply["tokens"][len(expected) :] == [257, 10]
            assert "token_strs" not in reply
        more = body | {"max_tokens": 6, "temperature": 0}
        async with session.post("/v1/chat/completions", json=more) as answer:
            reply = await answer.json()
        assert reply["choices"][0]["message"]["content"] == decode(expected_output(expected, GREEDY, 6))
        assert reply["usage"]["prompt_tokens"] == len(expected)
        for fields in ({"add_generation_prompt": True}, {"messages": MESSAGES}):
            async with session.post("/v1/chat/completions", json=more | fields) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["param"] == "continue_final_message"


@pytest.mark.asyncio(loop_scope="module")
async def test_an_output_is_shortened_on_request_alone(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "prompt": "x" * 2000, "max_tokens": 500, "ignore_eos": True}
    async with shared_gateway.session() as session:
        async with session.post("/v1/completions", json=body) as answer:
            assert (await answer.json())["error"]["code"] == "context_length_exceeded"
        async with session.post("/v1/completions", json=body | {"truncate": True}) as answer:
            reply = await answer.json()
        assert reply["usage"]["completion_tokens"] == 48
        assert reply["choices"][0]["finish_reason"] == "length"
        body["prompt"] = "x" * 2048
        async with session.post("/v1/completions", json=body | {"truncate": True}) as answer:
            assert (await answer.json())["error"]["code"] == "context_length_exceeded"


@pytest.mark.asyncio(loop_scope="module")
async def test_more_choices_than_half_a_worker_are_refused_by_name(shared_gateway: RunningGateway) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 33}),
        ("/v1/completions", {"prompt": "x", "best_of": 33}),
    ):
        async with shared_gateway.session() as session, session.post(path, json={"model": MODEL} | fields) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error["param"] == ("n" if "chat" in path else "best_of")
        assert "at most 32 choices" in error["message"]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "fields"), [("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [104, 105]})]
)
async def test_a_tenant_tokenizes_as_often_as_it_may_ask(
    shared_gateway: RunningGateway, path: str, fields: dict[str, Any]
) -> None:
    tenant_id, api_key = await shared_gateway.new_tenant("small", {"chat"})
    async with shared_gateway.app[DATABASE].write() as conn:
        await tenants.set_limits(conn, tenant_id, Limits(requests_per_minute=2), now=int(time.time()))
    statuses, left = [], []
    async with shared_gateway.session(api_key) as session:
        for _ in range(3):
            async with session.post(path, json={"model": MODEL} | fields) as answer:
                statuses.append(answer.status)
                left.append(answer.headers.get("x-ratelimit-remaining-requests"))
    assert statuses == [200, 200, 429]
    assert left[:2] == ["1", "0"]


async def test_a_stop_string_across_tokens_cuts_text_and_bill(gateway: RunningGateway) -> None:
    text = decode(expected_output(chat_prompt(MESSAGES), GREEDY, 60))
    stop = text[20:25]
    end = text.index(stop)
    for stream in (False, True):
        async with gateway.session() as session:
            body = {
                "model": MODEL,
                "messages": MESSAGES,
                "max_tokens": 60,
                "temperature": 0,
                "stop": stop,
                "stream": stream,
            }
            if stream:
                body["stream_options"] = {"include_usage": True}
            async with session.post("/v1/chat/completions", json=body) as answer:
                raw = await answer.text()
        if stream:
            events = [json.loads(line[6:]) for line in raw.split("\n\n") if line and "[DONE]" not in line]
            seen = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
            last, usage = events[-2]["choices"][0], events[-1]["usage"]
        else:
            reply = json.loads(raw)
            last, usage = reply["choices"][0], reply["usage"]
            seen = last["message"]["content"]
        assert seen == text[:end]
        assert last["finish_reason"] == "stop"
        assert last["stop_reason"] == stop
        assert usage["completion_tokens"] == end + len(stop)
    await gateway.settled()
    # What the engine computed beyond the stop string is ours to write off.
    settled = await gateway.sql("SELECT output FROM ledger_entry WHERE kind = 'settle'")
    assert [row.output for row in settled] == [end + len(stop)] * 2
    await gateway.balanced()


async def test_prompts_of_all_shapes_number_their_choices(gateway: RunningGateway) -> None:
    async with gateway.client() as client:
        answer = await client.completions.create(
            model=MODEL, prompt=["one", "two two"], n=2, max_tokens=3, seed=1, temperature=0
        )
        ids = await client.completions.create(
            model=MODEL, prompt=[list(encode("x")), list(encode("y"))], max_tokens=3, temperature=0
        )
        plain = await client.completions.create(model=MODEL, prompt=list(b"one"), max_tokens=3, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == decode(expected_output(list(b"one"), GREEDY, 3)) == plain.choices[0].text
    assert answer.choices[2].text == decode(expected_output(list(b"two two"), GREEDY, 3))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 12)
    assert ids.choices[1].text == decode(expected_output(encode("y"), GREEDY, 3))
    await gateway.settled()
    assert len(await gateway.sql("SELECT DISTINCT request_id FROM ledger_entry")) == 2 + 2 + 1


async def test_the_same_prompt_is_cached_for_its_tenant_only(gateway: RunningGateway) -> None:
    messages: list[Any] = [{"role": "system", "content": "s" * 200}, {"role": "user", "content": "hi"}]

    async def cached(key: str | None = None, **more: Any) -> int:
        async with gateway.client(key) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=more)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    _, other = await gateway.new_tenant("other")
    assert await cached() == 0
    assert await cached() >= 192
    assert await cached(other) == 0
    assert await cached(cache_salt="mine") == 0
    assert await cached(cache_salt="mine") >= 192


async def test_a_prompt_is_shortened_on_request_alone(gateway: RunningGateway) -> None:
    async with gateway.session() as session:

        async def tokens(**fields: Any) -> list[int]:
            async with session.post("/tokenize", json={"model": MODEL, "prompt": "abcdef"} | fields) as answer:
                found: list[int] = (await answer.json())["tokens"]
            return found

        assert await tokens(truncate_prompt_tokens=2) == list(b"ef")
        assert await tokens(truncate_prompt_tokens=2, truncation_side="right") == list(b"ab")
        assert await tokens(truncate_prompt_tokens=-1) == list(b"abcdef")
        long = {"model": MODEL, "prompt": "x" * 5000, "max_tokens": 48, "temperature": 0}
        async with session.post("/v1/completions", json=long) as answer:
            assert answer.status == 400
        for keep, expected in ((-1, 2000), (7, 7)):
            async with session.post("/v1/completions", json=long | {"truncate_prompt_tokens": keep}) as answer:
                usage = (await answer.json())["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (expected, 48)
        said = {"model": MODEL, "messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 2}
        async with session.post("/v1/chat/completions", json=said | {"truncate_prompt_tokens": -1}) as answer:
            assert (await answer.json())["usage"]["prompt_tokens"] == 2046
    await gateway.balanced()


async def test_many_choices_have_one_lease_and_one_ledger_entry(
    bare_gateway: RunningGateway, tmp_path: Path, redis_url: str
) -> None:
    runner = ScriptedRunner(num_blocks=4096)
    async with (
        ScriptedWorker(
            tmp_path / "w.sock", redis_url=redis_url, runner=runner, max_running=256, journal_dir=tmp_path / "w"
        ),
        bare_gateway.client() as client,
    ):
        await bare_gateway.workers(1)
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=9, n=128, temperature=1, seed=3
        )
        assert [choice.index for choice in answer.choices] == list(range(128))
        assert len({choice.message.content for choice in answer.choices}) > 100
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 128 * 9
        await bare_gateway.balanced()
    (row,) = await bare_gateway.sql("SELECT output FROM ledger_entry WHERE kind = 'settle'")
    assert row.output == 128 * 9
