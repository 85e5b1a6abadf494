"""The body of `POST /v1/completions`: fields, ranges, and the four shapes of a prompt."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

from msgspec import Meta

from gateway.base import errors
from gateway.schema import parameters
from gateway.schema.sampling import SamplingFields, check_shared
from gateway.schema.search import check_search

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    prompt: Any
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Chat's name of `max_tokens`, which some clients send beside it."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def max_output(self) -> int:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        """The number of logprobs of the prompt as the engine wants it: for the echo, or by themselves."""
        return max(self.num_logprobs if self.echo else -1, -1 if self.prompt_logprobs is None else self.prompt_logprobs)


def read(value: dict[str, Any]) -> tuple[CompletionFields, list[str]]:
    """Reads a body. Returns (the request, names of ignored fields). Raises `ApiError` 400."""
    fields, ignored = parameters.read(value, CompletionFields, "completions")
    check_shared(fields)
    check_search(fields)
    if fields.logprob_token_ids and fields.logprobs is None:
        raise errors.invalid("'logprob_token_ids' needs 'logprobs'.", "logprob_token_ids")
    if fields.max_output == 0 and not fields.echo:
        raise errors.invalid("'max_tokens' 0 needs 'echo': true.", "max_tokens")
    if fields.max_output == 0 and fields.use_beam_search:
        raise errors.invalid("A beam search needs tokens to search.", "max_tokens")
    return fields, ignored


def prompts(prompt: Any, vocab_size: int, param: str = "prompt", most: int = MAX_PROMPTS) -> list[str | array[int]]:
    """Returns the prompts of a string, a list of strings, token ids, or a list of id lists, of the field `param`. Raises
    `ApiError` 400.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise errors.invalid(f"The {param} must be text, token ids, or a list of these.", param)
    if type(prompt[0]) is int:
        return [_ids(param, prompt, vocab_size)]
    if len(prompt) > most:
        raise errors.invalid(f"At most {most:,} {param}s are allowed in one request.", param)
    if all(isinstance(one, str) for one in prompt):
        return list(prompt)
    return [_ids(f"{param}[{i}]", one, vocab_size) for i, one in enumerate(prompt)]


def _ids(where: str, ids: Any, vocab_size: int) -> array[int]:
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise errors.invalid("Token ids must be a list of integers.", where, "invalid_type")
    if not ids:
        raise errors.invalid("A list of token ids is empty.", where)
    if not (min(ids) >= 0 and max(ids) < vocab_size):
        raise errors.invalid("A token id is outside of the vocabulary.", where)
    return array("i", ids)
