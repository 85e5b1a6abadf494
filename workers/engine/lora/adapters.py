"""The LoRA adapters of a worker: PEFT's directories are read into slots next to the hand-written layers.

It owns the mapping of names to slots. It knows PEFT's names and the layers of `llama`; a model with other layers takes
no adapters. It does not know tenants, or who may use which adapter. A feature that an adapter needs and that is not
supported is refused by its name, because the tokens would differ from the trained ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from kernels.dispatch import Ops
from kernels.reference.lora import MAX_RANK
from workers.engine.checkpoint.checkpoint import read_json
from workers.engine.layers.lora import LoraLinear, TokenAdapters
from workers.engine.model.fused import is_plain
from workers.engine.model.llama import LlamaLayer
from workers.engine.model.packing import PackedStep
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row

_TENSOR = re.compile(r"^base_model\.model\.model\.layers\.(\d+)\.\w+\.(\w+)\.lora_([AB])(?:\.default)?\.weight$")
_PLACES = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "o_proj": ("output", 0),
    "gate_proj": ("gate_up", 0),
    "up_proj": ("gate_up", 1),
    "down_proj": ("down", 0),
}
"""Maps PEFT's module to the layer's product and to the projection in it."""
_NOT_DONE = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")

Pairs = dict[tuple[int, str], dict[str, torch.Tensor]]
"""Maps (layer, module) to its two matrices, A and B."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One adapter as it was read, on the CPU."""

    directory: Path
    identity: bytes
    """A digest of 16 bytes over the scale and the content of the weight file."""
    scale: float
    """Factor of the additions."""
    pairs: Pairs


class Adapters:
    """The loaded adapters. `slots` maps their names to slots, `identities` to digests."""

    def __init__(self, model: nn.Module, ops: Ops, max_adapters: int, max_rank: int, *, late: bool = False) -> None:
        """Installs adapters next to every product of the model's layers; with `late` only when the first adapter is
        loaded, so that a model without any has no extra cost. Raises ModelError if the layers are not `llama`'s."""
        self.slots: dict[str, int] = {}
        self.identities: dict[str, bytes] = {}
        self._ops, self._max_adapters = ops, max_adapters
        self._max_rank, self._model = min(max_rank, MAX_RANK), model
        self._tokens = TokenAdapters()
        self._sites: list[dict[str, LoraLinear]] = []
        if not late:
            self._make_places()

    def load(self, name: str, directory: Path) -> None:
        """Reads and loads an adapter between two steps. Raises ModelError; then nothing has changed."""
        self.put(name, read(directory))

    @torch.inference_mode()
    def put(self, name: str, weights: Weights) -> None:
        """Does the same as `load` with weights that were read before."""
        if not self._sites:
            self._make_places()
        free = set(range(self._max_adapters)) - set(self.slots.values())
        if name in self.slots or not free:
            reason = "is loaded already" if name in self.slots else "finds no free slot"
            raise ModelError(f"The adapter {name} {reason}.")
        slot = min(free)
        try:
            for (layer, module), pair in weights.pairs.items():
                product, part = _PLACES[module]
                self._sites[layer][product].put(slot, part, pair["A"], pair["B"], weights.scale)
        except (ValueError, IndexError, KeyError, TypeError, RuntimeError) as error:
            self._clear(slot)
            raise ModelError(f"The adapter {weights.directory} does not fit the model: {error}.") from error
        self.slots[name], self.identities[name] = slot, weights.identity

    @torch.inference_mode()
    def unload(self, name: str) -> None:
        """Unloads an adapter between two steps, when no sequence uses it any more."""
        del self.identities[name]
        self._clear(self.slots.pop(name))

    def begin(self, rows: Sequence[Row], packed: PackedStep) -> None:
        """Sets for the coming pass which adapter each token uses."""
        slots = None
        if any(row.adapter >= 0 for row in rows):
            slots = [-1] * len(packed.token_ids)
            for row, start in zip(rows, packed.starts, strict=True):
                slots[start : start + len(row.tokens)] = [row.adapter] * len(row.tokens)
        packed.context.adapted = bool(self._sites)
        self._tokens.set(slots, self._max_adapters, self._ops)

    def _make_places(self) -> None:
        layers = getattr(self._model.base_model, "layers", ())
        if not layers or not all(is_plain(layer) for layer in layers):
            raise ModelError("Adapters need a model whose layers are all of the Llama family.")
        room = (self._max_adapters, self._max_rank)
        self._sites = [self._beside(layer, room) for layer in layers]

    def _clear(self, slot: int) -> None:
        for products in self._sites:
            for site in products.values():
                site.clear(slot)

    def _beside(self, layer: LlamaLayer, room: tuple[int, int]) -> dict[str, LoraLinear]:
        weight = layer.norms[0].weight
        hidden, queries = len(weight), layer.num_heads * layer.head_dim
        keys, inner = layer.num_kv_heads * layer.head_dim, layer.down.in_features
        assert isinstance(inner, int)
        shapes = {
            "qkv": ((queries, queries + keys, queries + 2 * keys), hidden),
            "output": ((hidden,), queries),
            "gate_up": ((inner, 2 * inner), hidden),
            "down": ((hidden,), inner),
        }
        sites = {}
        for product, (ends, in_features) in shapes.items():
            if any(end % 16 for end in ends[:-1]):
                raise ModelError(f"Adapters need projections of a multiple of 16, not {ends}.")
            how = (in_features, weight.dtype, room, self._tokens, self._ops)
            sites[product] = LoraLinear(getattr(layer, product), ends, *how)
            setattr(layer, product, sites[product])
        return sites


def read(directory: Path) -> Weights:
    """Reads an adapter's files into memory; any thread may call it. Raises ModelError for anything but a plain LoRA."""
    config = read_json(directory / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"The directory {directory} holds no LoRA adapter of PEFT.")
    asked = [name for name in _NOT_DONE if config.get(name)]
    asked += [] if config.get("bias", "none") == "none" else ["bias"]
    if asked:
        raise ModelError(f"The adapter {directory} needs {', '.join(asked)}, which is not supported.")
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        content = (directory / "adapter_model.safetensors").read_bytes()
        tensors = load(content)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"The adapter {directory} has no sound configuration: {error}.") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The adapter {directory} cannot be read: {error}.") from error
    identity = blake2b(f"{scale!r} ".encode() + content, digest_size=16).digest()
    return Weights(directory, identity, scale, _pairs(directory, tensors))


def _pairs(directory: Path, tensors: dict[str, torch.Tensor]) -> Pairs:
    pairs: Pairs = {}
    for name, tensor in tensors.items():
        match = _TENSOR.match(name)
        if match is None or match[2] not in _PLACES:
            raise ModelError(f"The adapter {directory} changes {name}, which is not supported.")
        pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    return pairs
