"""What answers say beyond text where it is asked for: ids of tokens, logprobs of prompts and of given tokens, running
usage, the echo of chat; through the official client and in the shape of lm-eval's requests.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import EOS, decode, expected_output, logprob_of
from gateways import MODEL, RunningGateway

from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
GREEDY = SamplingParams(seed=0, temperature=0.0)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def post(gateway: RunningGateway, path: str, **fields: Any) -> dict[str, Any]:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "ab"}
    async with gateway.session() as session:
        body = {"model": MODEL, "max_tokens": 6, "temperature": 0} | base | fields
        async with session.post(path, json=body) as answer:
            reply: dict[str, Any] = await answer.json()
            assert answer.status == fields.get("status", 200), reply
    return reply


async def events(gateway: RunningGateway, path: str, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    base = {"messages": MESSAGES} if path == CHAT else {"prompt": "ab"}
    async with gateway.session() as session:
        body = {"model": MODEL, "max_tokens": 6, "temperature": 0, "stream": True} | base | fields
        async with session.post(path, json=body) as answer:
            assert answer.status == 200
            for line in (await answer.text()).split("\n\n"):
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1, "seed": 4}, {"stop": ["e", "a"], "max_tokens": 60}])
async def test_token_ids_are_those_that_are_charged(
    shared_gateway: RunningGateway, path: str, fields: dict[str, Any]
) -> None:
    tokenized = {"messages": MESSAGES} if path == CHAT else {"prompt": "ab"}
    async with (
        shared_gateway.session() as session,
        session.post("/tokenize", json={"model": MODEL} | tokenized) as answer,
    ):
        prompt = (await answer.json())["tokens"]
    reply = await post(shared_gateway, path, return_token_ids=True, **fields)
    whole = [choice["token_ids"] for choice in reply["choices"]]
    assert sum(map(len, whole)) == reply["usage"]["completion_tokens"]
    for choice, ids in zip(reply["choices"], whole, strict=True):
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert decode([one for one in ids if one < 256]).startswith(text)
        assert path == CHAT or choice["prompt_token_ids"] == prompt
    assert path == COMPLETIONS or reply["prompt_token_ids"] == prompt

    found: dict[int, list[int]] = {}
    prompts = []
    async for event in events(shared_gateway, path, return_token_ids=True, **fields):
        holders = (event, *event["choices"])
        prompts += [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder]
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [found[index] for index in sorted(found)] == whole
    assert prompts == [prompt] * (1 if path == CHAT else len(whole))


async def test_without_being_asked_no_ids_are_there(shared_gateway: RunningGateway) -> None:
    for path in (CHAT, COMPLETIONS):
        assert "token_ids" not in json.dumps(await post(shared_gateway, path))


async def test_logprobs_name_tokens_by_their_ids(shared_gateway: RunningGateway) -> None:
    ids = (await post(shared_gateway, COMPLETIONS, return_token_ids=True))["choices"][0]["token_ids"]
    reply = await post(shared_gateway, COMPLETIONS, logprobs=1, return_tokens_as_token_ids=True)
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{one}" for one in ids]
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    reply = await post(shared_gateway, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    for entry in reply["choices"][0]["logprobs"]["content"]:
        assert entry["token"] == f"token_id:{entry['bytes'][0]}"
        assert entry["top_logprobs"][0]["token"].startswith("token_id:")


async def test_given_tokens_are_scored_in_place_of_the_best(shared_gateway: RunningGateway) -> None:
    wanted = [65, 66, 90]
    reply = await post(shared_gateway, CHAT, logprobs=True, top_logprobs=2, logprob_token_ids=wanted)
    for entry in reply["choices"][0]["logprobs"]["content"]:
        assert [one["token"] for one in entry["top_logprobs"]] == ["A", "B", "Z"]
        assert [one["logprob"] for one in entry["top_logprobs"]] == [logprob_of(one, 0).logprob for one in wanted]
    reply = await post(shared_gateway, COMPLETIONS, logprobs=0, logprob_token_ids=wanted)
    logprobs = reply["choices"][0]["logprobs"]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert set(top) == {"A", "B", "Z", token}
    for fields, param in (
        ({"logprob_token_ids": [65]}, "logprob_token_ids"),
        ({"logprob_token_ids": [259], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [1] * 129, "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [65], "logprobs": 1, "use_beam_search": True, "n": 2}, "logprob_token_ids"),
    ):
        error = await post(shared_gateway, COMPLETIONS, **fields, status=400)
        assert error["error"]["param"] == param


async def test_the_drawn_token_is_among_its_alternatives(shared_gateway: RunningGateway) -> None:
    """The scripted worker's best tokens are never the drawn one from the second on."""
    for num, biased in ((0, {}), (2, {}), (1, {"logit_bias": {"104": 100}})):
        reply = await post(shared_gateway, COMPLETIONS, logprobs=num, echo=True, **biased)
        logprobs = reply["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"][0] is None
        pairs = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]
        assert pairs
        for token, logprob, top in pairs:
            assert top[token] == logprob
            assert num <= len(top) <= num + 1


@pytest.mark.parametrize("prompt", ["abc", "a prompt " * 80])
async def test_prompts_are_scored_on_request(shared_gateway: RunningGateway, prompt: str) -> None:
    reply = await post(shared_gateway, COMPLETIONS, prompt=[prompt, "xy"], prompt_logprobs=2)
    for choice, text in zip(reply["choices"], (prompt, "xy"), strict=True):
        scores = choice["prompt_logprobs"]
        assert scores[0] is None
        assert len(scores) == len(text)
        for char, found in zip(text[1:], scores[1:], strict=True):
            own = found[str(ord(char))]
            assert own == {"logprob": logprob_of(ord(char), 0).logprob, "rank": 1, "decoded_token": char}
            assert len(found) == 2
    both = await post(shared_gateway, COMPLETIONS, prompt=prompt, prompt_logprobs=2, echo=True, logprobs=0)
    (choice,) = both["choices"]
    assert choice["prompt_logprobs"] == reply["choices"][0]["prompt_logprobs"]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1 : len(prompt)])
    chat = await post(shared_gateway, CHAT, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in chat["choices"][0]
    error = await post(shared_gateway, CHAT, prompt_logprobs=0, stream=True, status=400)
    assert error["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_each_event_has_the_usage_so_far(shared_gateway: RunningGateway, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = [event async for event in events(shared_gateway, path, stream_options=options, max_tokens=40)]
    usages = [event["usage"] for event in found]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 40
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert found[-1]["choices"] == []
    error = await post(shared_gateway, path, stream=True, stream_options={"continuous_usage_stats": True}, status=400)
    assert error["error"]["param"] == "stream_options.continuous_usage_stats"


async def test_chat_echoes_a_last_message_of_the_assistant(shared_gateway: RunningGateway) -> None:
    open_ended = [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "it is "}]}]
    fields = {"messages": open_ended, "continue_final_message": True}
    plain = (await post(shared_gateway, CHAT, **fields))["choices"][0]["message"]["content"]
    echoed = (await post(shared_gateway, CHAT, echo=True, **fields))["choices"][0]["message"]["content"]
    assert echoed == "it is " + plain
    texts = [
        event["choices"][0]["delta"].get("content") or ""
        async for event in events(shared_gateway, CHAT, echo=True, **fields)
    ]
    assert "".join(texts) == echoed
    unchanged = (await post(shared_gateway, CHAT, echo=True))["choices"][0]["message"]["content"]
    assert unchanged == (await post(shared_gateway, CHAT))["choices"][0]["message"]["content"]


async def test_what_is_switched_off_changes_nothing(shared_gateway: RunningGateway) -> None:
    off = {
        "suffix": "",
        "logit_bias": {},
        "stop": [],
        "bad_words": [],
        "allowed_token_ids": [],
        "cache_salt": "",
        "min_tokens": 0,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "stream_options": {"include_usage": False},
        "response_format": {"type": "text"},
        "structured_outputs": {},
        "guided_json": None,
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "samplers": [],
        "n_probs": 0,
        "echo": False,
        "audio": {},
        "prompt_logprobs": None,
        "truncate_prompt_tokens": None,
        "thinking_token_budget": -1,
        "kv_transfer_params": {},
    }
    for path in (CHAT, COMPLETIONS):
        plain = await post(shared_gateway, path)
        assert (await post(shared_gateway, path, **off))["choices"] == plain["choices"]


async def test_the_official_client_sees_the_additions(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        reply = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=4,
            logprobs=True,
            top_logprobs=0,
            extra_body={"return_token_ids": True, "prompt_logprobs": 0, "add_generation_prompt": True},
        )
        assert reply.choices[0].model_extra is not None and reply.model_extra is not None
        assert len(reply.choices[0].model_extra["token_ids"]) == 4
        assert len(reply.model_extra["prompt_logprobs"]) == len(reply.model_extra["prompt_token_ids"])
        raw = await client.completions.with_raw_response.create(model=MODEL, prompt="x", extra_body={"zebra": 1})
        assert raw.headers["x-headgate-ignored"] == "zebra"


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_the_request_shape_of_lm_evals_loglikelihoods(shared_gateway: RunningGateway, max_tokens: int) -> None:
    """lm-eval sends ids of context and continuation, and reads the continuation's logprobs and whether it is greedy:
    whether the token is the best of its alternatives.
    """
    context, continuation = list(b"The sky is"), list(b" blue")
    prompt = [context + continuation, context[:4] + continuation]
    reply = await post(
        shared_gateway,
        COMPLETIONS,
        prompt=prompt,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, (len(context), 4), strict=True):
        logprobs = choice["logprobs"]
        end = -1 if max_tokens else None
        scores = logprobs["token_logprobs"][length:end]
        assert scores == [logprob_of(token, 0).logprob for token in continuation]
        tops = logprobs["top_logprobs"][length:end]
        tokens = logprobs["tokens"][length:end]
        assert "".join(tokens) == " blue"
        assert all(token == max(top, key=top.__getitem__) for token, top in zip(tokens, tops, strict=True))
    assert reply["usage"]["completion_tokens"] == 2 * max_tokens


@pytest.mark.parametrize("streamed", [False, True])
async def test_lm_evals_continuation_is_whole_where_the_model_would_end(
    shared_gateway: RunningGateway, streamed: bool
) -> None:
    """lm-eval leaves out the last entry, which is the one token that it has generated. An end token had none, so that the
    last token of the continuation was left out.
    """
    fields: dict[str, Any] = {"prompt": [list(b"The sky is blue")], "max_tokens": 1, "logprobs": 1, "echo": True}
    fields |= {"allowed_token_ids": [EOS], "return_token_ids": True}
    if streamed:
        chunks = [event["choices"][0] async for event in events(shared_gateway, COMPLETIONS, **fields)]
    else:
        chunks = (await post(shared_gateway, COMPLETIONS, **fields))["choices"]
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks:
        for name, values in found.items():
            values += (chunk["logprobs"] or {}).get(name, [])
    assert "".join(chunk["text"] for chunk in chunks) == "The sky is blue"
    assert found["tokens"] == [*"The sky is blue", "<|eos|>"]
    assert found["text_offset"] == list(range(16))
    scores = found["token_logprobs"][len("The sky is") : -1]
    assert scores == [logprob_of(token, 0).logprob for token in b" blue"]
    assert found["token_logprobs"][-1] == found["top_logprobs"][-1]["<|eos|>"] == logprob_of(EOS, 0).logprob
    assert [one for chunk in chunks for one in chunk["token_ids"]] == [EOS]
    assert chunks[-1]["finish_reason"] == "stop"


async def test_chat_has_no_logprob_of_the_end_token(shared_gateway: RunningGateway) -> None:
    reply = await post(shared_gateway, CHAT, logprobs=True, allowed_token_ids=[EOS])
    assert reply["choices"][0]["logprobs"]["content"] == []


async def test_the_end_token_is_among_the_ids_and_not_in_the_text(shared_gateway: RunningGateway) -> None:
    reply = await post(shared_gateway, CHAT, max_tokens=50, return_token_ids=True, allowed_token_ids=[EOS], status=200)
    assert reply["choices"][0]["token_ids"] == [EOS]
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["usage"]["completion_tokens"] == 1
    expected = expected_output(list(b"ab"), GREEDY, 6)
    assert (await post(shared_gateway, COMPLETIONS, return_token_ids=True))["choices"][0]["token_ids"] == list(expected)
