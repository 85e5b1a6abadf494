"""Vectors and scores are made of hidden states here: pooling, the layers after it, cutting, normalising.

It knows tensors and a recipe. It does not know how the hidden states were computed. The formulas are those of
sentence-transformers: the mean over all tokens of an input, special ones included, or the first or the last of them. A
score of labels is the softmax over two logits of the last token (Qwen3-Reranker's model card).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from workers.engine.checkpoint.checkpoint import Checkpoint, read_json
from workers.engine.pooling.recipe import Recipe
from workers.engine.values.abilities import Abilities
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row
from workers.engine.values.probe import Pooled

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Maps `[number, hidden]` to logits `[number, labels]`."""
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}


@dataclass(slots=True)
class Pending:
    """Answers to the probes of a step, which may still be on the device."""

    sums: dict[int, torch.Tensor]
    """Answers of rows that do not end their input, by row."""
    results: list[tuple[int, torch.Tensor]]
    """Vectors, `[size]` float32, by row."""

    def take(self, number: int) -> list[Any]:
        """Waits for the answers and returns one for each of `number` rows; None for a row that has none."""
        found: list[Any] = [self.sums.get(row) for row in range(number)]
        by_size: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for row, vector in self.results:
            by_size.setdefault(len(vector), []).append((row, vector))
        for same in by_size.values():  # one copy to the host for all vectors of a size
            matrix = torch.stack([vector for _, vector in same]).cpu().numpy().astype("<f4")
            for (row, _), vector in zip(same, matrix, strict=True):
                found[row] = vector.tobytes()
        return found


NOTHING = Pending({}, [])


class Dense:
    """A linear layer with an activation, as sentence-transformers stores it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        name = str(read_json(folder / "config.json").get("activation_function", "Tanh")).rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise ModelError(f"The activation {name} of {folder} is not supported.")
        self._activation = _ACTIVATIONS[name]
        try:
            weights = load_file(folder / "model.safetensors")
            self.weight = weights.pop("linear.weight").float().to(device)
            bias = weights.pop("linear.bias", None)
        except (OSError, SafetensorError, KeyError) as error:
            raise ModelError(f"The layer {folder} cannot be read: {error}.") from error
        if weights:
            raise ModelError(f"The layer {folder} has a tensor {next(iter(weights))} that a linear layer has not.")
        self._bias = None if bias is None else bias.float().to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._activation(F.linear(x, self.weight, self._bias))


class Pooler:
    def __init__(self, recipe: Recipe, hidden_size: int, device: torch.device, logits: Logits | None = None) -> None:
        """`logits` makes the logits of scores. Raises ModelError."""
        self.recipe = recipe
        self._logits = logits
        self._dense = [Dense(folder, device) for folder in recipe.dense]
        size = hidden_size
        for layer, folder in zip(self._dense, recipe.dense, strict=True):
            if layer.weight.shape[1] != size:
                raise ModelError(f"The layer {folder} takes {layer.weight.shape[1]} numbers and is given {size}.")
            size = layer.weight.shape[0]
        self.size = size

    @property
    def abilities(self) -> Abilities:
        recipe = self.recipe
        if recipe.task == "generate":
            return Abilities()
        is_whole = recipe.is_encoder
        reuses_kv = not is_whole and (recipe.task == "score" or recipe.mode == "last")
        if recipe.task == "score":
            return Abilities(
                ("score",),
                pairs="labels" if recipe.head == "labels" else "segments",
                reuses_kv=reuses_kv,
                is_whole=is_whole,
            )
        dimensions = tuple(n for n in recipe.dimensions if 0 < n < self.size)
        return Abilities(
            ("embed",), self.size, dimensions, recipe.any_dimensions, reuses_kv=reuses_kv, is_whole=is_whole
        )

    def of_rows(self, rows: Sequence[Row], starts: Sequence[int], hidden: torch.Tensor) -> Pending:
        """Pools rows of a packed pass. `hidden` is `[num_tokens, hidden]`; row i begins at `starts[i]`."""
        pooled = Pending({}, [])
        last: list[tuple[int, Pooled, torch.Tensor]] = []
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            if not isinstance(row.probe, Pooled):
                continue
            end = start + len(row.tokens)
            is_last = row.start + len(row.tokens) == row.probe.num_tokens
            if self.recipe.task == "score" or self.recipe.mode == "last":
                if is_last:
                    last.append((index, row.probe, hidden[end - 1]))
                continue
            total = hidden[start:end].float().sum(0)
            if row.probe.before is not None:
                total = total + row.probe.before
            if is_last:
                last.append((index, row.probe, total / row.probe.num_tokens))
            else:
                pooled.sums[index] = total
        if last:
            indices, probes, states = zip(*last, strict=True)
            results = self.finish(torch.stack(states), probes)
            pooled.results += zip(indices, results, strict=True)
        return pooled

    def of_padded(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Pools a padded batch: `[number, longest, hidden]` → `[number, hidden]` in float32."""
        if self.recipe.mode == "cls":
            return hidden[:, 0].float()
        ends = torch.tensor(lengths, device=hidden.device)
        if self.recipe.mode == "last":
            return hidden[torch.arange(len(ends), device=hidden.device), ends - 1].float()
        mask = torch.arange(hidden.shape[1], device=hidden.device) < ends[:, None]
        return (hidden.float() * mask[:, :, None]).sum(1) / ends[:, None]

    def finish(self, states: torch.Tensor, probes: Sequence[Pooled]) -> list[torch.Tensor]:
        """Returns the vectors of pooled states `[number, hidden]`, or one-number scores, in float32."""
        if self.recipe.task == "score":
            return self._scores(states, probes)
        vectors = states.float()
        for layer in self._dense:
            vectors = layer(vectors)
        if self.recipe.normalises:
            vectors = F.normalize(vectors, dim=-1)
        return [
            F.normalize(vector[: probe.dimensions], dim=-1) if probe.dimensions else vector
            for vector, probe in zip(vectors, probes, strict=True)
        ]

    def _scores(self, states: torch.Tensor, probes: Sequence[Pooled]) -> list[torch.Tensor]:
        assert self._logits is not None
        logits = self._logits(states).float()
        if self.recipe.head == "classifier":
            return list(self.activated(logits))
        labels = torch.tensor([probe.labels for probe in probes], device=logits.device)
        return list(torch.softmax(logits.gather(1, labels), dim=-1)[:, :1])

    def activated(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the scores `[number, 1]` of a classifier's logits."""
        return torch.sigmoid(logits) if self.recipe.squashes else logits


def classifier_of(found: Checkpoint, device: torch.device, dtype: torch.dtype) -> Logits:
    """Returns the head of a decoder that was trained to give one number for a text. Raises ModelError."""
    weights = {one.name: one.read() for one in found.tensors() if one.name.startswith("score.")}
    if set(weights) != {"score.weight"}:
        raise ModelError(f"The classifier of {found.directory} is not one matrix 'score.weight'.")
    weight = weights["score.weight"].to(device, dtype, copy=True)
    return lambda states: F.linear(states, weight)
