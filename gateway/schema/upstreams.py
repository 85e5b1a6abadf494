"""The bodies and objects of `/admin/v1/upstreams`. The module holds shapes only. No object holds a credential."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import pydantic
from msgspec import Meta

from accounting.upstreams.calls import CallSums
from accounting.values import texts
from gateway.base import errors
from gateway.base.upstream_source import UpstreamCosts, UpstreamSource
from gateway.schema import forms
from gateway.schema.convert import OwnBody
from workers.process import masked


class NewUpstream(OwnBody, frozen=True):
    """A declaration. Fields that are not here are those of headgate.toml (docs/upstreams.md)."""

    name: Annotated[str, Meta(pattern=forms.UPSTREAM_NAME)]
    url: Annotated[str, Meta(max_length=2048)]
    models: dict[str, dict[str, Any]]
    kind: str = "openai"
    credential: Annotated[str, Meta(max_length=8192, pattern=forms.PRINTABLE)] = ""
    api_version: str = ""
    continuous_usage: bool = False
    output_field: str = "max_tokens"
    rank: int = 0
    max_running: int = 64
    connect_s: float = 5.0
    first_byte_s: float = 60.0
    idle_s: float = 30.0
    attempts: int = 3
    costs: dict[str, Any] | None = None
    """The API in which the provider says what it bills by the day."""
    cost_credential: Annotated[str, Meta(max_length=8192, pattern=forms.PRINTABLE)] = ""


def check_names(value: Mapping[str, Any]) -> None:
    """Raises `ApiError` 400 for a credential under another name, and says which one it has."""
    for name in ("key", "api_key", "key_env"):
        if name in value:
            sentence = f"Unknown parameter: '{name}'. Give the credential itself, as 'credential'."
            raise errors.invalid(sentence, name, "unknown_parameter")
    costs = value.get("costs")
    if isinstance(costs, Mapping) and "key_env" in costs:
        sentence = "Unknown parameter: 'costs.key_env'. Give the credential itself, as 'cost_credential'."
        raise errors.invalid(sentence, "costs.key_env", "unknown_parameter")


_SHOWN = 80


def source_of(fields: NewUpstream) -> UpstreamSource:
    """Returns the declaration, checked as a file's. Raises `ApiError` 400, and InvalidError for the name of a model."""
    for served, model in fields.models.items():
        texts.refuse_hidden(f"{served}{model.get('name', '')}", "models")
    given = {
        name: value
        for name, value in msgspec.structs.asdict(fields).items()
        if name not in ("name", "credential", "cost_credential")
    }
    if fields.cost_credential and fields.costs is None:
        given["costs"] = {}
    try:
        source = UpstreamSource.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors(include_input=False)[0]
        where, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if not where:  # a sentence about several fields
            raise errors.invalid(f"The upstream cannot be used: {said}.", "url") from None
        hint = ""
        if first["type"] == "extra_forbidden":
            known = [name for one in (UpstreamSource, UpstreamCosts, *_PARTS) for name in one.model_fields]
            meant = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
            hint = f" Did you mean {meant[0]}?" if meant else ""
        said = said.replace("Input should", "it should", 1)
        if said.startswith("must "):
            said = f"it {said}"
        shown = f", not {masked.text(fields.url)[:_SHOWN]!r}" if where == "url" else ""
        raise errors.invalid(f"Invalid value for '{where}': {said}{shown}.{hint}", where) from None
    if source.costs is not None and not fields.cost_credential:
        sentence = "Costs are read with a credential of their own: give it as 'cost_credential'."
        raise errors.invalid(sentence, "cost_credential", "missing_required_parameter")
    return source


_PARTS = (UpstreamSource.model_fields["models"].annotation.__args__[1],)  # type: ignore[union-attr]


def upstream(
    name: str,
    source: UpstreamSource,
    place: Mapping[str, Any],
    *,
    is_stored: bool,
    has_credential: bool,
    has_cost_credential: bool,
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "upstream",
        "kind": source.kind,
        "url": source.url,
        "declared_by": "api" if is_stored else "settings",
        "has_credential": has_credential,
        "costs": _costs(source, has_cost_credential),
        "models": sorted(source.models),
        "rank": source.rank,
        **place,
    }


def _costs(source: UpstreamSource, has_credential: bool) -> dict[str, Any] | None:
    """Shows where costs are read; None if they are not."""
    costs = source.costs
    if costs is None:
        return None
    return {"url": costs.url or source.url, "project": costs.project or None, "has_credential": has_credential}


def usage(found: Sequence[CallSums]) -> list[dict[str, Any]]:
    return [
        {
            "state": one.state,
            "drift": one.drift or None,
            "num_calls": one.num_calls,
            "stated_tokens": one.stated_tokens,
            "judged_tokens": one.judged_tokens,
            "expected_cost_micro_units": one.expected_cost,
            "stated_cost_micro_units": one.stated_cost,
        }
        for one in found
    ]
