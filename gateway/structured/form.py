"""The form that a client wants its output to have: JSON schema, JSON object, expression, choice or grammar become one
grammar.

The module is pure. The grammar is Lark text, the one form that workers know; `Form` also says whether a finished text
has the form.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.base import errors
from gateway.structured import check, ebnf, lark, regex
from gateway.structured.charset import literal
from gateway.structured.document import ANY_OBJECT, Document, SchemaError
from gateway.structured.read_schema import read
from gateway.structured.rules import RulesError

MAX_BYTES = 64 * 1024
"""The largest size of a form that a client sends, in bytes."""
MAX_CHOICES = 1024
MAX_POINTER = 256


@dataclass(frozen=True)
class Form:
    grammar: str
    is_kept: Callable[[str], bool]
    """Returns whether a text that ended with `stop` has the form, as far as this can be checked again."""
    keeps_call: Callable[[str, str], bool] = lambda name, arguments: True
    """Returns whether the arguments of a finished call of this name have the form."""


class JsonSchema(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema: Any = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: JsonSchema | None = None
    schema: Any = None
    """A schema without a name; it counts where there is no `json_schema`."""


class StructuredOutputs(msgspec.Struct, frozen=True):
    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def form_of(wanted: ResponseFormat | None, outputs: StructuredOutputs | None, name: str = "") -> Form | None:
    """Returns the form; None means plain text. `name` is the body's own parameter that `outputs` was made of, if it was.
    Raises `ApiError` 400. May take 100 ms for a large schema.
    """
    if outputs is not None:
        if wanted is not None and wanted.type != "text":
            raise errors.invalid(
                f"'{name or 'structured_outputs'}' cannot be combined with 'response_format'.",
                name or "structured_outputs",
            )
        return _of_outputs(outputs, name)
    match wanted:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_schema", json_schema=JsonSchema() as given) if given.schema is not None:
            return _of_schema(given.schema, "response_format.json_schema.schema")
        case ResponseFormat(type="json_schema", json_schema=JsonSchema(), schema=None):
            return _of_document(Document())
        case ResponseFormat(type="json_object") if wanted.schema in (None, {}):
            return _of_document(Document(ANY_OBJECT))
        case ResponseFormat(type="json_object" | "json_schema") if wanted.schema is not None:
            return _of_schema(wanted.schema, "response_format.schema")
        case ResponseFormat(type="json_schema"):
            raise errors.invalid(
                "Missing required parameter: 'response_format.json_schema'.",
                "response_format.json_schema",
                "missing_required_parameter",
            )
        case _:
            raise errors.invalid("The type must be 'text', 'json_object' or 'json_schema'.", "response_format.type")


def _of_outputs(outputs: StructuredOutputs, name: str) -> Form:
    given = [name for name in outputs.__struct_fields__ if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise errors.invalid(
            "Exactly one of 'json', 'regex', 'choice', 'grammar', 'json_object' is needed.", "structured_outputs"
        )
    where = name or f"structured_outputs.{given[0]}"
    match given[0]:
        case "json":
            return _of_schema(_decoded(outputs.json, where), where)
        case "json_object":
            if not outputs.json_object:
                raise errors.invalid("It must be true, or absent.", where)
            return _of_document(Document(ANY_OBJECT))
        case "regex":
            return _of_regex(outputs.regex or "", where)
        case "choice":
            return _of_choice(outputs.choice or [], where)
        case _:
            return _of_grammar(outputs.grammar or "", where)


def _decoded(schema: Any, where: str) -> Any:
    """Decodes a schema that came as text; returns any other value unchanged."""
    if not isinstance(schema, str):
        return schema
    _check_size(schema, where)
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        raise _unsupported("The schema is not JSON.", where) from None


def _of_schema(schema: Any, where: str) -> Form:
    return _of_document(document_of(schema, where))


def document_of(schema: Any, where: str) -> Document:
    """Reads a schema. Raises `ApiError` 400 with `where` and a JSON pointer."""
    _check_size(msgspec.json.encode(schema), where)  # a quick check, for a schema of megabytes
    _check_size(json.dumps(schema, ensure_ascii=False), where)
    try:
        return read(schema)
    except SchemaError as error:
        place = where + error.pointer if len(error.pointer) <= MAX_POINTER else where
        raise _unsupported(str(error).strip(), place) from None
    except RecursionError:
        raise too_deep(where) from None


def _of_document(document: Document) -> Form:
    return Form(lark.of_schema(document.whole()), lambda text: check.is_valid(document, text))


def _of_regex(pattern: str, where: str) -> Form:
    _check_size(pattern, where)
    try:
        body = regex.whole(pattern)
    except regex.RegexError as error:
        raise _unsupported(str(error), where) from None
    return Form(lark.of_expression(body), lambda text: True)


def _of_choice(choices: list[str], where: str) -> Form:
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise errors.invalid(f"1 to {MAX_CHOICES} strings that are not empty are needed.", where)
    _check_size("".join(choices), where)
    body = "|".join(map(literal, dict.fromkeys(choices)))
    return Form(lark.of_expression(body), frozenset(choices).__contains__)


def _of_grammar(text: str, where: str) -> Form:
    _check_size(text, where)
    try:
        written = lark.of_rules(ebnf.read(text))
    except RulesError as error:
        raise _unsupported(f"The grammar is not EBNF: {error}.", where) from None
    except RecursionError:
        raise _unsupported("The grammar is nested too deep.", where) from None
    return Form(written, lambda text: True)


def too_deep(where: str) -> errors.ApiError:
    return _unsupported("The references of the schema lead too deep.", where)


def _check_size(text: str | bytes, where: str) -> None:
    if len(text.encode() if isinstance(text, str) else text) > MAX_BYTES:
        raise _unsupported(f"This may have at most {MAX_BYTES // 1024} KiB.", where)


def _unsupported(message: str, param: str) -> errors.ApiError:
    return errors.invalid(message, param, "unsupported_schema")
