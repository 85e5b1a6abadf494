"""The fields that chat and completions share, their ranges, and their values on the wire."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.base import errors
from gateway.structured.form import ResponseFormat, StructuredOutputs
from workers.protocol.messages import SamplingParams

MAX_CHOICES = 128
MAX_BEAMS = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 128
MAX_SCORED_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 100
MAX_ALLOWED_TOKENS = 16_384
INT64 = 2**63
_OF_SHORTER = {"grammar": "grammar", "json_schema": "json", "ebnf": "grammar", "regex": "regex"}
"""The fields of `structured_outputs` by the shorter parameters that stand for them. Other servers have those."""

Bound = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = tuple[Annotated[int, Meta(ge=0)], ...]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[Tokens, Meta(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[Tokens, Meta(max_length=MAX_ALLOWED_TOKENS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: Any = None
    ebnf: str | None = None
    regex: str | None = None
    logprob_token_ids: Annotated[Tokens, Meta(max_length=MAX_SCORED_TOKENS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def num_drawn(self) -> int:
        """The number of drawn choices, of which the best `num_choices` are shown; in a search it is the number of
        beams.
        """
        return self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int:
        """The number of logprobs that the client wants to see; -1 for none."""
        return -1

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def check_shared(fields: SamplingFields) -> None:
    """Checks rules that types cannot express. Raises `ApiError` 400."""
    stops = fields.stops
    if len(stops) > MAX_STOPS:
        raise errors.invalid(f"At most {MAX_STOPS} stop strings are allowed.", "stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise errors.invalid(f"A stop string has 1 to {MAX_STOP_CHARS} characters.", "stop")
    if fields.stream_options is not None and not fields.stream:
        raise errors.invalid("'stream_options' needs 'stream': true.", "stream_options")
    if fields.continuous_usage and not fields.include_usage:
        raise errors.invalid(
            "'continuous_usage_stats' needs 'include_usage': true.", "stream_options.continuous_usage_stats"
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise errors.invalid("'prompt_logprobs' cannot be streamed.", "prompt_logprobs")
    check_truncation(fields.truncate_prompt_tokens, fields.truncation_side)
    if fields.metadata is not None and (
        len(fields.metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in fields.metadata.items())
    ):
        raise errors.invalid(
            "The metadata may have at most 16 pairs, with keys of 64 and values of 512 characters at most.", "metadata"
        )
    if fields.service_tier not in {None, "auto", "default", "priority", "fast", "scale"}:
        code = "unsupported_parameter" if fields.service_tier == "flex" else "invalid_value"
        raise errors.invalid("This service tier is not offered.", "service_tier", code)


def check_truncation(keep: int | None, side: str | None) -> None:
    """Checks how many tokens of a prompt are kept, and which. Raises `ApiError` 400."""
    if keep == 0:
        raise errors.invalid("It must be -1, or 1 and more.", "truncate_prompt_tokens")
    if side is not None and keep is None:
        raise errors.invalid("'truncation_side' needs 'truncate_prompt_tokens'.", "truncation_side")


def outputs_of(fields: SamplingFields) -> tuple[StructuredOutputs | None, str]:
    """Returns the form that is wanted beside `response_format`, and the parameter's name if it is one of the shorter
    ones, which other servers have. Raises `ApiError` 400 for more than one form.
    """
    given = [name for name in ("structured_outputs", *_OF_SHORTER) if getattr(fields, name) is not None]
    if len(given) > 1:
        raise errors.invalid(f"'{given[1]}' cannot be combined with '{given[0]}'.", given[1])
    if not given or fields.structured_outputs is not None:
        return fields.structured_outputs, ""
    (name,) = given
    return StructuredOutputs(**{_OF_SHORTER[name]: getattr(fields, name)}), name


def check_constrained(fields: SamplingFields) -> None:
    """Refuses fields that, with a grammar, could change its text or leave no token. Raises `ApiError` 400. Stop strings
    may cut the text: the choice then names the string, and has the beginning of a text of the form.
    """
    given = {
        "stop_token_ids": bool(fields.stop_token_ids),
        "min_tokens": bool(fields.min_tokens),
        "bad_words": bool(fields.bad_words),
        "allowed_token_ids": bool(fields.allowed_token_ids),
        "include_stop_str_in_output": bool(fields.include_stop_str_in_output),
        "use_beam_search": bool(fields.use_beam_search),
    }
    for name, present in given.items():
        if present:
            raise errors.invalid(f"'{name}' cannot be combined with a form of the output.", name)


def check_vocabulary(fields: SamplingFields, vocab_size: int) -> None:
    """Refuses ids that the model does not have. Raises `ApiError` 400."""
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        if any(token >= vocab_size for token in getattr(fields, name) or ()):
            raise errors.invalid("A token id is outside of the vocabulary.", name)
    bias = fields.logit_bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise errors.invalid(f"At most {MAX_LOGIT_BIAS} entries are allowed.", "logit_bias")
    if not all(_is_token_id(key, vocab_size) for key in bias):
        raise errors.invalid(
            f"A key must be a token id from 0 to {vocab_size - 1}, in digits without leading zeros.", "logit_bias"
        )


def _is_token_id(key: str, vocab_size: int) -> bool:
    """Accepts one spelling for each id: with several, a client could bias a token twice. Only short keys
    are converted.
    """
    return (
        len(key) <= len(str(vocab_size))
        and key.isascii()
        and key.isdigit()
        and str(int(key)) == key
        and int(key) < vocab_size
    )


def check_bans(
    fields: SamplingFields, bad_words: Sequence[Sequence[int]], vocab_size: int, end_ids: Sequence[int]
) -> None:
    """Checks that some token is left to be drawn first. Raises `ApiError` 400."""
    banned = {word[0] for word in bad_words if len(word) == 1}
    if fields.min_tokens:
        banned.update(end_ids, fields.stop_token_ids or ())
    if all(token in banned for token in fields.allowed_token_ids or range(vocab_size)):
        name = "bad_words" if fields.allowed_token_ids is None else "allowed_token_ids"
        raise errors.invalid("No token is left that may be drawn.", name)


class Defaults(msgspec.Struct, frozen=True):
    """The defaults of a model's own generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def sampling_params(
    fields: SamplingFields, defaults: Defaults, logprobs: int, bad_words: tuple[tuple[int, ...], ...] = ()
) -> SamplingParams:
    """Returns the sampling parameters. `logprobs` is -1 for none. `bad_words` are token ids. A seed is drawn if the
    client gave none.
    """
    seed = secrets.randbits(63) if fields.seed is None else fields.seed % 2**64
    return SamplingParams(
        seed=seed,
        temperature=_or(fields.temperature, defaults.temperature),
        top_k=max(0, _or(fields.top_k, defaults.top_k)),
        top_p=_or(fields.top_p, defaults.top_p),
        min_p=_or(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple((int(key), value) for key, value in (fields.logit_bias or {}).items()),
        logprobs=logprobs,
        logprob_token_ids=tuple(dict.fromkeys(fields.logprob_token_ids or ())),
        stop_token_ids=fields.stop_token_ids or (),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        bad_words=bad_words,
        allowed_token_ids=tuple(dict.fromkeys(fields.allowed_token_ids or ())),
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
