"""The served models as the settings name them: from the variable, or from a file that may change while the gateway
serves.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from gateway.base.settings import GatewaySettings, ModelSource, SettingsError


def of(settings: GatewaySettings) -> Mapping[str, ModelSource]:
    """Returns the models by name. Raises `SettingsError` for a file that cannot be used."""
    path = settings.models_file
    if path is None:
        return settings.models
    if path.suffix == ".toml":
        models = table(path).get("models", {})
        fields = ModelSource.model_fields
        entries = {name: _only(entry, fields) for name, entry in models.items()} if isinstance(models, dict) else models
        return _sources(path, entries)
    try:
        return _sources(path, json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise SettingsError(f"The file {path} with the served models cannot be read: {error}.") from None


def foreign(environ: Mapping[str, str]) -> frozenset[str]:
    """Returns the names of the models that upstreams of the settings answer for; none if they cannot be read."""
    try:
        sources = json.loads(environ.get("HEADGATE_UPSTREAMS") or "{}")
        return frozenset(name for source in sources.values() for name in source["models"])
    except (ValueError, AttributeError, TypeError, KeyError):
        return frozenset()  # the gateway names the fault


def table(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises `SettingsError`, with line and column where it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"The file {path} is not TOML: {error}.") from None
    except UnicodeDecodeError:
        raise SettingsError(f"The file {path} is not TOML: it is not UTF-8 text.") from None
    except OSError as error:
        raise SettingsError(f"The file {path} cannot be read: {error.strerror}.") from None


def place(error: pydantic.ValidationError) -> str:
    """Returns the place of the first fault, like `models.0.path`."""
    return ".".join(map(str, error.errors(include_input=False)[0]["loc"]))


def fault(error: pydantic.ValidationError) -> str:
    """Returns the first fault as `where: what was expected, not what was given`."""
    first = error.errors()[0]
    expected = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "missing" else f", not {str(first['input'])[:80]!r}"
    return f"{place(error)}: {expected[:1].lower()}{expected[1:]}{given}"


def _only(entry: Any, fields: Mapping[str, Any]) -> Any:
    """Leaves out settings that are for workers only."""
    return {name: value for name, value in entry.items() if name in fields} if isinstance(entry, dict) else entry


def _sources(path: Path, entries: Any) -> dict[str, ModelSource]:
    try:
        return pydantic.TypeAdapter(dict[str, ModelSource]).validate_python(entries)
    except pydantic.ValidationError as error:
        raise SettingsError(f"The models of the file {path} cannot be used: {fault(error)}.") from None
