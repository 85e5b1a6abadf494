"""Fields of newer APIs that would change an answer are refused by name on every endpoint, and not dropped with a 200."""

from __future__ import annotations

from typing import Any

import pytest
from gateways import MODEL, RunningGateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TURNS: list[Any] = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS, "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2, "store": False},
    MESSAGES: {"messages": TURNS, "max_tokens": 2},
}


async def post(gateway: RunningGateway, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    body = {"model": MODEL} | BODIES[path] | fields
    async with gateway.session() as session, session.post(path, json=body) as answer:
        return answer.status, await answer.json(), answer.headers.get("x-headgate-ignored", "")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        # forms, samplers and templates of other servers, on an endpoint that has others of its own
        (RESPONSES, {"guided_regex": "a+"}, "guided_regex"),
        (RESPONSES, {"regex": "a+"}, "regex"),
        (RESPONSES, {"stop_regex": "a"}, "stop_regex"),
        (RESPONSES, {"repeat_penalty": 1.3}, "repeat_penalty"),
        (RESPONSES, {"dry_multiplier": 0.8}, "dry_multiplier"),
        (RESPONSES, {"thinking": {"type": "enabled"}}, "thinking"),
        (RESPONSES, {"return_token_ids": True}, "return_token_ids"),
        (RESPONSES, {"lora_path": "x"}, "lora_path"),
        (RESPONSES, {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        (RESPONSES, {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        (RESPONSES, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        (RESPONSES, {"enable_response_messages": True}, "enable_response_messages"),
        (RESPONSES, {"previous_input_messages": TURNS}, "previous_input_messages"),
        (RESPONSES, {"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        (RESPONSES, {"reasoning": {"enabled": True}}, "reasoning.enabled"),
        (MESSAGES, {"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics"),
        (MESSAGES, {"fallback_credit_token": "x"}, "fallback_credit_token"),
        (MESSAGES, {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
    ],
)
async def test_a_field_that_would_change_the_answer_is_refused_by_name(
    shared_gateway: RunningGateway, path: str, fields: dict[str, Any], param: str
) -> None:
    status, reply, _ = await post(shared_gateway, path, fields)
    assert status == 400, reply
    assert param in reply["error"]["message"]
    if path != MESSAGES:
        assert (reply["error"]["param"], reply["error"]["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        (RESPONSES, {"guided_regex": None, "dry_multiplier": 0, "thinking": {}, "typical_p": 1}, ""),
        (
            RESPONSES,
            {"client_metadata": {"a": "b"}, "text": {"verbosity": "low", "style": "x"}},
            "client_metadata, text.style",
        ),
        (RESPONSES, {"reasoning": {"exclude": False, "tone": "x"}, "priority": 3}, "reasoning.tone"),
        (
            MESSAGES,
            {"user_profile_id": "u", "metadata": {"user_id": "u", "team": "x"}},
            "user_profile_id, metadata.team",
        ),
        (MESSAGES, {"output_config": {"task_budget": None}}, ""),
    ],
)
async def test_what_changes_nothing_is_taken_and_an_unknown_name_is_told(
    shared_gateway: RunningGateway, path: str, fields: dict[str, Any], ignored: str
) -> None:
    status, reply, told = await post(shared_gateway, path, fields)
    assert (status, told) == (200, ignored), reply


async def test_count_tokens_refuses_what_a_message_refuses(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": TURNS, "output_config": {"task_budget": {"type": "tokens", "total": 9}}}
    async with shared_gateway.session() as session, session.post(f"{MESSAGES}/count_tokens", json=body) as answer:
        assert (answer.status, "task_budget" in (await answer.json())["error"]["message"]) == (400, True)
