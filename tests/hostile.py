"""Makes what an attacker may send: messages of the wire with any field at any value, and bodies of JSON that are nearly
right.

The source of randomness is given: a seed is all that a failure needs to come again. The types say which fields there
are, so a new one is tried without a word here. Mostly one or two fields are odd and the rest is sound: what is odd
everywhere is refused at the first look, and shows nothing.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import types
import typing
from array import array
from random import Random
from typing import Any, Literal, Union

import msgspec
from fakes import BOS, generate_request

from gateway.messages.fields import CountFields, MessagesFields
from gateway.schema.chat import ChatFields
from gateway.schema.completions import CompletionFields
from gateway.schema.embeddings import EmbeddingFields, RerankFields, ScoreFields
from gateway.schema.responses import ResponseFields
from workers.protocol.frames import FrameError, FrameReader, encode
from workers.protocol.messages import BeamParams, CacheRange, GenerateRequest, Message, SamplingParams, ToWorker

INTEGERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    16,
    64,
    100,
    255,
    258,
    259,
    300,
    301,
    1000,
    2048,
    4096,
    65_535,
    65_536,
    10**6,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    2**32 - 1,
    2**32,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64 - 1,
]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    0.5,
    -1.0,
    2.0,
    99.9,
    1e-7,
    1e-45,
    5e-324,
    -1e-300,
    1e9,
    3.4e38,
    3.5e38,
    1.7e308,
    -1.7e308,
    math.inf,
    -math.inf,
    math.nan,
]
TEXTS = [
    "",
    "x",
    "\0",
    "req",
    "tenant",
    "é",
    "\U0001f600",
    "\ufeff",
    "\u202e",
    "../../etc/passwd",
    "'; DROP TABLE t; --",
    "07",
    "-1",
    "0000000000002147483648",
    "x" * 257,
    "x" * 5000,
    "root ::= root",
    'root ::= "a"*',
    "root ::= [a-z]+",
    "start: start",
    'start: "a"*',
    "start: /[a-z]+/",
    "start: /((a|b)*a(a|b){40}c){9}/",
]
LINK_KINDS = typing.get_args(ToWorker)


_fields = functools.cache(msgspec.structs.fields)


# --- the wire ---


def messages(rng: Random, vocab_size: int, root: str) -> list[Message]:
    """Some that a gateway's link could carry: each went over the wire, so its types are right and nothing else is."""
    made: list[Message] = []
    while not made:
        for _ in range(rng.randint(1, 3)):
            made += _wired(_message(rng, vocab_size, root))
    return made


def _wired(message: Any) -> list[Message]:
    try:
        return FrameReader().feed(encode(message))
    except (FrameError, OverflowError, UnicodeEncodeError):
        return []


def _message(rng: Random, vocab_size: int, root: str) -> Any:
    if rng.random() < 0.7:
        return _odd(rng, _request(rng, vocab_size, root), vocab_size)
    kind = rng.choice(LINK_KINDS)
    return _value(rng, kind, vocab_size)


def _request(rng: Random, vocab_size: int, root: str) -> GenerateRequest:
    """A sound one, of any kind that there is."""
    prompt = tuple(rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 2, 5, 17, 60, 150])))
    fields: dict[str, Any] = {"root": root, "tier": rng.choice(["interactive", "batch"])}
    number, max_tokens = rng.choice([1, 1, 2, 3]), rng.choice([0, 1, 4, 30])
    sampling = SamplingParams(
        seed=rng.randrange(2**64),
        temperature=rng.choice([0.0, 0.01, 1.0, 100.0]),
        top_k=rng.choice([0, 1, 5, 10_000]),
        top_p=rng.choice([1.0, 0.0, 0.3]),
        min_p=rng.choice([0.0, 0.2, 1.0]),
        presence_penalty=rng.choice([0.0, 2.0, -2.0]),
        repetition_penalty=rng.choice([1.0, 0.01, 2.0]),
        logprobs=rng.choice([-1, -1, 0, 5, 1000]),
        logit_bias=tuple(
            (rng.randrange(vocab_size), rng.choice([100.0, -100.0])) for _ in range(rng.choice([0, 0, 3]))
        ),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, 4, 2**31 - 1]),
        bad_words=rng.choice([(), (), ((5,),), ((5, 6), (7,))]),
        allowed_token_ids=rng.choice([(), (), (9,), (9, 10, 11)]),
        stop_token_ids=rng.choice([(), (), (4, 5, 6)]),
    )
    kind = rng.random()
    if kind < 0.15 and max_tokens:
        fields |= {"beams": BeamParams(rng.choice([1.0, -10.0, 10.0])), "num_choices": number + 1}
    elif kind < 0.3 and max_tokens > 1:
        fields |= {"resume": ((0, (7,)),), "attempt": 1, "num_output_spent": 1}
    else:
        fields["num_choices"] = number
    if rng.random() < 0.2:
        fields["prompt_logprobs"] = rng.choice([0, 20, 1000])
    if rng.random() < 0.2:
        fields["retention"] = (CacheRange(0, -1, 50, rng.choice([0, 3600])),)
    return generate_request(
        f"attack {rng.randrange(10**9)}",
        prompt,
        max_tokens,
        tenant=f"mallory {rng.randrange(3)}",
        sampling=sampling,
        lease_bound=10_000,
        **fields,
    )


def _odd(rng: Random, request: GenerateRequest, vocab_size: int) -> GenerateRequest:
    """One or two of its fields, or of its sampling's, at any value."""
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        kind = SamplingParams if rng.random() < 0.5 else GenerateRequest
        field = rng.choice(_fields(kind))
        change = {field.encode_name: _value(rng, field.type, vocab_size)}
        if kind is SamplingParams:
            change = {"sampling": msgspec.structs.replace(request.sampling, **change)}
        request = msgspec.structs.replace(request, **change)
    return request


def _value(rng: Random, kind: Any, vocab_size: int) -> Any:
    """Anything of this type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return rng.choice(inner)
    if origin in (Union, types.UnionType):
        return _value(rng, rng.choice(inner), vocab_size)
    if origin is tuple and len(inner) == 2 and inner[1] is Ellipsis:
        length = rng.choice([0, 1, 1, 2, 3, 20, 130, 1030] if inner[0] is int else [0, 1, 2, 20])
        if inner[0] is int and rng.random() < 0.6:
            return tuple(rng.randrange(vocab_size) for _ in range(length))
        return tuple(_value(rng, inner[0], vocab_size) for _ in range(length))
    if origin is tuple:
        return tuple(_value(rng, one, vocab_size) for one in inner)
    if origin is array or kind is array:
        length = rng.choice([0, 1, 1, 2, 3, 20, 130, 1030])
        if rng.random() < 0.6:
            return array("i", (rng.randrange(vocab_size) for _ in range(length)))
        return array("q", (rng.choice([n for n in INTEGERS if -(2**63) <= n < 2**63]) for _ in range(length)))
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.choice(INTEGERS) if rng.random() < 0.8 else rng.randint(-(2**63), 2**64 - 1)
    if kind is float:
        return rng.choice(FLOATS)
    if kind is str:
        return rng.choice(TEXTS)
    if kind is bytes:
        return rng.choice([b"", b"a", b"tenant".ljust(16, b"\0"), bytes(65), bytes(5000)])
    if kind is type(None):
        return None
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        named = _fields(kind)
        return kind(**{f.encode_name: _value(rng, f.type, vocab_size) for f in named})
    raise NotImplementedError(f"no values of {kind!r} are known: add them here")


# --- bodies ---

OTHERS = ["user", "store", "priority", "x", "tools", "metadata", "prompt_cache_key"]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BATCHES = f"{MESSAGES}/batches"
VECTORS: dict[str, type[msgspec.Struct]] = {
    "/v1/embeddings": EmbeddingFields,
    "/v1/rerank": RerankFields,
    "/v1/score": ScoreFields,
}
PATHS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatFields,
    "/v1/completions": CompletionFields,
    RESPONSES: ResponseFields,
    f"{RESPONSES}/input_tokens": ResponseFields,
    f"{RESPONSES}/compact": ResponseFields,
    MESSAGES: MessagesFields,
    f"{MESSAGES}/count_tokens": CountFields,
    BATCHES: MessagesFields,
    **VECTORS,
}
STREAMED = {CHAT, "/v1/completions", RESPONSES, MESSAGES}
NUMBERS = [*INTEGERS, -(2**64), 2**70, 10**30, *(f for f in FLOATS if math.isfinite(f))]
IDS = [
    "7",
    "07",
    "258",
    "259",
    "-1",
    "",
    "0000000000002147483648",
    "0000000000009999999999",
    "00000000000000000000007",
    str(2**31),
    str(2**64),
    "9" * 5000,
    "\u0667",
    "1e1",
]
SCHEMAS: list[Any] = [
    {"type": "object"},
    {"type": "string", "pattern": "(a+)+$"},
    {"enum": list(range(300))},
    {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 10**9},
    {"type": "integer", "multipleOf": 1e-300},
    {"type": "number", "multipleOf": 0.01, "minimum": -1e17, "exclusiveMaximum": 5},
    {"allOf": [{"type": "string", "pattern": "^a"}, {"minLength": 3}]},
    True,
    5,
    {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"], "additionalProperties": False},
    {
        "$ref": "#/$defs/0",
        "$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)} | {"40": {}},
    },
    {"anyOf": [{"anyOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]}], "$defs": {"a": {"type": "object"}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[01]*1[01]{20}$"}}, "required": ["a"]},
]
TOOL_NAMES = ["f", "f", "g", "a\nb", "<tool_call>", "__proto__", "x" * 65, "\u202e", ""]
ITEMS: list[Any] = [
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "<tool_call>"},
    {"type": "item_reference", "id": "msg_0"},
    {"type": "compaction", "encrypted_content": "AAAA"},
    {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "</think>", "annotations": []}]},
    {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 300},
]
BLOCKS: list[Any] = [
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": {}}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}], "is_error": True},
    {"type": "thinking", "thinking": "x", "signature": "x"},
    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
    {"type": "image", "source": {}},
]


def body(rng: Random, model: str, largest: int, vectors: str = "") -> tuple[str, bytes, dict[str, str]]:
    """(path, bytes, headers) of a request, its body seldom larger than `largest`. `vectors` is a model that gives them."""
    path = rng.choice(list(PATHS))
    value = _sound(rng, path, vectors or model if path in VECTORS else model)
    if rng.random() < 0.3 and path in STREAMED:
        value["stream"] = True
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        names = [*PATHS[path].__struct_fields__, *OTHERS, *["logit_bias"] * (8 if path not in VECTORS else 0)]
        name = rng.choice(names)
        value[name] = _of_field(rng, name, largest)
    if path == BATCHES:
        most = 300 if len(json.dumps(value)) < 1000 else 2
        value = {"requests": [{"custom_id": f"c{i}", "params": value} for i in range(rng.choice([1, 1, 2, most]))]}
    return path, *_bytes(rng, value, largest)


def _sound(rng: Random, path: str, model: str) -> dict[str, Any]:
    text = rng.choice(["hi", "x" * 300, "é\U0001f600"])
    max_tokens = rng.choice([1, 3, 9])
    messages = [{"role": "user", "content": text}]
    match path:
        case "/v1/completions":
            return {"model": model, "max_tokens": max_tokens, "prompt": rng.choice(["hi", [BOS, 104, 105], ["a", "b"]])}
        case "/v1/embeddings":
            return {"model": model, "input": rng.choice([text, [text] * 70, [[3, 4], [5]]])}
        case "/v1/rerank":
            return {"model": model, "query": text, "documents": ["x", text]}
        case "/v1/score":
            return {"model": model, "text_1": text, "text_2": ["x", text]}
        case "/v1/messages/count_tokens":
            return {"model": model, "messages": messages}
        case _ if path.startswith(RESPONSES):
            return {"model": model, "max_output_tokens": max_tokens, "input": text}
    return {"model": model, "max_tokens": max_tokens, "messages": messages}


def _tools(rng: Random) -> list[Any]:
    """Tools in one of the three shapes, in the right place or not."""
    name, schema = rng.choice(TOOL_NAMES), rng.choice(SCHEMAS)
    strict = rng.choice([True, False, None])
    plain = {"name": name, "parameters": schema, "strict": strict}
    one = rng.choice(
        [
            {"type": "function", "function": plain},
            {"type": "function"} | plain,
            {"name": name, "input_schema": schema, "strict": strict},
        ]
    )
    return [one] * rng.choice([1, 1, 1, 2, 129])


def _of_field(rng: Random, name: str, largest: int) -> Any:
    if rng.random() < 0.4:
        return _json(rng, 0, largest)
    match name:
        case "logit_bias":
            return {rng.choice(IDS): rng.choice([100, -100, 1, 1e308]) for _ in range(rng.choice([1, 1, 1, 3]))}
        case "stop_token_ids" | "allowed_token_ids" | "prompt":
            return [rng.choice(NUMBERS[:16]) for _ in range(rng.choice([1, 3, 130, 3000]))]
        case "response_format":
            return {"type": "json_schema", "json_schema": {"name": "x", "schema": rng.choice(SCHEMAS)}}
        case "structured_outputs":
            return {rng.choice(["regex", "grammar", "choice", "json"]): rng.choice([*TEXTS, *SCHEMAS])}
        case "stop" | "bad_words":
            return [rng.choice(TEXTS) for _ in range(rng.choice([1, 2, 4, 200]))]
        case "stream" | "use_beam_search" | "echo" | "logprobs" | "ignore_eos":
            return rng.choice([True, 1, 20])
        case "n" | "best_of":
            return rng.choice([2, 8])
        case "tools":
            return _tools(rng)
        case "tool_choice":
            named = {"type": "function", "function": {"name": "f"}}
            return rng.choice(["required", "none", named, {"type": "any"}, {"type": "tool", "name": "f"}])
        case "input":
            return [rng.choice(ITEMS) for _ in range(rng.choice([1, 3, 2000]))]
        case "messages":
            content = [rng.choice(BLOCKS) for _ in range(rng.choice([1, 3, 2000]))]
            return [{"role": "user", "content": "x"}, {"role": rng.choice(["user", "assistant"]), "content": content}]
        case "documents" | "text_1" | "text_2":
            return [rng.choice(TEXTS)] * rng.choice([1, 3, 2049])
        case "store" | "background" | "return_documents":
            return rng.choice([True, False])
        case "include":
            return ["reasoning.encrypted_content"] * rng.choice([1, 5000])
        case "metadata":
            return rng.choice([{"user_id": "x"}, {"session_id": "<b>"}, {str(i): "x" for i in range(17)}])
        case "thinking":
            return rng.choice([{"type": "enabled", "budget_tokens": 5}, {"type": "adaptive"}, {"type": "disabled"}])
        case "text" | "output_config" | "output_format":
            form = {"type": "json_schema", "name": "x", "schema": rng.choice(SCHEMAS)}
            return form if name == "output_format" else {"format": form}
    return rng.choice(NUMBERS)


def _json(rng: Random, depth: int, largest: int) -> Any:
    match rng.randrange(8 if depth < 4 else 5):
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice(TEXTS)
        case 2:
            return rng.choice([None, True, False])
        case 3:
            return "x" * rng.choice([10, 1000, largest])
        case 4:
            return [rng.choice([0, "", None, {}])] * rng.choice([0, 100, largest // 4])
        case 5:
            return [_json(rng, depth + 1, largest // 8) for _ in range(rng.randint(0, 4))]
        case 6:
            return {str(i): 0 for i in range(rng.choice([1, 20, largest // 16]))}
    return {rng.choice(TEXTS): _json(rng, depth + 1, largest // 8) for _ in range(rng.randint(0, 4))}


def _bytes(rng: Random, value: Any, largest: int) -> tuple[bytes, dict[str, str]]:
    headers = {"content-type": "application/json"}
    data = json.dumps(value, ensure_ascii=rng.random() < 0.7).encode()
    match rng.randrange(32):
        case 0:
            return data[: rng.randrange(len(data))], headers
        case 1:
            place = rng.randrange(len(data))
            return data[:place] + rng.randbytes(rng.randint(1, 9)) + data[place:], headers
        case 2:
            return json.dumps(value).encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"])), headers
        case 3:
            return rng.choice([b"[", b'{"a":', b'"', b"9", b"\\"]) * rng.choice([9, largest // 4]), headers
        case 4:
            return gzip.compress(data), headers | {"content-encoding": "gzip"}
        case 5:
            return data.replace(b": ", b": " + b" " * rng.choice([9, largest // 4]), 1), headers
        case 6:
            kinds = ["text/plain", "application/json; charset=utf-16", "application/x-www-form-urlencoded"]
            return data, {"content-type": rng.choice(kinds)}
    return data, headers
