"""A model directory on disk: its location, its content, and the identity of its KV.

It knows files. It does not know architectures or tensors' meaning. Only safetensors are read: they hold no code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open

from workers.engine.values.errors import ModelError
from workers.process.weight_files import NOT_NEEDED, weight_files

logger = logging.getLogger(__name__)

TELL_S = 1.0
"""The least time between two lines about the weights that are read."""
_DOWNLOAD = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
_SAMPLES, _SAMPLE_BYTES = 3, 3 << 9
"""Number and size of the samples of a tensor that go into the identity, from its begin to its end. Adapters that are
merged change whole matrices, but often few of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor from `start` to `end` of one dimension."""

    dim: int
    start: int
    end: int
    whole: int
    """Size of that dimension in the whole tensor."""

    def local(self, shape: Sequence[int]) -> list[int]:
        """Returns the shape of the part of a tensor with this whole shape."""
        return [self.end - self.start if dim == self.dim else n for dim, n in enumerate(shape)]

    def full(self, shape: Sequence[int]) -> list[int]:
        """Returns the whole shape of a tensor whose part has this shape."""
        return [self.whole if dim == self.dim else n for dim, n in enumerate(shape)]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a weight file, not read yet."""

    _file: Any
    name: str

    @property
    def shape(self) -> list[int]:
        return list(self._file.get_slice(self.name).get_shape())

    @property
    def dtype(self) -> str:
        """The dtype by safetensors' name: F32, I8, F8_E4M3 ..."""
        return str(self._file.get_slice(self.name).get_dtype())

    def read(self, part: Part | None = None) -> torch.Tensor:
        """Reads the tensor, or a part of it, on the host; bytes outside the part are not read."""
        found: torch.Tensor
        if part is None:
            found = self._file.get_tensor(self.name)
        else:
            before = (slice(None),) * part.dim
            found = self._file.get_slice(self.name)[(*before, slice(part.start, part.end))]
        return found


class ReadShare:
    """Logs how much of the weights is read, at most once a second: the log shows the progress to whoever waits."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = max(1, num_bytes)
        self._told_at = time.monotonic()

    def reached(self, num_bytes: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            logger.info("weights_read", extra={"share": round(num_bytes / self._num_bytes, 3)})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    directory: Path
    files: tuple[Path, ...]
    """The safetensors files, sorted."""

    def tensors(self) -> Iterator[Stored]:
        """Yields every tensor once, file by file; each has to be read before the next one is asked for. Raises
        ModelError if a file cannot be read."""
        sizes = [path.stat().st_size if path.exists() else 0 for path in self.files]
        told = ReadShare(sum(sizes))
        for number, path in enumerate(self.files):
            try:
                with safe_open(path, framework="pt", device="cpu") as shard:
                    names = list(shard.keys())
                    for at, name in enumerate(names):
                        yield Stored(shard, name)
                        told.reached(sum(sizes[:number]) + sizes[number] * (at + 1) // len(names))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"The weight file {path} cannot be read: {error}.") from error

    def has(self, ending: str) -> bool:
        """Says whether the name of a tensor ends so. Raises ModelError if a file cannot be read."""
        return any(found.name.endswith(ending) for found in self.tensors())

    def identity(self, extra: str) -> str:
        """Returns 32 hex digits; they are equal only for equal configuration, weights, tokenizer and `extra`. Reads
        samples of every tensor, not all of it. Raises ModelError if a file cannot be read."""
        digest = hashlib.blake2b(extra.encode(), digest_size=16)
        for name in ("config.json", *_TOKENIZER_FILES):
            path = self.directory / name
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"\n{name} {len(content)}\n".encode() + content)
        for path in self.files:
            digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            for piece in _samples(path):
                digest.update(piece)
        return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """Yields the header of a weight file, which has the tensors' names and places, and then samples of each tensor."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > path.stat().st_size:
            raise ModelError(f"The weight file {path} is not whole (a pointer of git-lfs?).")
        header = file.read(start - 8)
        yield header
        try:
            content = json.loads(header)
            places = sorted(tuple(one["data_offsets"]) for name, one in content.items() if name != "__metadata__")
            for first, end in places:
                length = min(_SAMPLE_BYTES, end - first)
                for sample in range(_SAMPLES):
                    file.seek(start + first + (end - first - length) * sample // (_SAMPLES - 1))
                    yield file.read(length)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelError(f"The weight file {path} cannot be read: {cause_of(error)}.") from error


def find(model: str, weights: bool = True) -> Checkpoint:
    """Finds a local directory, or else the snapshot of a hub id (downloaded if it is not there yet). Without `weights`
    a configuration alone is enough."""
    path = Path(model).expanduser()
    directory = path if path.exists() else _download(model, _DOWNLOAD if weights else ["*.json"])
    if not directory.is_dir():
        raise ModelError(f"The model {model} is a file, not a directory.")
    if not (directory / "config.json").is_file():
        raise ModelError(f"The model directory {directory} has no config.json.")
    files = weight_files(directory)
    if weights and not files:
        raise ModelError(
            f"The model directory {directory} has no .safetensors file; other formats can hold code and are not read."
        )
    return Checkpoint(directory, files)


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object from a JSON file; returns {} if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"The file {path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"The file {path} does not hold a JSON object.")
    return content


def cause_of(error: Exception) -> str:
    """Returns the text of a library's exception on one line, cut to 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + " ..."


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Reads a list of objects from a JSON file; returns [] if there is no file."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"The file {path} is not valid JSON: {error}.") from error
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise ModelError(f"The file {path} does not hold a JSON list of objects.")
    return content


def _download(model: str, patterns: list[str]) -> Path:
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"The model directory {model} does not exist.")
    try:
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=NOT_NEEDED))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ModelError(
            f"The model {model} is neither a directory nor a hub model that can be fetched: {cause_of(error)}"
        ) from error
