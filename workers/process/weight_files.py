"""The weight files of a model directory. It knows names of files, and the index of a model in several."""

from __future__ import annotations

import json
from pathlib import Path

NOT_NEEDED = ["consolidated*", "original/*"]
"""Files of a hub model that are not downloaded: its weights once more, in the form of those who made it."""


def weight_files(directory: Path) -> tuple[Path, ...]:
    """Returns the safetensors files that the model consists of, sorted, chosen as transformers does: others beside them,
    such as Mistral's consolidated.safetensors, have the same weights under other names."""
    found = tuple(sorted(directory.glob("*.safetensors")))
    whole = directory / "model.safetensors"
    if whole in found:
        return (whole,)
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_bytes())
        named = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return found
    return tuple(path for path in found if path.name in named)
