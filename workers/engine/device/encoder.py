"""The model of a worker whose tokens see those after them: it takes whole inputs and returns vectors or scores. It
implements `plan.StepRunner`.

The model is transformers' own, loaded by transformers. Nothing of a pass is kept: there is no KV, and the blocks that
the scheduler counts stand for nothing but the tokens of a step. A step is divided into passes over inputs of similar
length, because a pass is padded to its longest input.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from workers.engine.checkpoint import checkpoint, dtypes, loader
from workers.engine.checkpoint.checkpoint import Checkpoint, cause_of
from workers.engine.device import guarded
from workers.engine.device.runner import RunnerSettings
from workers.engine.pooling import recipe as recipes
from workers.engine.pooling.pooler import Pending, Pooler
from workers.engine.pooling.recipe import Recipe
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import (
    AdapterWeights,
    Collected,
    GraphState,
    KernelState,
    LoadedAdapter,
    Row,
    RowResult,
    SampledToken,
    Ticket,
)
from workers.engine.values.probe import Pooled

log = logging.getLogger(__name__)

_PARTS = 4
"""Number of largest steps whose tokens have blocks: those that run, and those that are accepted meanwhile."""
_MAX_PADDING = 1.25
"""Largest number of tokens of a pass, padding included, for each token of its inputs."""
_TRIED = (3, 11)
"""Lengths of the inputs of the first pass."""
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Tolerance of results that were computed together with others, relative to the largest number."""
_HEADS = ("pooler.", "lm_head.", "cls.", "head.", "classifier.", "qa_outputs.", "vocab_", "discriminator_predictions.")
"""Beginnings of the names of layers that turn hidden states into something else than vectors."""


class EncoderRunner:
    """A loaded encoder. Raises ModelError, with one sentence, if the model cannot be served exactly."""

    lag = 0
    takes_trees = False
    bytes_per_block = 0
    eos_token_ids: tuple[int, ...] = ()
    kernels: tuple[KernelState, ...] = ()
    graphs: tuple[GraphState, ...] = ()

    def __init__(self, settings: RunnerSettings) -> None:
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._device = guarded.device_of(settings.device)
        found = checkpoint.find(settings.model)
        config = loader.read_config(found)
        self.vocabulary = loader.read_vocabulary(found.directory, config)
        recipe = recipes.read(found.directory, config, settings.task)
        chosen = dtypes.of_model(settings.dtype, self._device, config)
        event = {"event": "model_dtype", "dtype": chosen.name}
        log.info("%s is computed in %s: %s", settings.model, chosen.name, chosen.reason, extra=event)
        self._dtype = chosen.dtype
        self._model = _load(found, recipe, self._dtype, self._device)
        self._pooler = Pooler(recipe, config.hidden_size, self._device)
        self._pad_id = config.pad_token_id or 0
        self._takes_segments = (getattr(config, "type_vocab_size", 0) or 0) > 1
        self.abilities = self._pooler.abilities
        self.adapters: dict[str, LoadedAdapter] = {}
        self.root = found.identity(f"{config.model_type} of {chosen.name}{recipe.identity}")
        self.block_size = settings.block_size
        self.vocab_size: int = config.vocab_size
        limit = recipe.max_len or config.max_position_embeddings
        self.max_model_len: int = min(settings.max_model_len or limit, limit)
        self._max_tokens = settings.max_batch_tokens
        largest = max(self.max_model_len, self._max_tokens)
        self.num_blocks = settings.num_blocks or 1 + _PARTS * -(-largest // self.block_size)
        self._try(config)

    def launch(self, rows: Sequence[Row]) -> Ticket:
        return Collected(self.execute(rows))

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        """Runs one step and waits for its results. A row without a question draws a token that means nothing: it is the
        engine's own, and asks whether the device computes."""
        assert all(row.start == 0 for row in rows), "an encoder takes whole inputs"
        found = guarded.guarded(self._device, lambda: self._pooled(rows)).take(len(rows))
        return [
            RowResult((SampledToken(0),) * len(row.draws), probed=answer if isinstance(row.probe, Pooled) else None)
            for row, answer in zip(rows, found, strict=True)
        ]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Does nothing, because no block has a content."""

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        """Does nothing, because no block has a content."""

    def read_adapter(self, directory: Path) -> AdapterWeights:
        raise ModelError("Adapters cannot be combined with an encoder.")

    def add_adapter(self, name: str, weights: AdapterWeights) -> None:
        raise NotImplementedError

    def remove_adapter(self, name: str) -> None:
        raise NotImplementedError

    # --- a step ---

    def _pooled(self, rows: Sequence[Row]) -> Pending:
        results: list[tuple[int, torch.Tensor]] = []
        for indices in _passes([len(row.tokens) for row in rows], self._max_tokens):
            batch = [rows[index] for index in indices]
            probes = [row.probe if isinstance(row.probe, Pooled) else Pooled(len(row.tokens)) for row in batch]
            results += zip(indices, self._pass(batch, probes), strict=True)
        return Pending({}, results)

    def _pass(self, rows: Sequence[Row], probes: Sequence[Pooled]) -> list[torch.Tensor]:
        lengths = [len(row.tokens) for row in rows]
        inputs = self._inputs(rows, probes, max(lengths))
        if self._pooler.recipe.task == "score":
            return list(self._pooler.activated(self._model(**inputs).logits.float()))
        hidden: torch.Tensor = self._model(**inputs).last_hidden_state
        return self._pooler.finish(self._pooler.of_padded(hidden, lengths), probes)

    def _inputs(self, rows: Sequence[Row], probes: Sequence[Pooled], longest: int) -> dict[str, torch.Tensor]:
        """Returns the padded ids `[number, longest]`, the mask of the tokens, and their segments if the model has such."""
        ids, mask, segments = [], [], []
        for row, probe in zip(rows, probes, strict=True):
            number = len(row.tokens)
            missing = longest - number
            ids.append([*row.tokens, *[self._pad_id] * missing])
            mask.append([1] * number + [0] * missing)
            first = probe.segment or number
            segments.append([0] * first + [1] * (number - first) + [0] * missing)
        given = {"input_ids": ids, "attention_mask": mask}
        if self._takes_segments:
            given["token_type_ids"] = segments
        return {name: torch.tensor(value, device=self._device) for name, value in given.items()}

    def _try(self, config: PreTrainedConfig) -> None:
        """Runs two inputs together, and each alone. Raises ModelError if that makes a difference."""
        rows = [Row([(7 * n + 3) % self.vocab_size for n in range(length)], 0, []) for length in _TRIED]
        probes = [Pooled(length) for length in _TRIED]
        try:
            with torch.inference_mode():
                beside = torch.stack(self._pass(rows, probes))
                alone = torch.stack([self._pass([row], [probe])[0] for row, probe in zip(rows, probes, strict=True)])
        except Exception as error:  # a model's own code may raise anything
            cause = f"its first pass fails with {type(error).__name__}: {cause_of(error)}"
            raise ModelError(f"The model type '{config.model_type}' cannot be served: {cause}") from error
        error_found = ((beside - alone).abs().max() / alone.abs().max().clamp(min=1e-6)).item()
        if not error_found <= _TOLERANCE[self._dtype]:
            raise ModelError(
                f"The model type '{config.model_type}' cannot be served: a text that runs together with others differs by {error_found:.1e}"
                " of the largest number from the same text alone."
            )


def _passes(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yields the rows of each pass: of similar lengths, and together, padding included, not much above `max_tokens`."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    begun = 0
    while begun < len(order):
        longest, number, num_tokens = lengths[order[begun]], 1, lengths[order[begun]]
        for index in order[begun + 1 :]:
            padded, num_tokens = (number + 1) * longest, num_tokens + lengths[index]
            if padded > max(max_tokens, longest) or padded > _MAX_PADDING * num_tokens + longest:
                break
            number += 1
        yield order[begun : begun + number]
        begun += number


def _load(found: Checkpoint, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Loads the model by transformers, which knows the names of old checkpoints. Only safetensors are read, and no code
    of the checkpoint runs. Raises ModelError if a weight is missing or has no place."""
    kind: Any = AutoModelForSequenceClassification if recipe.task == "score" else AutoModel
    transformers_logging.set_verbosity_error()  # what it would tell about names is checked here
    try:
        model, told = kind.from_pretrained(
            found.directory,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # a library that reads anybody's files may raise anything
        raise ModelError(f"The model {found.directory} cannot be loaded: {cause_of(error)}") from error
    if recipe.task == "embed" and getattr(model, "pooler", None) is not None:
        model.pooler = None  # no pooling of sentence-transformers uses it, and many checkpoints lack it
        told["missing_keys"] = [name for name in told["missing_keys"] if not name.startswith("pooler.")]
    extra = [name for name in told["unexpected_keys"] if not (recipe.task == "embed" and name.startswith(_HEADS))]
    for what, names in (
        ("lacks", told["missing_keys"]),
        ("has", extra),
        ("has another shape of", told["mismatched_keys"]),
    ):
        if names:
            raise ModelError(
                f"The checkpoint {found.directory} {what} {len(names)} tensors, the first is {min(map(str, names))}."
            )
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded
