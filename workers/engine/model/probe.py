"""Checks at load time that a packed, paged and chunked pass gives what transformers computes for one sequence at a
time.

It runs on a small copy of the model: its own weights and widths, the first layers of every kind, few tokens, windows so
small that they have an effect, float32. A model that differs is refused, because it would serve wrong tokens.
"""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kernels.dispatch import Ops
from workers.engine.checkpoint import loader, sharding
from workers.engine.checkpoint.checkpoint import Part
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.model import hf
from workers.engine.model.packing import pack
from workers.engine.parallel.group import ALONE, Parallel
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import Row

_VOCAB, _WINDOW, _BLOCK_SIZE = 64, 5, 4
_LENGTHS, _CUT = (11, 14), 6
_TOLERANCE = 1e-4
"""Tolerance relative to the largest logit."""


def probe(model: PreTrainedModel, device: torch.device, ops: Ops, parallel: Parallel = ALONE) -> None:
    """Raises ModelError if the two computations differ. Over several ranks, all run the packed pass on their parts and
    rank 0 compares it with the whole model."""
    config = _small_config(model.config, parallel.size)
    mine = loader.build(config, torch.float32, device, hf.ATTENTION)
    # This model gets its own configuration, because a model writes its attention into it.
    theirs = loader.build(copy.deepcopy(config), torch.float32, device, "eager")
    _copy_weights(model, mine, theirs, parallel)
    sequences = [[(7 * index + 3 * length) % config.vocab_size for index in range(length)] for length in _LENGTHS]
    found = _packed_logits(mine, sequences, device, ops)
    if not parallel.leads:
        return
    for tokens, logits in zip(sequences, found, strict=True):
        ids = torch.tensor([tokens], device=device)
        expected = theirs(input_ids=ids, use_cache=False).logits[0].float()
        error = ((logits - expected).abs().max() / expected.abs().max()).item()
        if not error <= _TOLERANCE:
            where = f" and {parallel.size} ranks" if parallel.size > 1 else ""
            raise ModelError(
                f"The model type '{model.config.model_type}' cannot be served: its logits over paged KV{where} differ"
                f" from transformers' own by {error:.1e} of the largest one."
            )


def _packed_logits(
    small: PreTrainedModel, sequences: list[list[int]], device: torch.device, ops: Ops
) -> list[torch.Tensor]:
    """Returns the logits of both sequences, run at once; the second one runs in two chunks, the later of which is
    packed after the rest of the first sequence, so that a model which numbers the packed tokens itself is caught."""
    sites = hf.discover(small)
    shape = KVShape(len(sites), sites[0].num_kv_heads, sites[0].head_dim, _BLOCK_SIZE, torch.float32)
    store = KVStore(shape, 16, device, ops)
    step = hf.StepSlot()
    hf.attach(sites, store, ops, step)
    first, second = sequences
    tables = ([9, 2, 5], [4, 11, 1, 8])
    steps = (
        [Row(first[:-1], 0, tables[0]), Row(second[:_CUT], 0, tables[1])],
        [Row(second[_CUT:], _CUT, tables[1]), Row(first[-1:], len(first) - 1, tables[0])],
    )
    parts: list[list[torch.Tensor]] = []
    head = hf.Head(small)
    for rows in steps:
        packed = pack(rows, _BLOCK_SIZE, device)
        step.context = packed.context
        logits = head(hf.hidden_states(small, packed.token_ids, packed.positions))
        parts.append([logits[start : start + len(row.tokens)] for start, row in zip(packed.starts, rows, strict=True)])
    return [torch.cat((parts[0][0], parts[1][1])), torch.cat((parts[0][1], parts[1][0]))]


def _copy_weights(model: PreTrainedModel, mine: PreTrainedModel, theirs: PreTrainedModel, parallel: Parallel) -> None:
    """Copies the model's weights into the small copies: this rank's part into `mine`, the whole into `theirs`."""
    parts = sharding.split(mine, parallel)
    whole_homes = loader.places(theirs)
    for name, (target, homes) in loader.places(mine).items():
        path, _, attribute = name.rpartition(".")
        # This is not its parameter: a layer stored in 4 bits has none, and computes its weight when asked.
        weight = getattr(model.get_submodule(path), attribute)
        if weight.shape != target.shape:  # embedding and head, cut to the first tokens
            weight = weight[: target.shape[0]]
        weight = weight.to(torch.float32)
        for module, attribute in homes:
            loader.assign(module, attribute, weight)
        if (part := parts.get(name)) is not None:
            weight = _assembled(weight, part, parallel)
        for module, attribute in whole_homes[name][1]:
            loader.assign(module, attribute, weight)


def _assembled(weight: torch.Tensor, part: Part, parallel: Parallel) -> torch.Tensor:
    """Returns the whole weight. Parts may overlap if ranks share a head."""
    whole = torch.full(part.full(weight.shape), float("-inf"), device=weight.device)
    whole.narrow(part.dim, part.start, part.end - part.start).copy_(weight)
    return parallel.merge(whole)


def _small_config(config: PreTrainedConfig, num_ranks: int) -> PreTrainedConfig:
    """Returns a configuration whose vocabulary divides evenly: a rank's rows are then among those that it has of the
    whole vocabulary."""
    small = copy.deepcopy(config)
    num_layers = config.num_hidden_layers
    per_layer = {
        name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == num_layers
    }
    kinds = [str([value[layer] for value in per_layer.values()]) for layer in range(num_layers)]
    small.num_hidden_layers = min(num_layers, max(2, 1 + max(map(kinds.index, kinds))))
    for name, value in per_layer.items():
        setattr(small, name, value[: small.num_hidden_layers])
    small.vocab_size = min(config.vocab_size, _VOCAB // num_ranks * num_ranks)
    small.pad_token_id = None
    if getattr(config, "sliding_window", None):
        small.sliding_window = min(config.sliding_window, _WINDOW)
    return small
