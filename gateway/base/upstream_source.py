"""The declaration of an upstream: a server of somebody else that answers for models. Shapes and ranges only.

The credential itself is not here: it is named by a variable, or sealed in SQL.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic

Kind = Literal["openai", "anthropic", "azure"]
Task = Literal["generate", "embed"]

UpstreamName = Annotated[str, pydantic.StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
ServedName = Annotated[str, pydantic.StringConstraints(min_length=1, max_length=256, pattern=r"^[^\s\x00-\x1f]+$")]
Rate = Annotated[float, pydantic.Field(ge=0, le=1e6)]
MAX_UPSTREAMS, MAX_MODELS = 64, 256
_VISIBLE = re.compile(r"[!-~]{1,2048}")
VARIABLE = r"^([A-Z_][A-Z0-9_]*)?$"


class UpstreamModel(pydantic.BaseModel, frozen=True, extra="forbid"):
    """A model as the upstream has it. The name under which it is served here is the key of the table."""

    name: str = pydantic.Field(default="", max_length=256)
    """The upstream's own name of the model. If it is empty, it is the served name."""
    task: Task = "generate"
    """`generate` for chat and completions, `embed` for embeddings."""
    max_model_len: int = pydantic.Field(default=131_072, ge=2)
    """The longest context, prompt and answer together."""
    max_output_tokens: int = pydantic.Field(default=4096, ge=1)
    """The most tokens of one answer, and its bound where the request names none."""
    tokenizer: str = ""
    """A directory with the model's `tokenizer.json`: prompts and answers are then counted exactly as a witness."""
    vector_size: int = pydantic.Field(default=0, ge=0, le=65_536)
    """The numbers of a vector, for embeddings; 0: not known."""
    input: Rate = 0.0
    """The provider's charge for a million tokens of prompts, in the price sheet's currency."""
    cached: Rate | None = None
    """Its charge for a million cached tokens. If it is unset, it is `input`."""
    cache_write: Rate | None = None
    """Its charge for a million tokens written to its cache. If it is unset, it is `input`."""
    output: Rate = 0.0
    """Its charge for a million tokens of answers."""
    hides_reasoning: bool = False
    """The model bills reasoning that it does not send. Without it, such tokens count as false usage."""


class UpstreamCosts(pydantic.BaseModel, frozen=True, extra="forbid"):
    """The API in which the provider says what it bills by the day. It speaks as the upstream's `kind` does."""

    url: str = ""
    """The base URL of the cost API. If it is empty, it is the upstream's."""
    key_env: str = pydantic.Field(default="", pattern=VARIABLE)
    """The environment variable with the credential for it, which providers call an admin key. If it is empty, the stored
    credential is sent."""
    project: str = pydantic.Field(default="", pattern=r"^[A-Za-z0-9_-]{0,128}$")
    """The one project (OpenAI) or workspace (Anthropic; `default` for the one without an id) whose costs count. If it is
    empty, all of the organization's count."""

    @pydantic.field_validator("url")
    @classmethod
    def _is_base_url(cls, value: str) -> str:
        return _base_url(value) if value else value

    @pydantic.model_validator(mode="before")
    @classmethod
    def _has_no_key(cls, value: Any) -> Any:
        return _without_key(value)


class UpstreamSource(pydantic.BaseModel, frozen=True, extra="forbid"):
    """An upstream as it is declared, in headgate.toml or by `headgate upstreams add`."""

    kind: Kind = "openai"
    """`openai` for any server that speaks OpenAI's API (vLLM, SGLang, llama.cpp, TGI, OpenRouter), `anthropic`, `azure`."""
    url: str
    """The base URL, such as `https://api.openai.com/v1`; of Azure the resource, `https://NAME.openai.azure.com`."""
    key_env: str = pydantic.Field(default="", pattern=VARIABLE)
    """The environment variable with the credential. If it is empty, the stored credential is sent, or none."""
    models: dict[ServedName, UpstreamModel] = pydantic.Field(min_length=1, max_length=MAX_MODELS)
    """The models that it answers for, by the names under which they are served."""
    api_version: str = pydantic.Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """The version that Azure (`api-version`) or Anthropic (`anthropic-version`) is asked for."""
    continuous_usage: bool = False
    """Ask for the usage in each chunk, which vLLM, SGLang and Headgate can."""
    output_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The field that bounds an answer of chat."""
    rank: int = pydantic.Field(default=0, ge=0, le=1000)
    """The upstream of a model with the lowest rank is tried first."""
    max_running: int = pydantic.Field(default=64, ge=1, le=10_000)
    """The most requests that run there at one time."""
    connect_s: float = pydantic.Field(default=5.0, gt=0, le=60)
    """The longest time to connect."""
    first_byte_s: float = pydantic.Field(default=60.0, gt=0, le=600)
    """The longest time to the first event of an answer."""
    idle_s: float = pydantic.Field(default=30.0, gt=0, le=600)
    """The longest silence within an answer."""
    attempts: int = pydantic.Field(default=3, ge=1, le=6)
    """The most attempts of one request, over all upstreams of the model, and only before the first token."""

    costs: UpstreamCosts | None = None
    """The API in which OpenAI or Anthropic says what it bills by the day. If it is unset, nothing is read."""

    @pydantic.field_validator("url")
    @classmethod
    def _is_base_url(cls, value: str) -> str:
        return _base_url(value)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _has_no_key(cls, value: Any) -> Any:
        return _without_key(value)

    @pydantic.model_validator(mode="after")
    def _has_a_cost_api(self) -> UpstreamSource:
        if self.costs is not None and self.kind == "azure":
            raise ValueError("no costs can be read of the kind azure: only of openai and anthropic")
        return self


def _base_url(value: str) -> str:
    """Returns the URL without a slash at its end. Raises ValueError."""
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not _VISIBLE.fullmatch(value) or "@" in value or "?" in value or "#" in value:
        raise ValueError("must be a base URL like https://api.example.com/v1, without user, query or fragment")
    return value.rstrip("/")


def _without_key(value: Any) -> Any:
    if isinstance(value, dict) and any(name in value for name in ("key", "api_key", "token")):
        raise ValueError("a credential does not stand here: name its variable with key_env")
    return value
