"""The model of a worker: rows of a step in, drawn tokens out. Implements `plan.StepRunner`.

Owns the weights and the KV tensor, and builds the way its steps take. Does not know sequences, tenants or who pays:
all state of a sequence comes with its row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
from transformers import PreTrainedModel

from kernels import dispatch
from workers.engine import memory, self_check
from workers.engine.capacity import Need
from workers.engine.device_steps import DeviceSteps
from workers.engine.errors import DeviceOutOfMemory, ModelError
from workers.engine.graphs import Capture, CudaCapture
from workers.engine.kv_store import KVShape, KVStore, plan_num_blocks
from workers.engine.layers import moe, quant
from workers.engine.layers.linear import MIN_ROWS, pack_linears
from workers.engine.model import (
    census,
    checkpoint,
    fused,
    hf,
    llama,
    loader,
    sharding,
    stored_int4,
    support,
)
from workers.engine.model.adapters import Adapters
from workers.engine.model.probe import probe
from workers.engine.parallel.group import ALONE, Parallel
from workers.engine.plan import Row, RowResult, Ticket
from workers.engine.sampling.sampler import Sampler
from workers.engine.steps import LoadedModel, PlainSteps, Steps

T = TypeVar("T")

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    model: str
    """A Hugging Face directory, or a hub id."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    dtype: str = "auto"
    """auto: the checkpoint's on cuda, float32 on a CPU, where results are to be exact."""
    kv_dtype: str = "auto"
    """What KV is stored in. auto: the dtype; int8 or fp8: 8 bits and a scale per token, head, and K or V."""
    block_size: int = 16
    num_blocks: int | None = None
    """The null block included. None: as many as the KV memory holds."""
    kv_memory: int | None = None
    """Bytes for KV. None: a share of the free memory (kv_store), on cuda what is left beside the largest step."""
    max_model_len: int | None = None
    """None: what the model was made for."""
    quant: quant.Format = "none"
    """Format of the weights of linear layers but the head; they are rounded when they are loaded."""
    num_threads: int | None = None
    """Threads of a CPU's kernels. None: torch's default."""
    max_rows: int = 256
    """Sequences that run at a time: device rows."""
    max_batch_tokens: int = 512
    """Of one step."""
    memory_share: float = 0.9
    """Of a GPU's memory, for everything."""
    graphs: Literal["on", "off", "check"] = "on"
    """Decode steps on cuda are recorded and replayed; called; recorded, replayed, and compared with a call each time."""
    shared_attention: bool = False
    """Decode rows over device rows read a long common prefix once."""
    max_adapters: int = 0
    """LoRA adapters that can be loaded at a time; with any, steps take the plain way, also on cuda."""
    max_adapter_rank: int = 16
    steps: Literal["auto", "plain", "device"] = "auto"
    """auto: device rows on cuda, where the next step is launched before the one before it is collected."""
    random_weights: bool = False
    """For measuring: the directory needs a configuration only."""


class ModelRunner:
    """Raises ModelError, with one sentence, if the model cannot be served exactly. `capture`: how decode steps are
    recorded; None: as the settings say."""

    def __init__(
        self,
        settings: RunnerSettings,
        parallel: Parallel = ALONE,
        capture: Capture | None = None,
    ) -> None:
        self._parallel = parallel
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._device = _device(settings.device)
        found = checkpoint.find(settings.model, not settings.random_weights)
        config = loader.read_config(found)
        support.refuse_unsupported(config)
        loader.refuse_large_tokenizer(found.directory, config)
        scheme = stored_int4.scheme_of(config)
        stored_int4.refuse_beside(scheme, settings.quant, parallel.size)
        dtype = dtype_of(settings.dtype, self._device, config.dtype)
        kv_dtype = _kv_dtype(settings.kv_dtype, self._device, dtype)
        limit = support.context_limit(config)
        self.max_model_len = min(settings.max_model_len or limit, limit)
        self.block_size = settings.block_size
        self.vocab_size = config.vocab_size
        self.eos_token_ids = loader.eos_token_ids(found.directory, config)
        kept = f"{kv_dtype}" if kv_dtype == dtype else f"{kv_dtype} of {dtype}"
        weights = "" if settings.quant == "none" else f" weights={settings.quant}"
        self.root = found.identity(f"{config.model_type} kv={kept}{weights}")
        with torch.inference_mode(), _current(self._device):
            model = loader.build(config, dtype, self._device, hf.ATTENTION)
            parts = sharding.split(model, parallel)
            self._weights = census.weight_bytes(model, settings.quant, self._device)
            share = settings.memory_share
            memory.refuse_large_weights(self._weights, self._device, share, parallel.size)
            if settings.random_weights:
                loader.randomise(model, self._device)
            else:
                loader.fill(model, found, self._device, parts, scheme)
            parallel.meet()
            self.loaded = self._load(model, kv_dtype, settings)
            self.store = self.loaded.store
            self._steps = self._ready(settings, capture)
        self.num_blocks = self.store.num_blocks

    @property
    def adapters(self) -> Mapping[str, int]:
        return {} if self.loaded.adapters is None else self.loaded.adapters.slots

    @property
    def lag(self) -> int:
        return self._steps.lag

    def launch(self, rows: Sequence[Row]) -> Ticket:
        return self._guarded(lambda: self._steps.launch(rows))

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        """One step by itself."""
        return self.launch(rows).collect()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._guarded(lambda: self.store.copy_blocks(pairs))

    def _guarded(self, run: Callable[[], T]) -> T:
        with torch.inference_mode(), _current(self._device):
            try:
                return run()
            except torch.OutOfMemoryError as error:
                reason = str(error).partition("\n")[0]
        # Here the error is gone, and with it the frames that held the tensors of the step.
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise DeviceOutOfMemory(reason)

    # --- at start ---

    def _load(
        self, model: PreTrainedModel, kv_dtype: torch.dtype, settings: RunnerSettings
    ) -> LoadedModel:
        """With a KV store of no blocks yet."""
        device, step = self._device, hf.StepSlot()
        min_tokens = MIN_ROWS if device.type == "cpu" else 1
        sites = hf.discover(model)
        shape = KVShape(
            len(sites), sites[0].num_kv_heads, sites[0].head_dim, self.block_size, kv_dtype
        )
        ops, self.kernels = self_check.checked(
            dispatch.choose(device), self_check.shapes_of(model, shape, sites)
        )
        quant.bind(model, ops)
        probe(model, device, ops, self._parallel)
        store = KVStore(shape, 0, device, ops)
        make_linear = quant.linear_maker(settings.quant, ops)
        llama.install(model, sites, store, ops, step, make_linear)
        hf.attach(sites, store, ops, step)
        moe.install(model, ops)
        pack_linears(model, make_linear, model.get_output_embeddings())
        room = (settings.max_adapters, settings.max_adapter_rank)
        if room[0] and self._parallel.size > 1:
            raise ModelError("Adapters and several ranks do not go together.")
        return LoadedModel(
            adapters=Adapters(model, ops, *room) if room[0] else None,
            model=model,
            hidden_states=fused.build(model, ops, step, self.max_model_len)
            or partial(hf.hidden_states, model),
            head=hf.Head(model, min_tokens),
            store=store,
            ops=ops,
            sampler=Sampler(ops, self.eos_token_ids),
            step=step,
            device=device,
            num_heads=sites[0].num_heads,
            min_tokens=min_tokens,
            leads=self._parallel.leads,
        )

    def _ready(self, settings: RunnerSettings, capture: Capture | None) -> Steps:
        """Memory for KV, then recordings, which hold its addresses."""
        on_cuda = self._device.type == "cuda"
        # Followers of a parallel model learn drawn tokens from rank 0, so nothing is fed back on their devices.
        by_itself = on_cuda and self._parallel.size == 1 and not settings.max_adapters
        if settings.steps == "plain" or (settings.steps == "auto" and not by_itself):
            plain = PlainSteps(self.loaded)
            self._take_memory(settings, plain, 0)
            return plain
        steps = DeviceSteps(
            self.loaded,
            settings.max_rows,
            self.max_model_len,
            self.vocab_size,
            checks=settings.graphs == "check",
            shared_attention=settings.shared_attention,
        )
        if capture is None and on_cuda and settings.graphs != "off":
            capture = CudaCapture(self._device)
        self._take_memory(settings, steps, 0 if capture is None else len(steps.graphs.sizes))
        if capture is not None:
            steps.record(capture)
        return steps

    def _take_memory(self, settings: RunnerSettings, steps: Steps, num_graphs: int) -> None:
        bounds = (settings.max_batch_tokens, settings.max_rows, self.max_model_len, self.block_size)
        largest = memory.Largest(*bounds)
        number = self._plan_blocks(settings, largest, steps, num_graphs)
        self.store.resize(self._parallel.smallest(number, self._device))
        if self._device.type == "cuda":
            memory.warm_up(self.store, largest, steps)

    def _plan_blocks(
        self, settings: RunnerSettings, largest: memory.Largest, steps: Steps, num_graphs: int
    ) -> int:
        device, share, shape = self._device, settings.memory_share, self.store.shape
        least = self.max_model_len if settings.max_model_len else self.block_size
        need = Need(self._weights, shape.bytes_per_block, self.block_size, least)
        if settings.num_blocks is not None:
            return settings.num_blocks
        if settings.kv_memory is not None or device.type == "cpu":
            given, num_ranks = settings.kv_memory, self._parallel.size
            return plan_num_blocks(need, device, self.max_model_len, given, num_ranks)
        return memory.measure(self.store, device, share, largest, steps, num_graphs, need)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"The device {name} is not there.")
    return torch.device(name)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """The current device belongs to a thread; steps are launched from another one than the model was loaded in."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def dtype_of(name: str, device: torch.device, checkpoints: torch.dtype | None) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoints or torch.bfloat16
    if name not in _DTYPES:
        raise ModelError(f"The dtype {name} is not one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _kv_dtype(name: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    if name == "auto":
        return dtype
    if name not in _KV_DTYPES:
        raise ModelError(f"The KV dtype {name} is not one of auto, {', '.join(_KV_DTYPES)}.")
    if name == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            major, minor = capability
            raise ModelError(
                f"fp8 KV needs a device of capability 8.9; this one has {major}.{minor}."
            )
    return _KV_DTYPES[name]
