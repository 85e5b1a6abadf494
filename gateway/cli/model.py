"""The models that `headgate up` serves: directories, hub ids, or the demo model of the repository.

This module handles only files and names. The worker loads the model and judges everything that needs weights.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.base.home import HomeError
from gateway.base.output_formats import TOOL_FORMATS
from gateway.configuration.file import Price
from workers.process.weight_files import NOT_NEEDED

DEMO_MODEL_ID = "headgate-demo"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class WantedModel:
    """A model as the operator names it."""

    location: str
    """A directory or a hub id."""
    id: str = ""
    """The name for clients. If it is empty, it follows from the location."""
    num_workers: int = 1
    """The number of workers; each has a copy of the model."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of this model's workers that differ from those of the others."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """The settings that gateways get for the model in addition to its path, by the fields of `ModelSource`."""
    price: Price | None = None
    """The first price, if headgate.toml has one."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which the operator may mean it."""
        return tuple(filter(None, (self.id, self.location, Path(self.location).name)))

    @classmethod
    def read(cls, text: str, num_workers: int = 1) -> WantedModel:
        """Reads `DIRECTORY_OR_HUB_ID` or `NAME=DIRECTORY_OR_HUB_ID`. Raises `HomeError`."""
        served, separator, location = text.partition("=")
        if not separator or Path(text).expanduser().exists():
            return cls(text, num_workers=num_workers)
        if not served or not location:
            raise HomeError(f"--model {text} cannot be read: it is a directory, a hub id, or NAME=DIRECTORY_OR_HUB_ID.")
        return cls(location, served, num_workers)


DEMO = WantedModel(DEMO_MODEL_ID)


def with_tool_formats(models: Sequence[WantedModel], given: Sequence[str]) -> tuple[WantedModel, ...]:
    """Returns the models with the formats of `FORMAT`, which is for all of them, or `MODEL=FORMAT`. Raises `HomeError`."""
    found = list(models)
    for text in given:
        name, _, tool_format = text.rpartition("=")
        if tool_format not in TOOL_FORMATS:
            raise HomeError(f"--tool-format {text} is not known; known are {', '.join(TOOL_FORMATS)}.")
        meant = [place for place, model in enumerate(found) if not name or name in model.names]
        if not meant:
            served = ", ".join(model.names[0] for model in found)
            raise HomeError(f"--tool-format {text} names no model that is served: these are {served}.")
        for place in meant:
            told = {**found[place].told, "tool_format": tool_format}
            found[place] = dataclasses.replace(found[place], told=told)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ServedModel:
    id: str
    """The name that clients put into `model`."""
    path: Path
    wanted: WantedModel = DEMO

    @property
    def source(self) -> dict[str, Any]:
        """The model as a gateway reads it from its settings."""
        return {"path": str(self.path), **self.wanted.told}


def resolve_all(models: Sequence[WantedModel]) -> tuple[ServedModel, ...]:
    """Finds the models. Raises `HomeError` with one sentence if a name leads nowhere, or if two models would have one
    name.
    """
    found: dict[str, ServedModel] = {}
    for wanted in models:
        model = resolve(wanted)
        if model.id in found:
            raise HomeError(
                f"Two models have the name {model.id}: give one of them another name, --model NAME={wanted.location}."
            )
        found[model.id] = model
    return tuple(found.values())


def resolve(wanted: WantedModel) -> ServedModel:
    """Finds one model. Raises `HomeError` if the location leads nowhere."""
    name = wanted.location
    path = Path(name).expanduser()
    if path.exists() or name.startswith(("/", ".", "~")):
        return ServedModel(wanted.id or path.resolve().name, _checked(path.resolve(), name), wanted)
    found = demo_model_path() if name == DEMO_MODEL_ID else _download(name)
    return ServedModel(wanted.id or name, _checked(found, name), wanted)


def demo_model_path() -> Path:
    """Returns `ops/demo_model/model`, which wheels contain as `workers.demo_model`."""
    spec = importlib.util.find_spec("workers.demo_model")
    locations = list(spec.submodule_search_locations or []) if spec else []
    if not locations:
        raise HomeError("The demo model is not part of this installation: name a model with --model.")
    return Path(locations[0]) / "model"


def _checked(path: Path, name: str) -> Path:
    if not path.is_dir():
        raise HomeError(f"The model {name} is not a directory.")
    for required in ("config.json", "tokenizer.json"):
        if not (path / required).is_file():
            raise HomeError(f"The model directory {path} has no {required}.")
        try:
            json.loads((path / required).read_bytes())
        except (OSError, ValueError):
            raise HomeError(f"The file {path / required} cannot be read or is not JSON.") from None
    try:
        Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise HomeError(f"The tokenizer of {path} cannot be read: {error}.") from None
    if not any(path.glob("*.safetensors")):
        raise HomeError(f"The model directory {path} has no weights in the safetensors format.")
    return path


def _download(name: str) -> Path:
    """Downloads a hub id, through the hub's own client and cache."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=NOT_NEEDED))
    except HFValidationError:
        raise HomeError(f"{name} is neither a model directory nor the id of a model on the hub.") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HomeError(f"The model {name} could not be fetched from the hub: {reason}") from None
