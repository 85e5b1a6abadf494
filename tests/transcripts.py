"""Outputs of models that call tools and reason, each as its model's public template writes it, with what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.schema.tools import FunctionTool, Tools

WEATHER = FunctionTool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "places": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
)
NOW = FunctionTool("now", None, None)
NAMES = frozenset({"get_weather", "now"})
TOOLS = Tools((WEATHER, NOW), "auto", NAMES)


@dataclass(frozen=True)
class Transcript:
    name: str
    dialect: str
    output: str
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    style: str = "none"
    is_open: bool = False


PARIS: Any = {"city": "Paris"}
ROME: Any = {"city": "Rome", "days": 3}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ODD: Any = {"city": 'a "b" \\ {]} ü😀 </tool_cal', "places": ["[", "}"]}

TRANSCRIPTS = [
    Transcript("hermes", "hermes", CALL, calls=[("get_weather", PARIS)]),
    Transcript(
        "hermes, two calls after a text",
        "hermes",
        f'Let me look.\n\n{CALL}\n<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Rome", "days": 3}}}}\n'
        "</tool_call>",
        "Let me look.",
        [("get_weather", PARIS), ("get_weather", ROME)],
    ),
    Transcript(
        "hermes, arguments first and odd characters",
        "hermes",
        '<tool_call>{"arguments": {"city": "a \\"b\\" \\\\ {]} ü😀 </tool_cal", "places": ["[", "}"]}, '
        '"name": "get_weather"}</tool_call>',
        calls=[("get_weather", ODD)],
    ),
    Transcript("hermes, no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', calls=[("now", {})]),
    Transcript(
        "hermes, arguments as a text",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=[("get_weather", PARIS)],
    ),
    Transcript("a text", "hermes", " 1 < 2 and <tool> is\nno tool \n", " 1 < 2 and <tool> is\nno tool \n"),
    Transcript(
        "an unknown tool",
        "hermes",
        'See: <tool_call>{"name": "drop", "arguments": {}}</tool_call>.',
        'See: <tool_call>{"name": "drop", "arguments": {}}</tool_call>.',
    ),
    Transcript("a tag that is none", "hermes", "a <tool_call> b </tool_call>", "a <tool_call> b </tool_call>"),
    Transcript("a tag that was cut", "hermes", "a <tool_call", "a <tool_call"),
    Transcript(
        "qwen3, reasoning and a call",
        "hermes",
        f"<think>\nParis, then.\nYes.\n</think>\n\n{CALL}",
        calls=[("get_weather", PARIS)],
        reasoning="Paris, then.\nYes.",
        style="think",
    ),
    Transcript("qwen3, no reasoning", "hermes", "<think>\n\n</think>\n\nHi", "Hi", style="think"),
    Transcript("qwen3, a tag in the text", "hermes", "Write <think> here.", "Write <think> here.", style="think"),
    Transcript(
        "r1, opened by the prompt", "deepseek", "\nHm.\n</think>\n\nHi.", "Hi.", [], "Hm.", "think", is_open=True
    ),
    Transcript("r1, cut in the reasoning", "deepseek", "Hm, so\n", "", [], "Hm, so\n", "think", is_open=True),
    Transcript(
        "qwen3-coder",
        "qwen3_coder",
        "I look it up.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        '</parameter>\n<parameter=exact>\ntrue\n</parameter>\n<parameter=places>\n["a", "b"]\n</parameter>\n'
        '<parameter=note>\nline\n\nline "2"\n</parameter>\n</function>\n</tool_call>',
        "I look it up.",
        [
            (
                "get_weather",
                {"city": "Paris", "days": 3, "exact": True, "places": ["a", "b"], "note": 'line\n\nline "2"'},
            )
        ],
    ),
    Transcript(
        "qwen3-coder, a number for a string, null, and no outer tag",
        "qwen3_coder",
        "<function=get_weather><parameter=city>75001</parameter><parameter=note>null</parameter></function>",
        calls=[("get_weather", {"city": "75001", "note": None})],
    ),
    Transcript(
        "qwen3-coder, no parameters",
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=[("now", {})],
    ),
    Transcript(
        "glm",
        "glm",
        "\n<think>Hm.</think>\nOk.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "Ok.",
        [("get_weather", ROME), ("now", {})],
        "Hm.",
        "think",
    ),
    Transcript(
        "llama 3", "llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=[("get_weather", PARIS)]
    ),
    Transcript(
        "llama 3, two calls behind a mark",
        "llama",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Transcript(
        "llama 3, a built-in form",
        "llama",
        '<|python_tag|>get_weather.call(city="Paris")',
        calls=[("get_weather", PARIS)],
    ),
    Transcript("llama 3, JSON that is no call", "llama", '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}'),
    Transcript(
        "llama 3, a text and a mark",
        "llama",
        'One moment.<|python_tag|>{"name": "now", "parameters": {}}',
        "One moment.",
        [("now", {})],
    ),
    Transcript(
        "llama 4, pythonic",
        "llama",
        '<|python_start|>[get_weather(city="Rome", days=3), now()]<|python_end|>',
        calls=[("get_weather", ROME), ("now", {})],
    ),
    Transcript(
        "pythonic, literals",
        "pythonic",
        "[get_weather(city='a)]\\'(', days=-2, exact=true, places=['x', \"]\"], note=None)]",
        calls=[("get_weather", {"city": "a)]'(", "days": -2, "exact": True, "places": ["x", "]"], "note": None})],
    ),
    Transcript("pythonic, a list that is none", "pythonic", "[1, 2] is a list", "[1, 2] is a list"),
    Transcript(
        "pythonic, no literal",
        "pythonic",
        "[get_weather(city=__import__('os'))]",
        "[get_weather(city=__import__('os'))]",
    ),
    Transcript(
        "mistral, a list",
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_weather", "arguments": '
        '{"city": "Rome", "days": 3}, "id": "abcdefghi"}]',
        calls=[("get_weather", PARIS), ("get_weather", ROME)],
    ),
    Transcript(
        "mistral, names",
        "mistral_named",
        '[THINK]Hm.[/THINK]Well.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_weather[CALL_ID]123456789'
        '[ARGS]{"city": "Rome", "days": 3}',
        "Well.",
        [("get_weather", PARIS), ("get_weather", ROME)],
        "Hm.",
        "brackets",
    ),
    Transcript(
        "deepseek v3",
        "deepseek",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me see.",
        [("get_weather", PARIS), ("now", {})],
    ),
    Transcript(
        "deepseek v3.1",
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        calls=[("get_weather", PARIS), ("get_weather", ROME)],
    ),
    Transcript(
        "kimi",
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        calls=[("get_weather", PARIS)],
    ),
    Transcript(
        "granite",
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        calls=[("get_weather", PARIS)],
    ),
    Transcript(
        "granite, reasoning",
        "granite",
        "<think>Hm.</think><response>Good day.</response>",
        "Good day.",
        [],
        "Hm.",
        "think",
    ),
    Transcript(
        "granite 3.2",
        "granite",
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nHi.",
        "Hi.",
        [],
        "Hm.",
        "phrases",
    ),
    Transcript(
        "gpt-oss, a call",
        "harmony",
        "<|channel|>analysis<|message|>We look it up.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        "One moment.",
        [("get_weather", PARIS)],
        "We look it up.",
    ),
    Transcript(
        "gpt-oss, a recipient in front of the channel, and the end token hidden",
        "harmony",
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}",
        calls=[("now", {})],
    ),
    Transcript(
        "gpt-oss, a text",
        "harmony",
        "<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>2 < 3.<|return|>",
        "2 < 3.",
        [],
        "Simple.",
    ),
    Transcript("gpt-oss, no header", "harmony", "Only text", "Only text"),
    Transcript(
        "deepseek v3.2",
        "deepseek_v32",
        "<think>Hm.</think>Let me see.\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">\n75 "a"\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="places" string="false">["a", "b"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="note" string="true">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "Let me see.",
        [("get_weather", {"city": '\n75 "a"\n', "days": 3, "places": ["a", "b"], "note": "null"}), ("now", {})],
        "Hm.",
        "think",
    ),
    Transcript(
        "deepseek v4, arguments as JSON",
        "deepseek_v32",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather">\n{"city": "Rome", "days": 3}\n</｜DSML｜invoke>'
        "</｜DSML｜tool_calls>",
        calls=[("get_weather", ROME)],
    ),
    Transcript(
        "deepseek v3.2, an unknown tool",
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="drop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="drop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ),
    Transcript(
        "minimax m2, two calls and a text behind them",
        "minimax_m2",
        'Hm.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Rome</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="exact">true</parameter>\n<parameter name="note">null</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "I look.",
        [("get_weather", ROME), ("get_weather", {"city": "Paris", "exact": True, "note": None})],
        "Hm.",
        "think",
        is_open=True,
    ),
    Transcript("minimax m2, a tag alone", "minimax_m2", "Use <minimax:tool_call>.", "Use <minimax:tool_call>."),
    Transcript(
        "command r7b",
        "cohere",
        "<|START_THINKING|>I look it up.<|END_THINKING|><|START_ACTION|>[\n    "
        '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n    '
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        [("get_weather", PARIS), ("now", {})],
        "I look it up.",
        "cohere",
    ),
    Transcript(
        "command a, a text",
        "cohere",
        "<|START_THINKING|>Easy.<|END_THINKING|><|START_RESPONSE|>2 < 3.<|END_RESPONSE|>",
        "2 < 3.",
        [],
        "Easy.",
        "cohere",
    ),
    Transcript(
        "command r",
        "command_r",
        'Plan: I look.\nAction: ```json\n[\n    {\n        "tool_name": "get_weather",\n        "parameters": {\n'
        '            "city": "Paris"\n        }\n    }\n]```',
        "Plan: I look.",
        [("get_weather", PARIS)],
    ),
    Transcript(
        "functiongemma",
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>a "b", {c}:d<escape>,days:-3,exact:true,'
        "places:[<escape>x<escape>,<escape>y]<escape>],note:null}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        "",
        [
            ("get_weather", {"city": 'a "b", {c}:d', "days": -3, "exact": True, "places": ["x", "y]"], "note": None}),
            ("now", {}),
        ],
    ),
    Transcript(
        "functiongemma, JSON",
        "functiongemma",
        'Well.<start_function_call>call:get_weather{"city": "Rome", "days": 3}<end_function_call>',
        "Well.",
        [("get_weather", ROME)],
    ),
    Transcript(
        "gemma 4",
        "gemma4",
        'One moment.<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|>',
        "One moment.",
        [("get_weather", ROME)],
    ),
    Transcript(
        "gemma 4, an object inside and a string without marks",
        "gemma4",
        '<|tool_call>call:get_weather{city: Rome, note:{<|"|>a b<|"|>:[{x:1.5}]}}<tool_call|>',
        calls=[("get_weather", {"city": "Rome", "note": {"a b": [{"x": 1.5}]}})],
    ),
    Transcript(
        "seed-oss",
        "seed_oss",
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("get_weather", ROME)],
        "Hm.",
        "seed",
    ),
    Transcript(
        "longcat",
        "longcat",
        '<longcat_think>Hm.</longcat_think>\n<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</longcat_tool_call>",
        "",
        [("get_weather", PARIS)],
        "Hm.",
        "longcat",
    ),
    Transcript(
        "internlm",
        "internlm",
        'I look.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>',
        "I look.",
        [("get_weather", PARIS)],
    ),
    Transcript(
        "jamba",
        "jamba",
        '<tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Paris"}},\n{"name": "now", "arguments": {}}\n]'
        "</tool_calls>",
        calls=[("get_weather", PARIS), ("now", {})],
    ),
    Transcript(
        "nemotron",
        "nemotron",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
        calls=[("get_weather", PARIS)],
    ),
    Transcript(
        "phi-4-mini, functools",
        "functools",
        'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        calls=[("get_weather", PARIS)],
    ),
    Transcript("functools in a text", "functools", "Use functools.partial here.", "Use functools.partial here."),
    Transcript(
        "lfm2",
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Rome", days=3), now()]<|tool_call_end|>Looking.',
        "Looking.",
        [("get_weather", ROME), ("now", {})],
    ),
    Transcript(
        "olmo 3",
        "olmo3",
        'I look.\n<function_calls>get_weather(city="Rome", days=3)\nnow()\nget_weather(city="Paris")</function_calls>',
        "I look.",
        [("get_weather", ROME), ("now", {}), ("get_weather", PARIS)],
    ),
]
