"""The bodies of `POST /v1/embeddings`, `/v1/rerank` and `/v1/score`: fields, ranges, and the shapes of inputs."""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.base import errors
from gateway.schema import completions
from gateway.schema.convert import convert
from gateway.schema.parameters import check_others

MAX_INPUTS = 2048
MAX_INSTRUCTION_CHARS = 4096
UNSUPPORTED = {
    "messages": "Give texts instead.",
    "stream": "There is one answer.",
    "normalize": "The model's own configuration says it.",
    "embed_dtype": "Vectors are float32.",
    "output_dtype": "Vectors are float32.",
    "endianness": "Base64 is little endian.",
    "prompt_name": "Put the prompt in front of the input.",
    "input_type": "Put the prompt in front of the input.",
    "task": "Put the prompt in front of the input.",
    "task_type": "Put the prompt in front of the input.",
    "late_chunking": "Each input is read by itself.",
    "embedding_type": "Vectors are float32.",
    "embedding_types": "Vectors are float32.",
    "output_dimension": "Use 'dimensions' instead.",
    "truncate": "Use 'truncate_prompt_tokens' instead.",
    "truncation": "Use 'truncate_prompt_tokens' instead.",
    "pooling": "The model's own configuration says it.",
    "pooling_type": "The model's own configuration says it.",
    "lora_path": "Name the adapter in 'model', as '<model>:<adapter>'.",
    "max_tokens_per_doc": "Use 'truncate_prompt_tokens' instead.",
    "max_chunks_per_doc": "Use 'truncate_prompt_tokens' instead.",
    "softmax": "",
    "activation": "",
    "use_activation": "",
}


_OFF = (False, "", "NONE")
"""The values of unsupported fields that ask for nothing."""


class VectorFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all three bodies have."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """The most tokens of an input, special ones included; -1 stands for the model's context. The rest is left out."""

    @property
    def metadata(self) -> dict[str, str] | None:
        return None

    @property
    def prompt_cache_key(self) -> str | None:
        return None


class EmbeddingFields(VectorFields, frozen=True, kw_only=True):
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    add_special_tokens: bool = True


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankFields(VectorFields, frozen=True, kw_only=True):
    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool = True
    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)] | None = None


class ScoreFields(VectorFields, frozen=True, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    instruction: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)] | None = None


F = TypeVar("F", bound=VectorFields)


def read(kind: type[F], value: dict[str, Any]) -> tuple[F, list[str]]:
    """Reads a body. Returns (the request, names of ignored fields). Raises `ApiError` 400."""
    honoured = frozenset(kind.__struct_fields__)
    ignored = check_others(value, honoured | {name for name in UNSUPPORTED if value.get(name) in _OFF}, UNSUPPORTED)
    fields = convert(value, kind)
    if fields.truncate_prompt_tokens == 0:
        raise errors.invalid("An input keeps at least 1 token; -1 keeps as many as fit.", "truncate_prompt_tokens")
    return fields, ignored


def inputs(fields: EmbeddingFields, vocab_size: int) -> list[str | array[int]]:
    """Returns the inputs, none of them empty. Raises `ApiError` 400."""
    found = completions.prompts(fields.input, vocab_size, "input", MAX_INPUTS)
    for index, one in enumerate(found):
        if not len(one):
            where = "input" if isinstance(fields.input, str) else f"input[{index}]"
            raise errors.invalid("An input is empty.", where)
    return found


def documents(fields: RerankFields) -> list[str]:
    """Returns the documents' texts. Raises `ApiError` 400."""
    texts = [one if isinstance(one, str) else one.text for one in fields.documents]
    _check_number(len(texts), "documents")
    _check_filled([fields.query], "query")
    _check_filled(texts, "documents")
    return texts


def pairs(fields: ScoreFields) -> list[tuple[str, str]]:
    """Returns the pairs to score: each first text with the second of its place, or one text with all. Raises `ApiError`
    400.
    """
    first, second = ([text] if isinstance(text, str) else text for text in (fields.text_1, fields.text_2))
    for name, texts in (("text_1", first), ("text_2", second)):
        _check_number(len(texts), name)
        _check_filled(texts, name)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise errors.invalid(
            f"'text_1' has {len(first)} texts and 'text_2' has {len(second)}: give as many, or one text first.",
            "text_2",
        )
    return list(zip(first, second, strict=True))


def _check_number(number: int, param: str) -> None:
    if not 1 <= number <= MAX_INPUTS:
        raise errors.invalid(f"There must be 1 to {MAX_INPUTS:,} texts, and there are {number:,}.", param)


def _check_filled(texts: list[str], param: str) -> None:
    for index, text in enumerate(texts):
        if not text:
            raise errors.invalid("A text is empty.", param if len(texts) == 1 else f"{param}[{index}]")
