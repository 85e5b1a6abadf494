"""The values that modules about upstreams hand each other: an upstream, a request to one, and what comes back. The
module is pure.

No value here shows a credential: it is kept out of every `repr`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from accounting.values.types import Rates, Usage
from gateway.base.upstream_source import UpstreamModel, UpstreamSource

Endpoint = Literal["chat", "completions", "embeddings"]
Counter = Callable[[str], int]
"""Counts the tokens of a text by the model's own tokenizer."""
MILLION = 1_000_000


@dataclass(frozen=True)
class Upstream:
    """A declared upstream with its credential."""

    name: str
    source: UpstreamSource
    credential: str = field(default="", repr=False)
    is_stored: bool = False
    """It was added over the API and is stored in SQL; otherwise the settings declare it."""
    cost_credential: str = field(default="", repr=False)
    """The credential of the cost API."""

    def model(self, served: str) -> UpstreamModel:
        return self.source.models[served]


def their_name(served: str, model: UpstreamModel) -> str:
    return model.name or served


def rates_of(model: UpstreamModel) -> Rates:
    """Returns what the provider charges, in micro-units for a million tokens."""
    read = model.input if model.cached is None else model.cached
    write = model.input if model.cache_write is None else model.cache_write
    return Rates(*(round(rate * MILLION) for rate in (read, write, model.input, model.output)))


@dataclass(frozen=True)
class Interval:
    """The knowledge of a number of tokens without the provider: at least, most likely, at most."""

    low: int
    best: int
    high: int


@dataclass(frozen=True)
class Ask:
    """A request as an upstream is asked, whatever it speaks."""

    endpoint: Endpoint
    body: Mapping[str, Any]
    """The fields that are passed on, without model, stream and the bound of the output."""
    num_choices: int
    max_tokens: int
    """The bound of each choice."""
    prompt: Interval
    """The tokens of the prompt. The highest number is what is reserved, and the most that is billed."""


@dataclass(frozen=True, slots=True)
class Stated:
    """The usage as the provider states it. `reasoning` is a part of the output."""

    usage: Usage
    reasoning: int = 0
    cost_micro_units: int | None = None
    """The cost of the request as the provider says it. None if it says nothing."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of an answer, in the terms of no provider."""

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    finish: str | None = None
    """stop, length or tool_calls."""
    stated: Stated | None = None
    is_last_statement: bool = False
    """The statement is that of the whole answer, not one on the way."""
    provider_id: str = ""
    vector: bytes = b""


class Garbage(Exception):
    """The upstream sent what is no answer of its API. The words are for our log."""


@dataclass(frozen=True)
class Outgoing:
    """One HTTP request to an upstream."""

    url: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
