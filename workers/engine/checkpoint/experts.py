"""Reads checkpoints that hold experts one by one into models that hold them stacked: transformers 5 reads and writes
both.

It knows the names of Mixtral's and Qwen's experts. If a model's stacks have another layout, no tensor is taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from workers.engine.checkpoint.checkpoint import Stored
from workers.engine.checkpoint.names import Names
from workers.engine.layers.moe import stacks_experts
from workers.engine.values.errors import ModelError

_EXPERT = re.compile(r"^(?P<path>.*\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.weight$")
_PLACES = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
}
"""Maps the name of an expert's matrix to the stack it is in, and to its index among the matrices there."""
_MATRICES = {"gate_up_proj": 2, "down_proj": 1}


@dataclass(slots=True)
class _Stack:
    tensor: torch.Tensor
    waiting: set[tuple[int, int]]
    """Experts and matrices that were not read yet."""


class Stacks:
    """Collects a model's experts; a stack gets memory when its first expert is read."""

    def __init__(self, model: nn.Module, device: torch.device, names: Names) -> None:
        self._homes = {path: m for path, m in model.named_modules() if stacks_experts(m)}
        self._names = names
        self._device = device
        self._stacks: dict[str, _Stack] = {}

    def take(self, stored: Stored) -> bool:
        """Reads a tensor and returns True if it is one expert's matrix. Raises ModelError if the model has no such
        expert, or one of another shape."""
        match = self._match(stored.name)
        if match is None:
            return False
        path = match["path"]
        home = self._homes[path]
        attribute, matrix = _PLACES[match["part"]]
        stack = self._stack(path, attribute, home)
        expert = int(match["expert"])
        if (expert, matrix) not in stack.waiting:
            raise ModelError(f"The tensor {stored.name} is of an expert the model has no place for.")
        rows = stack.tensor[expert].chunk(_MATRICES[attribute])[matrix]
        if stored.shape != list(rows.shape):
            raise ModelError(
                f"The tensor {stored.name} has shape {stored.shape}, but the model needs {list(rows.shape)}."
            )
        rows.copy_(stored.read())
        stack.waiting.remove((expert, matrix))
        return True

    def _match(self, name: str) -> re.Match[str] | None:
        """Returns the parts of the name if it is a matrix of an expert whose stack the model has."""
        text = self._names.text(name)
        for form in self._names.forms(text) if text is not None and ".experts." in text else ():
            match = _EXPERT.match(form)
            if match is not None and match["part"] in _PLACES and match["path"] in self._homes:
                return match
        return None

    def whole(self) -> dict[str, torch.Tensor]:
        """Returns every stack that was begun, by its name in the model. Raises ModelError if one lacks an expert."""
        for name, stack in self._stacks.items():
            if stack.waiting:
                expert = min(stack.waiting)[0]
                raise ModelError(f"The checkpoint lacks expert {expert} of {name}.")
        return {name: stack.tensor for name, stack in self._stacks.items()}

    def _stack(self, path: str, attribute: str, home: nn.Module) -> _Stack:
        name = f"{path}.{attribute}"
        if name not in self._stacks:
            like = getattr(home, attribute)
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self._device)
            matrices = range(_MATRICES[attribute])
            waiting = {(expert, matrix) for expert in range(len(like)) for matrix in matrices}
            self._stacks[name] = _Stack(tensor, waiting)
        return self._stacks[name]
