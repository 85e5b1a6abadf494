"""`/v1/responses` through the unmodified `openai` client, on a running gateway with the real protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from byte_model import TEMPLATE, chat_text
from fakes import VOCAB_SIZE, ScriptedRunner, ScriptedWorker, decode, expected_output
from gateways import MODEL, RunningGateway, running_gateway, until
from inline_grammars import InlineGrammars
from pydantic import BaseModel
from redis_db import emptied
from served import served

from gateway.base.app_keys import DETACHED, LIFECYCLE
from gateway.idempotency import idempotency
from gateway.intake.intake import INTAKE
from gateway.responses import past, store
from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")
RUNNER = ScriptedRunner()
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """With a worker that takes grammars and says what a test wants."""
    directory = tmp_path_factory.mktemp("gateway")
    redis_url = emptied(redis_socket, 3)
    grammars = InlineGrammars([bytes([i]) for i in range(256)] + [b""] * (VOCAB_SIZE - 256))
    worker = ScriptedWorker(
        directory / "w0.sock", redis_url=redis_url, runner=RUNNER, grammars=grammars, journal_dir=directory / "w0"
    )
    async with running_gateway(directory / "home", redis_url) as gateway, worker:
        await gateway.workers(1)
        yield gateway


@pytest.fixture
def says() -> Iterator[Callable[..., None]]:
    """Makes the model say these texts, one in each turn of the assistant."""

    def tell(*answers: str) -> None:
        RUNNER.says = lambda prompt: answers[min(prompt.count("assistant: "), len(answers) - 1)]

    yield tell
    RUNNER.says = lambda prompt: None


def greedy(messages: list[Any], max_tokens: int) -> str:
    """The text that the scripted worker writes to these messages of chat."""
    turns = chat_text(messages).removeprefix("<|bos|>").split("<|eos|>")
    prompt = [256]
    for turn in turns[:-1]:
        prompt += [*turn.encode(), 257]
    prompt += turns[-1].encode()
    return decode(expected_output(prompt, SamplingParams(seed=0, temperature=0.0), max_tokens))


async def test_codexs_first_turn_reaches_a_template_that_takes_one_system_message(
    redis_socket: Path, tmp_path: Path
) -> None:
    prompts: list[str] = []

    def says(prompt: str) -> str:
        prompts.append(prompt)
        return "ok"

    runner = ScriptedRunner()
    runner.says = says
    first = "{{ raise_exception('System message must be at the beginning.') }}"
    rule = f"{{% if message.role == 'system' and not loop.first %}}{first}{{% endif %}}"
    template = TEMPLATE.replace("{{ message.role }}", rule + "{{ message.role }}")
    items: list[Any] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (("developer", "<permissions>"), ("user", "# AGENTS.md"), ("user", "Fix it."))
    ]
    async with served(tmp_path, redis_socket, runner, template=template) as gateway, gateway.client() as client:
        answer = await client.responses.create(model=MODEL, instructions="You are Codex.", input=items, store=False)
    assert answer.output_text == "ok"
    assert "system: You are Codex.\n\n<permissions>\nuser: # AGENTS.md\nuser: Fix it.\n" in prompts[0]


async def test_a_body_is_a_response(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        answer = await client.responses.create(
            model=MODEL, input="hello", instructions="be brief", max_output_tokens=20, temperature=0, store=False
        )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert answer.output_text == greedy(messages, 20)
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", MODEL)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.temperature, answer.instructions) == (20, 0.0, "be brief")
    await shared_gateway.settled()
    rows = await shared_gateway.sql(
        "SELECT output, cache_read + cache_write + uncached AS input FROM ledger_entry WHERE request_id = :r",
        r=answer.model_extra["headgate"]["request_id"],
    )
    assert [(row.output, row.input) for row in rows] == [(20, answer.usage.input_tokens)]


async def test_a_stream_accumulates_to_what_a_body_says(shared_gateway: RunningGateway) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0}
    more = {"store": False, "stop": greedy([{"role": "user", "content": "hello"}], 20)[9:12]}
    async with shared_gateway.client() as client:
        whole = await client.responses.create(**asked, extra_body=more)
        async with client.responses.stream(**asked, extra_body=more) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    assert whole.status == final.status == "completed"
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


async def test_raw_events_have_names_and_end_with_done(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 2, "stream": True, "store": False}
    async with shared_gateway.session() as session, session.post("/v1/responses", json=body) as answer:
        raw = (await answer.read()).decode()
    *events, done = raw.strip().split("\n\n")
    assert done == "data: [DONE]"
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


async def test_logprobs_stand_at_the_text(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        answer = await client.responses.create(
            model=MODEL,
            input="hello",
            max_output_tokens=5,
            temperature=0,
            store=False,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
        )
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode(errors="replace") == part.text


async def test_faults_have_the_callers_names(shared_gateway: RunningGateway) -> None:
    faults: list[tuple[dict[str, Any], str, str]] = [
        ({"input": "hi", "temperature": 3}, "temperature", "invalid_value"),
        ({"input": "hi" * 5000}, "input", "context_length_exceeded"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"input": "hi", "text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
        (
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}},
            "text.format.name",
            "invalid_value",
        ),
        (
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"items": {"not": {}}}}}},
            "text.format.schema/items/not",
            "unsupported_schema",
        ),
        (
            {"input": [{"role": "user", "content": "x", "type": "message"}, {"type": "x"}]},
            "input[1].type",
            "unsupported_parameter",
        ),
    ]
    async with shared_gateway.client() as client:
        for body, param, code in faults:
            with pytest.raises(openai.BadRequestError) as found:
                await client.responses.create(model=MODEL, store=False, **body)
            assert (found.value.param, found.value.code) == (param, code)


async def test_an_idempotency_key_replays_the_answer(shared_gateway: RunningGateway) -> None:
    headers = {"Idempotency-Key": "responses-1"}
    async with shared_gateway.client() as client:
        asked: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 4, "store": False}
        first = await client.responses.create(**asked, extra_headers=headers)
        again = await client.responses.create(**asked, extra_headers=headers)
    assert first.to_dict() == again.to_dict()


async def test_unknown_fields_are_named(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "input": "hi", "max_output_tokens": 1, "store": False, "colour": "red"}
    async with shared_gateway.session() as session, session.post("/v1/responses", json=body) as answer:
        assert answer.status == 200
        assert answer.headers["x-headgate-ignored"] == "colour"


async def test_a_stored_response_is_what_was_answered(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=5, metadata={"a": "b"})
        found = await client.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict()
        items = await client.responses.input_items.list(made.id)
        assert [item.to_dict()["content"] for item in items.data] == [[{"type": "input_text", "text": "hello"}]]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(made.id)


async def test_what_was_streamed_is_stored(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        async with client.responses.stream(
            model=MODEL,
            input="hello",
            temperature=0,
            extra_body={"stop": greedy([{"role": "user", "content": "hello"}], 9)[5:8]},
        ) as stream:
            final = await stream.get_final_response()
        found = await client.responses.retrieve(final.id)
    assert found.output_text == final.output_text
    assert found.usage == final.usage


async def test_a_conversation_goes_on_by_id_and_finds_its_prefix_cached(shared_gateway: RunningGateway) -> None:
    messages: list[Any] = []
    previous: str | None = None
    async with shared_gateway.client() as client:
        for text in ("x" * 60, "and then?", "and then?"):
            messages.append({"role": "user", "content": text})
            asked: dict[str, Any] = {"input": text, "max_output_tokens": 24, "temperature": 0}
            made = await client.responses.create(model=MODEL, previous_response_id=previous, **asked)
            assert made.output_text == greedy(messages, 24)
            messages.append({"role": "assistant", "content": made.output_text})
            previous = made.id
        assert made.usage is not None
        assert made.usage.input_tokens_details.cached_tokens > 60
        items = [item.to_dict() async for item in client.responses.input_items.list(made.id, order="asc", limit=2)]
        texts = [item["content"][0]["text"] for item in items]
        assert texts == [message["content"] for message in messages[:-1]]


async def test_an_item_may_be_named_by_its_id(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=6, temperature=0)
        again = await client.responses.create(
            model=MODEL,
            max_output_tokens=6,
            temperature=0,
            input=[
                {"role": "user", "content": "hello"},
                {"type": "item_reference", "id": made.output[0].id},
                {"role": "user", "content": "more"},
            ],
        )
        with pytest.raises(openai.BadRequestError) as found:
            await client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_" + "0" * 52}])
    turns = [("user", "hello"), ("assistant", made.output_text), ("user", "more")]
    assert again.output_text == greedy([{"role": role, "content": text} for role, text in turns], 6)
    assert found.value.param == "input[0].id"


@pytest.mark.parametrize("odd", [{"a": 1}, ["b"], 7, None])
async def test_an_item_that_was_stored_with_an_odd_id_is_read(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, odd: Any
) -> None:
    """Ids were once stored as they came, and whatever read such an item was a 500 until it expired."""
    asked = past.asked_of

    def as_it_came(response_id: str, value: Any, items: Any) -> past.Asked:
        made = asked(response_id, value, items)
        return past.Asked(made.body, [item | {"id": odd} for item in made.items])

    async with shared_gateway.client() as client:
        monkeypatch.setattr(past, "asked_of", as_it_came)
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
        monkeypatch.undo()
        (item,) = (await client.responses.input_items.list(made.id)).data
        again: Any = {"model": MODEL, "max_output_tokens": 2}
        await client.responses.create(**again, input="more", previous_response_id=made.id)
        for name in (item.id, made.output[0].id):
            one: Any = {"type": "item_reference", "id": name}
            assert (await client.responses.create(**again, input=[one])).status == "incomplete"


async def test_items_named_by_id_have_at_most_a_bodys_bytes(tmp_path: Path, redis_url: str) -> None:
    """A thousand small requests stored what one request then read at once: gigabytes."""
    async with (
        running_gateway(tmp_path / "home", redis_url, json_body_bytes=65_536) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
        gateway.client() as client,
    ):
        await gateway.workers(1)
        named = []
        for _ in range(12):
            item = {"type": "message", "role": "user", "content": "hello", "junk": "A" * 45_000}
            made = await client.responses.create(model=MODEL, input=[item], max_output_tokens=1)
            named.append((await client.responses.input_items.list(made.id)).data[0].id)
        one = {"type": "item_reference", "id": named[0]}
        assert (await client.responses.create(model=MODEL, input=[one], max_output_tokens=1)).output_text
        for asked in ([one, one], [{"type": "item_reference", "id": name} for name in named]):
            with pytest.raises(openai.BadRequestError, match="named by id have more than") as found:
                await client.responses.create(model=MODEL, input=asked, max_output_tokens=1)
            assert found.value.code == "context_length_exceeded"


async def test_an_item_of_a_long_response_is_as_long_as_it_is(tmp_path: Path, redis_url: str) -> None:
    """A conversation counted the whole responses of the items that were named, and was refused as too long."""
    async with (
        running_gateway(tmp_path / "home", redis_url, json_body_bytes=65_536) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
        gateway.client() as client,
    ):
        await gateway.workers(1)
        long, short = (
            {"type": "message", "role": "user", "content": "hello", "junk": "A" * num} for num in (60_000, 5_000)
        )
        made = await client.responses.create(model=MODEL, input=[long], max_output_tokens=1)
        before = await client.responses.create(model=MODEL, input=[short], max_output_tokens=1)
        asked: Any = {"model": MODEL, "previous_response_id": before.id, "max_output_tokens": 1}
        small: Any = {"type": "item_reference", "id": made.output[0].id}
        assert (await client.responses.create(**asked, input=[small])).output_text
        named: Any = (await client.responses.input_items.list(made.id)).data[0].id
        with pytest.raises(openai.BadRequestError, match="A conversation has at most"):
            await client.responses.create(**asked, input=[{"type": "item_reference", "id": named}])


async def test_a_conversation_counts_as_held_before_it_is_read(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []
    chain = store.chain

    async def counted(request: Any, response_id: str) -> Any:
        held.append(request.app[INTAKE].num_held)
        return await chain(request, response_id)

    async with shared_gateway.client() as client:
        made = await client.responses.create(model=MODEL, input="x" * 900, max_output_tokens=1)
        monkeypatch.setattr(store, "chain", counted)
        await client.responses.create(model=MODEL, input="and?", previous_response_id=made.id, max_output_tokens=1)
    assert held[0] > 900
    await until(lambda: shared_gateway.app[INTAKE].num_held == 0)


async def test_a_keyed_request_gives_its_bytes_back_although_its_client_has_left(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it took after its client had left stayed taken for ever, until its tenant might send nothing more."""
    claim, may_go_on, waits = idempotency._claim, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Any:
        waits.set()
        await may_go_on.wait()
        return await claim(*args)

    intake = shared_gateway.app[INTAKE]
    async with shared_gateway.client() as client, shared_gateway.session() as session:
        made = await client.responses.create(model=MODEL, input="x" * 900, max_output_tokens=1)
        await until(lambda: intake.num_held == 0)
        monkeypatch.setattr(idempotency, "_claim", slow)
        body = {"model": MODEL, "input": [{"type": "item_reference", "id": made.output[0].id}], "max_output_tokens": 1}
        running = shared_gateway.app[LIFECYCLE]
        num_running = running.num_running
        asked = asyncio.create_task(session.post("/v1/responses", json=body, headers={"idempotency-key": "leaves"}))
        await waits.wait()
        asked.cancel()
        await asyncio.wait([asked])
        await until(lambda: running.num_running == num_running + 1)  # the handler has ended, its work has not
        may_go_on.set()
        await shared_gateway.app[DETACHED].join(20)
    assert intake.num_held == 0


async def test_what_cannot_be_gone_on_from_is_refused(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        first = await client.responses.create(model=MODEL, input="a", max_output_tokens=1)
        second = await client.responses.create(
            model=MODEL, input="b", max_output_tokens=1, previous_response_id=first.id
        )
        await client.responses.delete(first.id)
        for name in (first.id, second.id, "resp_none", "\0"):
            with pytest.raises(openai.BadRequestError) as found:
                await client.responses.create(model=MODEL, input="c", previous_response_id=name)
            assert found.value.code == "previous_response_not_found"


async def test_another_tenants_response_is_one_that_never_was(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1)
    _, key = await shared_gateway.new_tenant("other", ("chat",))
    async with shared_gateway.session(key) as session:
        for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("GET", "?stream=true")):
            answers = []
            for name in (made.id, "resp_" + "0" * 48, "resp_%00"):
                async with session.request(method, f"/v1/responses/{name}{tail}") as answer:
                    answers.append((answer.status, await answer.read()))
            assert [status for status, _ in answers] == [404] * 3
            assert answers[0] == answers[1]  # a name with a null character is refused before anything is looked up
        body = {"model": MODEL, "input": "x", "previous_response_id": made.id}
        async with session.post("/v1/responses", json=body) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "previous_response_not_found")


async def test_nothing_is_stored_for_a_tenant_without_storage(shared_gateway: RunningGateway) -> None:
    tenant_id, key = await shared_gateway.new_tenant("stateless", ("chat",))
    async with shared_gateway.session(shared_gateway.keys.admin_key) as session:
        change = {"stores_responses": False}
        async with session.patch(f"/admin/v1/tenants/{tenant_id}", json=change) as answer:
            assert (await answer.json())["stores_responses"] is False
    async with shared_gateway.client(key) as client:
        made = await client.responses.create(model=MODEL, input="hello", max_output_tokens=1)
        assert made.model_extra["store"] is False
        for name in ("store", "background"):
            with pytest.raises(openai.BadRequestError) as found:
                await client.responses.create(model=MODEL, input="hello", extra_body={name: True})
            assert found.value.param == name
    assert await shared_gateway.sql("SELECT id FROM response WHERE tenant_id = :t", t=tenant_id) == []


async def test_reasoning_that_a_client_keeps_is_read_for_its_tenant_alone(shared_gateway: RunningGateway) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "AAAA"}
    async with shared_gateway.client() as client:
        with pytest.raises(openai.BadRequestError) as found:
            await client.responses.create(model=MODEL, input=[item, {"role": "user", "content": "x"}])  # type: ignore[list-item]
    assert found.value.param == "input[0].encrypted_content"


async def test_stored_texts_are_encrypted(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        await client.responses.create(model=MODEL, input="a secret of mine", max_output_tokens=1)
    rows = await shared_gateway.sql("SELECT request, body FROM response")
    assert all(b"secret" not in bytes(row.request) + bytes(row.body) for row in rows)


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


async def test_a_loop_with_tools_by_stream_and_previous_id(shared_gateway: RunningGateway, says: Any) -> None:
    says(f"I look.\n{call('Paris')}\n{call('Rome')}", "Sun in both.")
    async with shared_gateway.client() as client:
        async with client.responses.stream(model=MODEL, input="Weather?", tools=[TOOL]) as stream:
            events = [event async for event in stream]
            first = await stream.get_final_response()
        message, *calls = first.output
        assert message.type == "message"
        assert [json.loads(one.arguments) for one in calls if one.type == "function_call"] == [
            {"city": "Paris"},
            {"city": "Rome"},
        ]
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(deltas) > 4
        answers: Any = [
            {"type": "function_call_output", "call_id": one.call_id, "output": "sun"}
            for one in calls
            if one.type == "function_call"
        ]
        second = await client.responses.create(model=MODEL, input=answers, tools=[TOOL], previous_response_id=first.id)
        # A client without storage sends the whole conversation, and the prompt is the same.
        own: Any = [{"role": "user", "content": "Weather?"}, *[one.to_dict() for one in first.output], *answers]
        third = await client.responses.create(model=MODEL, input=own, tools=[TOOL], store=False)
        count = await client.responses.input_tokens.count(model=MODEL, input=own, tools=[TOOL])
    assert second.output_text == third.output_text == "Sun in both."
    assert second.usage is not None
    assert third.usage is not None
    assert second.usage.input_tokens == third.usage.input_tokens == count.input_tokens
    await shared_gateway.balanced()


async def test_a_forced_call_has_arguments_of_the_schema(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        made = await client.responses.create(
            model=MODEL, input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, temperature=0
        )
    (item,) = [one for one in made.output if one.type == "function_call"]
    assert item.name == "weather"
    if made.status == "completed":
        assert set(json.loads(item.arguments)) == {"city"}
    assert made.tool_choice.to_dict() == {"type": "function", "name": "weather"}  # type: ignore[union-attr]


class Answer(BaseModel):
    is_true: bool


async def test_parse_gives_an_object_of_the_clients_own_class(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        made = await client.responses.parse(model=MODEL, input="Is it?", text_format=Answer, temperature=0)
    assert isinstance(made.output_parsed, Answer)


async def test_a_conversation_is_compacted_and_goes_on(shared_gateway: RunningGateway, says: Any) -> None:
    said: list[str] = []

    def answer(prompt: str) -> str:
        said.append(prompt)
        return "They talked about Paris." if "Summarise" in prompt else "Yes."

    RUNNER.says = answer
    turns: Any = [
        {"role": "user", "content": "Is Paris big?"},
        {"role": "assistant", "content": "Yes, it is."},
        {"role": "user", "content": "And old?"},
    ]
    async with shared_gateway.client() as client:
        compacted = await client.responses.compact(model=MODEL, input=turns)
        *kept, item = compacted.output
        assert compacted.object == "response.compaction"
        assert [one.to_dict(warnings=False)["content"][0]["text"] for one in kept] == ["Is Paris big?", "And old?"]
        assert item.type == "compaction"
        assert "Paris" not in item.encrypted_content
        on: Any = [*[one.to_dict(warnings=False) for one in compacted.output], {"role": "user", "content": "So?"}]
        await client.responses.create(model=MODEL, input=on, store=False)
        assert compacted.usage.output_tokens > 5
        with pytest.raises(openai.BadRequestError) as found:
            await client.responses.compact(model=MODEL)
        with pytest.raises(openai.BadRequestError, match="prewarm"):
            await client.responses.compact(
                model=MODEL, input=turns, extra_body={"prompt_cache_options": {"prewarm": True}}
            )
        assert found.value.param == "input"
    RUNNER.says = lambda prompt: None
    assert "Is Paris big?\n\nAnd old?" in said[-1]
    assert "They talked about Paris." in said[-1]
    await shared_gateway.balanced()


@pytest.mark.parametrize("said", ["", " \n\n"])
async def test_without_a_summary_nothing_is_compacted_and_nothing_charged(
    shared_gateway: RunningGateway, says: Any, said: str
) -> None:
    """It was a success with an empty summary: whoever went on from it had lost the conversation."""
    says(said)
    async with shared_gateway.client() as client:
        with pytest.raises(openai.UnprocessableEntityError) as found:
            await client.responses.compact(model=MODEL, input="Is Paris big?")
    assert found.value.code == "no_summary"
    await shared_gateway.settled()
    entries = "SELECT kind, charge FROM ledger_entry WHERE request_id = :r"
    request_id = found.value.response.headers["x-request-id"]
    for _ in range(500):  # the write-off comes with the worker's own record
        if len(rows := await shared_gateway.sql(entries, r=request_id)) == 2:
            break
        await asyncio.sleep(0.03)
    assert {(row.kind, row.charge) for row in rows} == {("void", 0), ("internal", 0)}, "what it cost is the platform's"
    await shared_gateway.balanced()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "name": "f", "schema": TOOL["parameters"]}}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
)
async def test_a_summary_is_a_text_whatever_the_conversations_answers_have_to_be(
    shared_gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    said: list[str] = []

    def answer(prompt: str) -> str:
        said.append(prompt)
        return "They talked about Paris."

    RUNNER.says = answer
    async with shared_gateway.client() as client:
        compacted = await client.responses.compact(model=MODEL, input="Is Paris big?", extra_body=fields)
        assert ("weather" in said[-1]) == ("tools" in fields), "the prompt begins as the conversation's own"
        on: Any = [one.to_dict(warnings=False) for one in compacted.output]
        await client.responses.create(model=MODEL, input=on, store=False)
    RUNNER.says = lambda prompt: None
    assert "They talked about Paris." in said[-1]


async def test_a_quote_binds_a_response(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4, "store": False}
    async with shared_gateway.session() as session:
        asked = {"endpoint": "/v1/responses", "body": body}
        async with session.post("/v1/quotes", json=asked) as answer:
            quote = await answer.json()
            assert answer.status == 200, quote
        headers = {"x-headgate-quote": quote["id"]}
        async with session.post("/v1/responses", json=body, headers=headers) as answer:
            made = await answer.json()
        async with session.post("/v1/responses", json=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "quote_invalid")
    assert made["usage"]["input_tokens"] == quote["num_prompt_tokens"]
    assert made["headgate"]["charge_micro_units"] <= quote["max_charge_micro_units"]
