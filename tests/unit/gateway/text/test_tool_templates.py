"""Tools and tool calls in templates: each family wants them in its own form, and the form is found by rendering."""

from __future__ import annotations

import json
from typing import Any

import pytest
from byte_model import tokenizer_spec

from gateway.base.errors import ApiError
from gateway.base.output_formats import REASONING_FORMATS, TOOL_FORMATS
from gateway.generation.served.models import ServedModel
from gateway.parsers.dialects import DIALECTS, STYLES, OutputSyntax, dialect_of, style_of
from gateway.schema.sampling import Defaults
from gateway.schema.tools import read_tools
from gateway.text.templates import ChatTemplate
from gateway.text.tokenizer import ModelTokenizer

# Templates in the manner of models' own: what differs is how they take arguments, contents and ids.
QWEN = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{%- for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}{% for c in m.tool_calls %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %};'
    "{%- endfor %}{%- if add_generation_prompt %}assistant:{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{%- for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.role + ':' + m.content }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
)
MISTRAL = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{%- for m in messages %}"
    "{%- if m.tool_calls %}[TOOL_CALLS][{%- for c in m.tool_calls %}{%- if c.id|length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{%- endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{%- endfor %}]{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{%- else %}{{ m.role + m.content }}{%- endif %};{%- endfor %}"
)
GRANITE = (
    "{%- for m in messages %}{{ m['role'] + ':' + m['content'] }}{% if m.tool_calls %}<|tool_call|>"
    "{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %};{% endfor %}"
)
XML = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}{{ m.role }}:{% for c in m.tool_calls %}"
    "<function={{ c.function.name }}>{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>"
    "{% endfor %}</function>{% endfor %};{% endfor %}"
)
PLAIN = "{%- for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü<", "n": [1]}'}}
TURNS: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "done"},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def model(source: str) -> ServedModel:
    tokenizer = ModelTokenizer(tokenizer_spec(), source)
    syntax = OutputSyntax.of(source)
    return ServedModel("m", tokenizer, ChatTemplate(source), 100_000, None, Defaults(), 0, syntax=syntax)


def rendered(source: str, messages: Any = TURNS, tools: Any = (), **switches: Any) -> str:
    one = model(source)
    return one.tokenizer.decode(one.chat_prompt(messages, read_tools(tools, None, None), switches).tokens, False)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (QWEN, '<tool_call>{"name": "f", "arguments": {"a": "ü<", "n": [1]}}</tool_call>'),
        (DEEPSEEK, 'f\n```json\n{"a": "ü<", "n": [1]}'),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "ü<", "n": [1]}, "id": "'),
        (GRANITE, 'assistant:<|tool_call|>[{"name": "f", "arguments": {"a": "ü<", "n": [1]}}]'),
        (XML, "<function=f><parameter=a>ü<</parameter><parameter=n>[1]</parameter></function>"),
    ],
    ids=["qwen", "deepseek", "mistral", "granite", "xml"],
)
def test_calls_come_in_the_form_of_the_template(source: str, expected: str) -> None:
    assert expected in rendered(source)


def test_arguments_that_are_no_object_are_told_as_they_are() -> None:
    odd = CALL | {"function": {"name": "f", "arguments": "{broken"}}
    assert '"arguments": "{broken"' in rendered(QWEN, [*TURNS[:1], TURNS[1] | {"tool_calls": [odd]}, TURNS[2]])


def test_short_ids_of_a_call_and_its_result_are_the_same() -> None:
    text = rendered(MISTRAL)
    number = text.partition('"id": "')[2][:9]
    assert number.isalnum() and f"done{number}[/TOOL_RESULTS]" in text


def test_a_template_that_knows_tools_is_given_them() -> None:
    told = json.dumps(TOOL)
    assert told in rendered(QWEN, TURNS[:1], [TOOL])
    assert "<tools>" not in rendered(QWEN, TURNS[:1])


def test_a_template_that_knows_none_has_them_told_in_words() -> None:
    text = rendered(PLAIN, TURNS, [TOOL])
    assert text.startswith("system:You may call") and json.dumps(TOOL) in text
    assert 'assistant:<tool_call>\n{"name": "f", "arguments": {"a": "ü<", "n": [1]}}\n</tool_call>;' in text
    assert "user:<tool_response>\ndone\n</tool_response>;" in text
    both = rendered(PLAIN, [{"role": "system", "content": "Be kind."}, *TURNS, TURNS[2]], [TOOL])
    assert both.startswith("system:Be kind.\n\nYou may call") and both.count("user:<tool_response>") == 1
    assert "You may call" not in rendered(PLAIN, TURNS[:1])


def test_reasoning_of_earlier_turns_is_given_to_the_template() -> None:
    for name in ("reasoning_content", "reasoning"):
        turns = [TURNS[0], {"role": "assistant", "content": "x", name: "hm"}]
        assert "assistant:<think>hm</think>x;" in rendered(QWEN, turns)


def test_switches_are_those_that_the_template_reads() -> None:
    assert model(QWEN).switches == {"enable_thinking"}
    assert model(PLAIN).switches == frozenset()
    own = "{% if messages %}{% set offset = 1 %}{% endif %}{{ offset }}"
    assert model(own).switches == frozenset()
    asked = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}{{ bos_token }}"
    assert model(asked).switches == {"thinking"}
    assert rendered(QWEN, TURNS[:1], enable_thinking=False).endswith("<think></think>")
    assert rendered(QWEN, TURNS[:1], enable_thinking=True).endswith("assistant:")


def test_the_prompt_tells_whether_it_has_opened_the_reasoning() -> None:
    assert model(DEEPSEEK).chat_prompt(TURNS).is_thinking
    assert not model(DEEPSEEK).chat_prompt(TURNS, add_generation_prompt=False).is_thinking
    assert not model(QWEN).chat_prompt(TURNS).is_thinking


@pytest.mark.parametrize(
    ("source", "dialect", "style"),
    [
        (QWEN, "hermes", "think"),
        (DEEPSEEK, "deepseek", "think"),
        (MISTRAL, "mistral", "none"),
        (GRANITE, "granite", "none"),
        (XML, "qwen3_coder", "none"),
        (PLAIN, "hermes", "none"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony", "none"),
        ("[TOOL_CALLS]x[ARGS][THINK]", "mistral_named", "brackets"),
        ("<tool_call><arg_key><think>", "glm", "think"),
        ("<|start_header_id|>", "llama", "none"),
        ("<｜tool▁call▁begin｜>name<｜tool▁sep｜>", "deepseek_v31", "none"),
        ("{{ '<｜DSML｜invoke name=' }}</think>", "deepseek_v32", "think"),
        ("<minimax:tool_call> <invoke name=> <think>", "minimax_m2", "think"),
        ("<|START_THINKING|> <|START_ACTION|>[{tool_name}]", "cohere", "cohere"),
        ("Write 'Action:' followed by a json-formatted list of actions", "command_r", "none"),
        ("<start_function_declaration> <start_function_call>call: <escape>", "functiongemma", "none"),
        ("{{ '<|tool_call>call:' + name }}<tool_call|>", "gemma4", "none"),
        ("<seed:tool_call>\n<function=f></seed:think>", "seed_oss", "seed"),
        ("<longcat_tool_call> <longcat_think>", "longcat", "longcat"),
        ("<TOOLCALL>[...]</TOOLCALL>", "nemotron", "none"),
        ("<|action_start|><|plugin|>", "internlm", "none"),
        ("<tool_calls>[", "jamba", "none"),
        ("<|tool_call_start|>[ <|tool_list_start|>", "lfm2", "none"),
        ("<function_calls>", "olmo3", "none"),
        ("functools[{", "functools", "none"),
        ("<tool_call> <tool_calls>", "hermes", "none"),
        ("<|tool_call|>[", "granite", "none"),
    ],
)
def test_the_syntax_is_found_from_the_template(source: str, dialect: str, style: str) -> None:
    assert (dialect_of(source), style_of(source)) == (dialect, style)
    assert OutputSyntax.of(source) == OutputSyntax(DIALECTS[dialect], STYLES[style])
    assert OutputSyntax.of(source, "kimi", "none") == OutputSyntax(DIALECTS["kimi"], None)


def test_the_settings_know_every_format() -> None:
    assert tuple(DIALECTS) == TOOL_FORMATS
    assert tuple(STYLES) == REASONING_FORMATS


@pytest.mark.parametrize("names", [("qwen9", ""), ("", "aloud")])
def test_a_format_that_is_not_known_is_named(names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=r"'(qwen9|aloud)' is not known; known are "):
        OutputSyntax.of("", *names)


def test_a_conversation_that_is_too_long_is_refused_before_it_is_rendered() -> None:
    one = model(QWEN)
    big = TOOL | {"function": {"name": "f", "description": "x" * 500_000}}
    with pytest.raises(ApiError) as caught:
        one.chat_prompt(TURNS, read_tools([big], None, None))
    assert caught.value.code == "context_length_exceeded"
