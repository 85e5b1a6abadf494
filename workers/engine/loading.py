"""Loading of one rank's model from a worker's settings, on its device and its share of the threads."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from workers.engine.checkpoint import loader
from workers.engine.checkpoint.checkpoint import find, read_json
from workers.engine.device.encoder import EncoderRunner
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.model import heads, hf
from workers.engine.model.heads import Heads
from workers.engine.parallel.group import ALONE, Member, device_of
from workers.engine.pooling import recipe
from workers.engine.settings import WorkerSettings
from workers.engine.values.errors import DeviceOutOfMemory, ModelError
from workers.engine.values.plan import StepRunner


def load(
    told: WorkerSettings, rank: int = 0, size: int = 1, meeting: Path | None = None
) -> ModelRunner | EncoderRunner:
    """Loads the model. With more than one rank it waits for the others, at `meeting`. Raises ModelError."""
    device = device_of(told.engine_device, rank, size)
    parallel = ALONE if meeting is None else Member(rank, size, meeting, device)
    adapters = adapters_in(told.engine_adapters)
    settings = RunnerSettings(
        told.model,
        task=told.engine_task,
        device=device,
        dtype=told.engine_dtype,
        kv_dtype=told.engine_kv_dtype,
        quant=told.engine_quant,
        fuse=told.engine_fuse == "on",
        smoothing=told.engine_smoothing,
        block_size=told.engine_block_size,
        num_blocks=told.engine_num_blocks,
        kv_memory=told.engine_kv_memory,
        max_model_len=told.engine_max_model_len,
        num_threads=threads_of(told.threads, size),
        max_rows=told.engine_max_running,
        max_batch_tokens=told.engine_max_batch_tokens,
        memory_share=told.engine_memory_share,
        graphs=told.engine_graphs,
        shared_attention=told.engine_shared_attention == "on",
        sparse=told.engine_kv_sparsity != "off",
        max_adapters=_max_adapters(told.engine_max_adapters, len(adapters)),
        max_adapter_rank=told.engine_max_adapter_rank,
    )
    if _is_encoder(told):
        if size > 1:
            raise ModelError("An encoder cannot be combined with tensor parallelism.")
        return EncoderRunner(settings)
    runner = ModelRunner(settings, parallel)
    if runner.loaded.adapters is not None:
        for directory in adapters:
            runner.loaded.adapters.load(directory.name, directory)
    return runner


def _is_encoder(told: WorkerSettings) -> bool:
    found = find(told.model)
    return recipe.read(found.directory, loader.read_config(found), told.engine_task).is_encoder


def _max_adapters(given: int | None, num_at_start: int) -> int | None:
    """Returns the number of adapter slots: at least as many as the directory has adapters."""
    return given if not num_at_start else max(given or 0, num_at_start)


def adapters_in(directory: Path | None) -> list[Path]:
    """Returns the folders of the adapters in a directory, sorted. Raises ModelError if there are none."""
    if directory is None:
        return []
    found = sorted(path.parent for path in directory.expanduser().glob("*/adapter_config.json"))
    if not found:
        raise ModelError(f"The directory {directory} has no adapters.")
    return found


def load_draft(told: WorkerSettings, target: StepRunner) -> ModelRunner:
    """Loads the draft model, with KV for every block of the target's pool. Raises ModelError."""
    settings = RunnerSettings(
        told.engine_draft_model,
        device=device_of(told.engine_device, 0, told.engine_tensor_parallel),
        dtype=told.engine_dtype,
        block_size=target.block_size,
        num_blocks=target.num_blocks,
        num_threads=threads_of(told.threads, told.engine_tensor_parallel),
        max_rows=told.engine_max_running,
        max_batch_tokens=told.engine_max_batch_tokens,
        memory_share=1.0,  # the model has taken its share: the draft takes of what is left
        fuse=told.engine_fuse == "on",
        steps="plain",
    )
    try:
        draft = ModelRunner(settings)
    except (torch.OutOfMemoryError, DeviceOutOfMemory) as error:
        raise ModelError(f"The draft model {told.engine_draft_model} does not fit beside the model.") from error
    if draft.vocab_size != target.vocab_size:
        raise ModelError(f"The draft model has {draft.vocab_size} tokens, the model {target.vocab_size}.")
    _refuse_other_tokens(told.engine_draft_model, told.model)
    return draft


def load_heads(told: WorkerSettings, target: StepRunner) -> Heads:
    """Loads the heads onto the model's device, in its dtype. Raises ModelError."""
    if not isinstance(target, ModelRunner):
        raise ModelError("Heads cannot be combined with tensor parallelism.")
    assert told.engine_heads is not None
    weight = hf.embedding_weight(target.loaded.model)
    size = weight.shape[1]
    return heads.load(told.engine_heads, size, target.vocab_size, weight.device, weight.dtype)


def _refuse_other_tokens(draft: str, model: str) -> None:
    """Raises ModelError unless each id is the same text in both vocabularies. A model without a tokenizer is not
    checked."""
    specs = (read_json(find(name).directory / "tokenizer.json") for name in (draft, model))
    theirs, ours = (spec.get("model", {}).get("vocab") for spec in specs)
    if theirs and ours and theirs != ours:
        raise ModelError(f"The draft model {draft} has another vocabulary than the model.")


def threads_of(given: int | None, num_ranks: int) -> int | None:
    """Returns the number of threads of one rank. The ranks of a CPU share its cores."""
    if num_ranks == 1:
        return given
    return max(1, (given or len(os.sched_getaffinity(0))) // num_ranks)
