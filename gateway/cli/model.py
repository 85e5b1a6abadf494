"""The model that `headgate up` serves: a directory, a hub id, or the demo model of the repository.

This module handles only files and names. The worker loads the model and judges everything that needs weights.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from gateway.base.home import HomeError

DEMO_MODEL_ID = "headgate-demo"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class ServedModel:
    id: str
    """The name that clients put into `model`."""
    path: Path


def resolve(name: str | None) -> ServedModel:
    """Finds the model. Raises `HomeError` with one sentence if the name leads nowhere."""
    if name is None:
        return ServedModel(DEMO_MODEL_ID, _checked(demo_model_path(), DEMO_MODEL_ID))
    path = Path(name).expanduser()
    if path.exists() or name.startswith(("/", ".", "~")):
        return ServedModel(path.resolve().name, _checked(path.resolve(), name))
    return ServedModel(name, _checked(_download(name), name))


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
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except HFValidationError:
        raise HomeError(f"{name} is neither a model directory nor the id of a model on the hub.") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise HomeError(f"The model {name} could not be fetched from the hub: {reason}") from None
