"""Conversations whose roles a template does not take in their order: its prompt still has every text."""

from __future__ import annotations

from typing import Any

import pytest
from byte_model import tokenizer_spec

from gateway.generation.served.models import ServedModel
from gateway.schema.sampling import Defaults
from gateway.schema.tools import read_tools
from gateway.text.templates import ChatTemplate
from gateway.text.tokenizer import ModelTokenizer

# Rules in the manner of models' own templates.
TURN = "{{ m.role }}:{{ m.content }};"
PERMISSIVE = "{%- for m in messages %}" + TURN + "{% endfor %}"
QWEN = (
    "{%- for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + TURN + "{% endfor %}"
)
GEMMA = (
    "{%- if messages[0].role == 'system' %}{% set first = messages[0].content + ' ' %}{% set turns = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}{%- for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ 'model' if m.role == 'assistant' else m.role }}:{% if loop.first %}{{ first }}{% endif %}{{ m.content }};"
    "{% endfor %}"
)
FIRST_ONLY = (
    "{%- if messages[0].role == 'system' %}system:{{ messages[0].content }};{% endif %}"
    "{%- for m in messages %}{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}"
)


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CODEX = [message("system", "A"), message("developer", "B"), message("user", "C"), message("user", "D")]
LATE = [message("system", "A"), *(message(role, role[0]) for role in ("user", "assistant", "developer", "user"))]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def model(source: str) -> ServedModel:
    tokenizer = ModelTokenizer(tokenizer_spec(), source)
    return ServedModel("m", tokenizer, ChatTemplate(source), 100_000, None, Defaults(), 0)


def rendered(source: str, messages: list[Any], *tools: Any) -> str:
    one = model(source)
    return one.tokenizer.decode(one.chat_prompt(messages, read_tools(list(tools), None, None)).tokens, False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PERMISSIVE, "system:A;system:B;user:C;user:D;"),
        (QWEN, "system:A\n\nB;user:C;user:D;"),
        (GEMMA, "user:A\n\nB C\n\nD;"),
        (FIRST_ONLY, "system:A\n\nB;user:C;user:D;"),
    ],
    ids=["permissive", "qwen", "gemma", "first only"],
)
def test_two_leading_systems_and_two_users_reach_the_prompt(source: str, expected: str) -> None:
    assert rendered(source, CODEX) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PERMISSIVE, "system:A;user:u;assistant:a;system:d;user:u;"),
        (QWEN, "system:A;user:u;assistant:a;user:d;user:u;"),
        (GEMMA, "user:A u;model:a;user:d\n\nu;"),
        (FIRST_ONLY, "system:A;user:u;assistant:a;user:d;user:u;"),
    ],
    ids=["permissive", "qwen", "gemma", "first only"],
)
def test_a_late_system_reaches_the_prompt(source: str, expected: str) -> None:
    assert rendered(source, LATE) == expected


def test_a_result_that_is_told_in_words_is_one_turn_with_the_user_after_it() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [message("user", "u"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "done"}, message("user", "and?")]
    assert rendered(GEMMA, messages, TOOL).endswith("user:<tool_response>\ndone\n</tool_response>\n\nand?;")
