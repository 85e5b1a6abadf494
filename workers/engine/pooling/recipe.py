"""The recipe of a model's vectors or scores, as its directory says it: the task, the pooling, and the layers after it.

It reads the files that sentence-transformers writes (`modules.json` and the folders it names) and the configuration.
It does not read weights. A module that would change a vector and is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig

from workers.engine.checkpoint.checkpoint import read_json, read_json_list
from workers.engine.values.errors import ModelError
from workers.protocol.messages import Task

Mode = Literal["cls", "mean", "last"]
Head = Literal["", "classifier", "labels"]
AskedTask = Literal["auto", "generate", "embed", "score"]

ENCODERS = frozenset(
    {
        "bert",
        "camembert",
        "distilbert",
        "electra",
        "eurobert",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    }
)
"""Model types whose tokens see those after them, and that tests compare with transformers."""
_OFFSET_POSITIONS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta"})
"""Encoders that count positions from the padding id on, so that their table has places that no token uses."""
_CLASSIFIER = "ForSequenceClassification"
_MODES: Mapping[str, Mode] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_WITHOUT_EFFECT = frozenset({"Dropout"})
"""Modules of sentence-transformers that do nothing when a model is used."""


@dataclass(frozen=True, slots=True)
class Recipe:
    task: Task
    is_encoder: bool
    mode: Mode = "last"
    normalises: bool = True
    dense: tuple[Path, ...] = ()
    """Folders of linear layers after the pooling, in their order."""
    max_len: int | None = None
    """Largest number of tokens of an input that the model's makers name."""
    dimensions: tuple[int, ...] = ()
    any_dimensions: bool = False
    head: Head = ""
    squashes: bool = True
    """Whether a score is the sigmoid of the classifier's logit, and not the logit itself."""

    @property
    def identity(self) -> str:
        """Returns what tells vectors of this recipe from those of another with the same weights."""
        if self.task == "generate":
            return ""
        parts = (self.task, self.mode, self.normalises, [path.name for path in self.dense], self.head, self.squashes)
        return f" pooling={parts}"


def read(directory: Path, config: PreTrainedConfig, asked: AskedTask) -> Recipe:
    """Returns the recipe of a model directory. `asked` overrides the task that the files show. Raises ModelError."""
    modules = list(_modules(directory))
    task = _task(directory, config, modules) if asked == "auto" else asked
    is_encoder = config.model_type in ENCODERS and not getattr(config, "is_decoder", False)
    max_len = _max_len(directory, config, is_encoder=is_encoder)
    if task == "generate":
        return Recipe("generate", is_encoder=False)
    if task == "score":
        return _scoring(directory, config, max_len, is_encoder=is_encoder)
    mode: Mode = "mean" if is_encoder else "last"
    normalises, dense = not modules, []
    for kind, path in modules:
        if kind == "Pooling":
            mode = _mode(path)
        elif kind == "Normalize":
            normalises = True
        elif kind == "Dense":
            dense.append(path)
        elif kind != "Transformer" and kind not in _WITHOUT_EFFECT:
            raise ModelError(f"The model {directory} has a module {kind} after its pooling, which is not supported.")
    if mode == "cls" and not is_encoder:
        raise ModelError(f"The model {directory} pools the first token of a decoder, which has seen no other.")
    allowed = getattr(config, "matryoshka_dimensions", None) or ()
    any_dimensions = bool(getattr(config, "is_matryoshka", False)) and not allowed
    return Recipe("embed", is_encoder, mode, normalises, tuple(dense), max_len, tuple(sorted(allowed)), any_dimensions)


def _scoring(directory: Path, config: PreTrainedConfig, max_len: int | None, *, is_encoder: bool) -> Recipe:
    if not _has_classifier(config):
        if is_encoder:
            raise ModelError(f"The model {directory} is an encoder without a classifier, so it has no scores.")
        return Recipe("score", is_encoder=False, max_len=max_len, head="labels")
    if config.num_labels != 1:
        raise ModelError(f"The classifier of {directory} has {config.num_labels} labels; a score is one.")
    told = getattr(config, "sentence_transformers", None) or {}
    name = told.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    kind = str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ModelError(f"The scores of {directory} pass through {kind}, which is not supported.")
    return Recipe("score", is_encoder, max_len=max_len, head="classifier", squashes=kind == "Sigmoid")


def _task(directory: Path, config: PreTrainedConfig, modules: list[tuple[str, Path]]) -> Task:
    if _has_classifier(config):
        return "score"
    kinds = {kind for kind, _ in modules}
    settings = read_json(directory / "config_sentence_transformers.json")
    if settings.get("model_type") == "CrossEncoder" or "LogitScore" in kinds:
        return "score"
    is_encoder = config.model_type in ENCODERS and not getattr(config, "is_decoder", False)
    return "embed" if "Pooling" in kinds or is_encoder else "generate"


def _has_classifier(config: PreTrainedConfig) -> bool:
    return any(name.endswith(_CLASSIFIER) for name in config.architectures or ())


def _modules(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yields the kind and the folder of each module of sentence-transformers, in order."""
    for module in read_json_list(directory / "modules.json"):
        path = str(module.get("path", ""))
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelError(f"The file {directory / 'modules.json'} names a folder outside of the model.")
        yield str(module.get("type", "")).rpartition(".")[2], directory / path


def _mode(folder: Path) -> Mode:
    settings = read_json(folder / "config.json")
    named = settings.get("pooling_mode")
    chosen = [named] if named else [n for n, on in settings.items() if n.startswith("pooling_mode_") and on is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ModelError(f"The pooling {', '.join(map(str, chosen))} of {folder} is not one of cls, mean, last token.")
    return _MODES[chosen[0]]


def _max_len(directory: Path, config: PreTrainedConfig, *, is_encoder: bool) -> int | None:
    given: Any = read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    limit = getattr(config, "max_position_embeddings", None)
    if is_encoder and limit and config.model_type in _OFFSET_POSITIONS:
        limit -= (config.pad_token_id or 0) + 1
    bounds = [bound for bound in (given, limit if is_encoder else None) if isinstance(bound, int) and bound > 0]
    return min(bounds, default=None)
