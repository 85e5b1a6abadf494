"""From a worker's settings to the model of one rank, on its device and its share of the threads."""

from __future__ import annotations

import os
from pathlib import Path

from workers.engine.errors import ModelError
from workers.engine.parallel.group import ALONE, Member, device_of
from workers.engine.plan import StepRunner
from workers.engine.runner import ModelRunner, RunnerSettings
from workers.engine.settings import WorkerSettings


def load(
    told: WorkerSettings, rank: int = 0, size: int = 1, meeting: Path | None = None
) -> ModelRunner:
    """Raises ModelError. With more than one rank it waits for the others, at `meeting`."""
    device = device_of(told.engine_device, rank, size)
    parallel = ALONE if meeting is None else Member(rank, size, meeting, device)
    adapters = adapters_in(told.engine_adapters)
    runner = ModelRunner(
        RunnerSettings(
            told.model,
            device=device,
            dtype=told.engine_dtype,
            kv_dtype=told.engine_kv_dtype,
            quant=told.engine_quant,
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
            max_adapters=len(adapters),
            max_adapter_rank=told.engine_max_adapter_rank,
        ),
        parallel,
    )
    if runner.loaded.adapters is not None:
        for directory in adapters:
            runner.loaded.adapters.load(directory.name, directory)
    return runner


def adapters_in(directory: Path | None) -> list[Path]:
    """The folders in it, sorted. Raises ModelError if there are none."""
    if directory is None:
        return []
    found = sorted(path.parent for path in directory.expanduser().glob("*/adapter_config.json"))
    if not found:
        raise ModelError(f"The directory {directory} has no adapters.")
    return found


def load_draft(told: WorkerSettings, target: StepRunner) -> ModelRunner:
    """The draft model, with KV for every block of the target's pool. Raises ModelError."""
    draft = ModelRunner(
        RunnerSettings(
            told.engine_draft_model,
            device=device_of(told.engine_device, 0, told.engine_tensor_parallel),
            dtype=told.engine_dtype,
            block_size=target.block_size,
            num_blocks=target.num_blocks,
            num_threads=threads_of(told.threads, told.engine_tensor_parallel),
            max_rows=told.engine_max_running,
            max_batch_tokens=told.engine_max_batch_tokens,
            steps="plain",
        )
    )
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"The draft model has {draft.vocab_size} tokens, the model {target.vocab_size}."
        )
    return draft


def threads_of(given: int | None, num_ranks: int) -> int | None:
    """The ranks of a CPU share its cores."""
    if num_ranks == 1:
        return given
    return max(1, (given or os.cpu_count() or 1) // num_ranks)
