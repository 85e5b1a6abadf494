"""Loads a checkpoint into a model.

It knows transformers' classes and tensor names. It does not know attention or KV. Every name of the checkpoint is
consumed and every parameter is filled, or the load fails. No code of a checkpoint is ever run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kernels.dispatch import TWINS, Ops
from kernels.pages import in_large_pages
from workers.engine.checkpoint import stored, wrappers
from workers.engine.checkpoint.checkpoint import Checkpoint, Part, Stored, cause_of, read_json
from workers.engine.checkpoint.experts import Stacks
from workers.engine.checkpoint.names import Names
from workers.engine.checkpoint.stored import Scheme
from workers.engine.checkpoint.stored_gptq import Tensors
from workers.engine.layers.quant import QuantLinear
from workers.engine.values.errors import ModelError
from workers.process.children.forked import give_back
from workers.process.vocabulary_digest import vocabulary_digest

log = logging.getLogger(__name__)

Place = tuple[torch.Tensor, list[tuple[nn.Module, str]]]

_NONSENSE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ZeroDivisionError,
    RuntimeError,
    StrictDataclassError,
)
"""Errors that transformers raises for a configuration that is valid JSON but makes no sense to it."""
_SMALL = 1 << 20
"""Bytes of tensors that are copied when they are read on a CPU. Layers keep norms and biases as they are, and one view
keeps the whole file in memory."""
_NO_PARTS: Mapping[str, Part] = MappingProxyType({})


def read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    content = read_json(checkpoint.directory / "config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.directory, trust_remote_code=False, local_files_only=True
        )
    except _NONSENSE as error:
        kind = content.get("model_type", "none given")
        path = checkpoint.directory / "config.json"
        raise ModelError(f"The configuration {path} (model type: {kind}) cannot be used: {cause_of(error)}") from error
    text = wrappers.text_of(config)
    is_said = text is config or "tie_word_embeddings" in content
    if not is_said and text.tie_word_embeddings and checkpoint.has("lm_head.weight"):
        text.tie_word_embeddings = False  # the wrapper's class only presumes that they are tied
    return text


def eos_token_ids(directory: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Returns the ids that end a text; the generation settings override the configuration."""
    given = read_json(directory / "generation_config.json").get("eos_token_id")
    ids = config.eos_token_id if given is None else given
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def read_vocabulary(directory: Path, config: PreTrainedConfig) -> str:
    """Returns the digest of the tokenizer's vocabulary, by which gateways know whose prompts the model understands. Refuses
    a tokenizer with ids outside the embedding, because the first such token would crash the model. An added token is
    written by who asks for it alone: requests with it are refused. Raises ModelError."""
    tokenizer = read_json(directory / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab", {})
    added = {token["id"] for token in tokenizer.get("added_tokens", [])}
    ids = set(vocab.values() if isinstance(vocab, dict) else [len(vocab) - 1]) - added
    if ids and max(ids) >= config.vocab_size:
        raise ModelError(
            f"The tokenizer has the token id {max(ids)}, but the model has only {config.vocab_size} tokens."
        )
    if beyond := sorted(number for number in added if number >= config.vocab_size):
        told = {"event": "tokens_not_served", "token_ids": beyond}
        log.warning("the model has no rows for added tokens of its tokenizer: %s", beyond, extra=told)
    return vocabulary_digest(tokenizer)


def build(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, attention: str) -> PreTrainedModel:
    """Builds the model without memory for its parameters (meta), but with its buffers computed on the device."""
    try:
        with _WithoutMemory(), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except _NONSENSE as error:
        raise ModelError(
            f"No model of the type '{config.model_type}' can be built from its configuration: {cause_of(error)}"
        ) from error
    model.tie_weights()
    _compute_buffers(model, device)
    model.eval().requires_grad_(False)
    return model


def fill(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    device: torch.device,
    parts: Mapping[str, Part] = _NO_PARTS,
    scheme: Scheme | None = None,
    skips: Sequence[str] = (),
) -> None:
    """Moves the checkpoint's tensors into the model, one at a time, in the model's dtype. For tensors in `parts` (by
    the model's names) only the part is read. `scheme` says how quantized layers are stored. `skips` are expressions for
    names of tensors that are left out."""
    filling = _Filling(places(model))
    names = Names(model, filling.known, wrappers.wraps(checkpoint))
    stacks = Stacks(model, device, names)
    packed: dict[str, Tensors] = {}
    for found in checkpoint.tensors():
        if any(re.search(pattern, found.name) for pattern in skips) or stacks.take(found):
            continue
        if scheme is not None and names.is_bias_of_none(found.name) and not found.read().any():
            continue  # AutoGPTQ writes zeros for every layer without a bias
        path, _, suffix = found.name.rpartition(".")
        if scheme is not None and scheme.takes(suffix, found):
            if (weight := names.resolve(f"{path}.weight")) is not None:
                packed.setdefault(weight, {})[suffix] = found.read().to(device, copy=True)
        elif (target := names.resolve(found.name)) is not None:
            filling.read(target, found, parts.get(target), device)
    for target, tensor in stacks.whole().items():
        filling.put(target, tensor, twice=f"The checkpoint has {target} whole and by expert.")
    for target, tensors in packed.items():
        filling.claim(target, twice=f"The checkpoint has {target} exact and quantized.")
        assert scheme is not None, "without a scheme nothing is packed"
        _put_packed(model, target, tensors, scheme)
    if missing := filling.missing:
        raise ModelError(
            f"The checkpoint {checkpoint.directory} lacks {len(missing)} tensors, the first is {missing[0]}."
        )


class _Filling:
    """The tensors of a model while they are filled, each of them once. Tied ones are one tensor."""

    def __init__(self, known: Mapping[str, Place]) -> None:
        self.known = known
        self._filled: dict[int, torch.Tensor] = {}

    @property
    def missing(self) -> list[str]:
        return sorted(name for name, (old, _) in self.known.items() if id(old) not in self._filled)

    def read(self, target: str, found: Stored, part: Part | None, device: torch.device) -> None:
        """Reads a tensor, or the part of it. A copy of a tied tensor must equal what was read before."""
        old, _ = self.known[target]
        needed = part.full(old.shape) if part else list(old.shape)
        if found.shape != needed:
            raise ModelError(f"The tensor {found.name} has shape {found.shape}, but the model needs {needed}.")
        tensor = found.read(part).to(device=device, dtype=old.dtype)
        if device.type == "cpu" and tensor.nbytes < _SMALL:
            tensor = tensor.clone()
        if id(old) in self._filled:
            _refuse_unequal(found.name, self._filled[id(old)], tensor)
        else:
            self.put(target, tensor, twice="")

    def put(self, target: str, tensor: torch.Tensor, twice: str) -> None:
        """Puts a tensor into its places. Raises ModelError `twice` if they are filled already."""
        self.claim(target, twice)
        old, homes = self.known[target]
        self._filled[id(old)] = tensor
        for module, attribute in homes:
            assign(module, attribute, tensor)

    def claim(self, target: str, twice: str) -> None:
        """Notes that a tensor is filled. Raises ModelError `twice` if it was."""
        old, _ = self.known[target]
        if id(old) in self._filled:
            raise ModelError(twice)
        self._filled[id(old)] = old


def leave_files(model: PreTrainedModel) -> None:
    """Copies parameters on a CPU that are still views of the checkpoint's files, so that the files are mapped no longer:
    one view, such as an embedding, keeps the whole file in the process's memory."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = in_large_pages(parameter.data.clone())
    give_back()


def _put_packed(model: PreTrainedModel, target: str, tensors: Tensors, scheme: Scheme) -> None:
    """Replaces a linear layer by a quantized one. Its bias, which no scheme rounds, is already filled. The ops are the
    plain ones until `quant.bind`."""
    path = target.rpartition(".")[0]
    linear = model.get_submodule(path)
    if type(linear) is not nn.Linear:
        raise ModelError(f"The checkpoint quantizes {path}, which is not a plain linear layer.")
    device = next(iter(tensors.values())).device
    numbers = stored.numbers_of(scheme, tensors, linear.in_features, linear.out_features, path)
    ops = Ops(device, dict(TWINS))
    model.set_submodule(path, QuantLinear(numbers, linear.bias, ops, linear.weight.dtype))


def randomise(model: PreTrainedModel, device: torch.device) -> None:
    """Fills the model with random weights instead of a checkpoint's, for measurements: the work is the same, the output
    has no meaning."""
    generator = torch.Generator(device).manual_seed(0)
    done: dict[int, torch.Tensor] = {}
    for old, homes in places(model).values():
        if id(old) not in done:
            tensor = torch.ones(old.shape, dtype=old.dtype, device=device)
            if old.dim() > 1:
                tensor.normal_(0.0, 0.02, generator=generator)
            done[id(old)] = tensor
        for module, attribute in homes:
            assign(module, attribute, done[id(old)])


def places(model: nn.Module) -> dict[str, Place]:
    """Maps every name that a checkpoint may hold to the tensor to replace and to all modules that hold it: tied weights
    are one tensor with several names."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False))
        own |= {
            name: buffer
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in own.items():
            tensors[f"{path}.{name}" if path else name] = tensor
            homes.setdefault(id(tensor), []).append((module, name))
    return {name: (tensor, homes[id(tensor)]) for name, tensor in tensors.items()}


def _refuse_unequal(name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    if not torch.equal(first, second):
        raise ModelError(f"The tensor {name} is tied to another one, but their values differ.")


def assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[name] = tensor


class _WithoutMemory(TorchFunctionMode):
    """Makes empty tensors without memory (meta): those of parameters, until they are read. No other tensor is: for a
    power, or a drawn number, of a tensor without memory torch loads sympy, which takes 1.3 s and 30 MB.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _compute_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes buffers that no checkpoint holds (rotary frequencies, embedding scales). transformers computes them in
    `_init_weights`, which has no effect on parameters on meta. It is called twice over different values: a buffer that
    keeps its old value is one that it does not compute."""
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
        results = []
        for before in (0, 1):
            for name in names:
                module._buffers[name] = torch.full_like(module._buffers[name], before, device=device)
            if names:
                model._init_weights(module)
            results.append([module._buffers[name] for name in names])
        for name, first, second in zip(names, *results, strict=True):
            if not torch.equal(first, second):
                raise ModelError(f"The buffer {path}.{name} of the model cannot be computed.")
