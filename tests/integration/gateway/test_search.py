"""`best_of` and beam search: what is shown, in which order, what is charged, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from byte_model import chat_text
from engine_driver import LINK, Driver
from fakes import BOS, EOS, ScriptedRunner, decode, encode, generate_request
from gateways import MODEL, RunningGateway

from workers.protocol.messages import BeamParams, SamplingParams

MESSAGES: list[Any] = [{"role": "user", "content": "hello there"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat_prompt() -> list[int]:
    head, tail = chat_text(MESSAGES).removeprefix("<|bos|>").split("<|eos|>")
    return [BOS, *head.encode(), EOS, *tail.encode()]


def searched(prompt: Any, width: int, max_tokens: int, penalty: float = 1.0) -> list[str]:
    """Texts of the engine by itself, the best first."""
    drive = Driver(ScriptedRunner())
    drive.send(
        generate_request(
            "r", prompt, max_tokens, sampling=SamplingParams(seed=0), num_choices=width, beams=BeamParams(penalty)
        )
    )
    drive.run()
    return [decode(drive.tokens[LINK, "r", index]) for index in range(width)]


async def test_the_best_of_many_are_shown_and_all_are_charged(gateway: RunningGateway) -> None:
    common = {"model": MODEL, "prompt": "tell", "max_tokens": 10, "seed": 5, "temperature": 1.0}
    async with gateway.client() as client:
        drawn = await client.completions.create(**common, n=4, logprobs=0)
        shown = await client.completions.create(**common, n=2, best_of=4)
    means = {
        choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
        for choice in drawn.choices
    }
    assert len(means) == 4
    best = sorted(means, key=means.__getitem__, reverse=True)
    assert [choice.text for choice in shown.choices] == best[:2]
    assert [choice.index for choice in shown.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in shown.choices)
    assert shown.usage is not None
    assert shown.usage.completion_tokens == 40


@pytest.mark.parametrize("n", [1, 3])
async def test_a_search_answers_by_score_and_charges_every_beam(gateway: RunningGateway, n: int) -> None:
    width, steps = 3, 150
    extra = {"use_beam_search": True, "length_penalty": 0.5, "best_of": width}
    async with gateway.client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=steps, n=n, extra_body=extra
        )
    expected = searched(chat_prompt(), width, steps, 0.5)
    assert [choice.message.content for choice in answer.choices] == expected[:n]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == width * steps, "more than one lease, all beams"
    await gateway.balanced()


async def test_a_search_behind_each_prompt_with_logprobs_and_echo(gateway: RunningGateway) -> None:
    prompts = ["once", "twice"]
    async with gateway.client() as client:
        answer = await client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=6, n=2, echo=True, logprobs=1, extra_body={"use_beam_search": True}
        )
    texts = [choice.text for choice in answer.choices]
    assert texts == [p + text for p in prompts for text in searched(encode(p)[1:], 2, 6)]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(choice.text)
        assert all(1 <= len(top) <= 2 for top in choice.logprobs.top_logprobs[1:])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"use_beam_search": True, "stream": True}, "use_beam_search"),
        (CHAT, {"use_beam_search": True, "temperature": 0.7}, "temperature"),
        (COMPLETIONS, {"use_beam_search": True, "top_p": 0.5}, "top_p"),
        (CHAT, {"use_beam_search": True, "stop": ["x"]}, "stop"),
        (CHAT, {"use_beam_search": True, "min_tokens": 3}, "min_tokens"),
        (CHAT, {"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        (CHAT, {"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
        (COMPLETIONS, {"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids"),
        (CHAT, {"use_beam_search": True, "response_format": {"type": "json_object"}}, "use_beam_search"),
        (CHAT, {"use_beam_search": True, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        (CHAT, {"use_beam_search": True, "best_of": 9}, "best_of"),
        (CHAT, {"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        (CHAT, {"length_penalty": 1.5}, "length_penalty"),
        (CHAT, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 129}, "best_of"),
        (COMPLETIONS, {"use_beam_search": True, "max_tokens": 0, "echo": True}, "max_tokens"),
    ],
)
async def test_what_does_not_go_together_is_refused_by_name(
    shared_gateway: RunningGateway, path: str, fields: dict[str, Any], param: str
) -> None:
    base = {"model": MODEL} | ({"messages": MESSAGES} if path == CHAT else {"prompt": "x"})
    async with shared_gateway.session() as session, session.post(path, json=base | fields) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
