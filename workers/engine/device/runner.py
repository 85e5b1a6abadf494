"""The model of a worker: it takes the rows of a step and returns drawn tokens. It implements `plan.StepRunner`.

It owns the weights and the KV tensor, and chooses how its steps run. It does not know sequences, tenants or who pays:
all state of a sequence comes with its row.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from kernels import dispatch
from kernels.dispatch import Ops
from workers.engine.checkpoint import checkpoint, dtypes, loader, sharding, stored, support
from workers.engine.checkpoint.checkpoint import Checkpoint
from workers.engine.device import memory, self_check, trial
from workers.engine.device.device_steps import DeviceSteps
from workers.engine.device.graphs import Capture, CudaCapture
from workers.engine.device.guarded import current, device_of, guarded
from workers.engine.device.steps import LoadedModel, PlainSteps, Steps
from workers.engine.device.thread_count import ThreadCount
from workers.engine.kv.kv_store import KVShape, KVStore, plan_num_blocks
from workers.engine.kv.offload import HostStore
from workers.engine.layers import cpu_path, moe, quant
from workers.engine.layers.linear import MIN_ROWS, pack_linears
from workers.engine.lora import adapters
from workers.engine.lora.adapters import Adapters
from workers.engine.model import census, cpu_pass, fused, fusers, hf, llama, smoothing
from workers.engine.model.probe import probe
from workers.engine.parallel.group import ALONE, Parallel
from workers.engine.pooling import recipe as recipes
from workers.engine.pooling.pooler import Pooler, classifier_of
from workers.engine.pooling.recipe import AskedTask, Recipe
from workers.engine.sampling.sampler import Sampler
from workers.engine.sizing.capacity import Format, Need
from workers.engine.values.abilities import Abilities
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import AdapterWeights, GraphState, LoadedAdapter, Row, RowResult, Ticket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    model: str
    """A Hugging Face directory, or a hub id."""
    device: str = "auto"
    """auto means cuda if there is one, else cpu."""
    dtype: str = "auto"
    """auto means the checkpoint's dtype, or float32 on a CPU that would be slower in that one (`dtypes`)."""
    kv_dtype: str = "auto"
    """The format of stored KV. auto means the dtype; int8 or fp8 means 8 bits and a scale per token, head, and K or
    V."""
    block_size: int = 16
    num_blocks: int | None = None
    """Number of KV blocks, the null block included. None means as many as the KV memory holds."""
    kv_memory: int | None = None
    """Bytes for KV. None means a share of the free memory (kv_store), or on cuda what the largest step leaves."""
    max_model_len: int | None = None
    """Longest sequence in tokens. None means the length that the model was made for."""
    quant: Format = "none"
    """Format of the weights of linear layers except the head; they are rounded when they are loaded."""
    fuse: bool = True
    """Layers without a hand-written version have siblings, norms and products fused into fewer operations (fusers)."""
    smoothing: Path | None = None
    """Statistics of activations, which are folded into norms and linear layers before these are rounded."""
    num_threads: int | None = None
    """Threads of a CPU's kernels. None means torch's default."""
    max_rows: int = 256
    """Number of sequences that run at a time, which is the number of device rows."""
    max_batch_tokens: int = 512
    """Largest number of tokens of one step."""
    memory_share: float = 0.9
    """Share of a GPU's memory that the worker may take, for everything."""
    graphs: Literal["on", "off", "check"] = "on"
    """on: decode steps on cuda are recorded and replayed. off: they are called. check: each replay is compared with a
    call."""
    shared_attention: bool = False
    """Decode rows over device rows read a long common prefix once."""
    max_adapters: int | None = None
    """Number of LoRA adapters that can be loaded at a time. If it is set and not 0, steps are plain, also on cuda. None
    means a fixed number on a CPU, where memory for them is taken with the first adapter, and none on cuda."""
    max_adapter_rank: int = 16
    sparse: bool = False
    """Rows may have dropped tokens; then steps are plain, also on cuda."""
    steps: Literal["auto", "plain", "device"] = "auto"
    """auto means device rows on cuda, where the next step is launched before the one before it is collected."""
    random_weights: bool = False
    """Weights are random, for measurements: the directory needs a configuration only."""
    task: AskedTask = "auto"
    """The task of the model. auto means the one that its files show."""


_SKIPS = {
    ("generate", ""): (),
    ("embed", ""): (r"^lm_head\.",),
    ("score", "labels"): (),
    ("score", "classifier"): (r"^lm_head\.", r"^score\."),
}
"""Names of tensors that a model of a task and its head does not need in this place."""
ADAPTERS_ON_A_CPU = 8
NO_ROOM = "This worker has no places for adapters: set HEADGATE_ENGINE_MAX_ADAPTERS."


class ModelRunner:
    """A loaded model that runs steps. Raises ModelError, with one sentence, if the model cannot be served exactly.
    `capture` records decode steps; None means as the settings say."""

    def __init__(self, settings: RunnerSettings, parallel: Parallel = ALONE, capture: Capture | None = None) -> None:
        self._parallel = parallel
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._device = device_of(settings.device)
        found = checkpoint.find(settings.model, not settings.random_weights)
        config = loader.read_config(found)
        recipe = recipes.read(found.directory, config, settings.task)
        support.refuse_unsupported(config, classifies=recipe.head == "classifier")
        self.vocabulary = loader.read_vocabulary(found.directory, config)
        if recipe.task == "score" and parallel.size > 1:
            raise ModelError("A model that scores is not split over several ranks.")
        if recipe.task != "generate":
            config.tie_word_embeddings = True  # it needs no head of its own, and its checkpoint may lack one
        scheme = stored.scheme_of(config)
        stored.refuse_beside(scheme, settings.quant, parallel.size)
        statistics = None
        if settings.smoothing is not None:
            smoothing.refuse_beside(settings.quant, parallel.size, scheme is not None)
            statistics = smoothing.read(settings.smoothing)
        rounded = scheme is not None or settings.quant != "none"
        chosen = dtypes.of_model(settings.dtype, self._device, config, rounded)
        dtype = chosen.dtype
        kv_dtype = dtypes.of_kv(settings.kv_dtype, self._device, dtype)
        log.info(
            "%s is computed in %s: %s",
            settings.model,
            chosen.name,
            chosen.reason,
            extra={"event": "model_dtype", "dtype": chosen.name},
        )
        limit = min(support.context_limit(config), recipe.max_len or sys.maxsize)
        self.max_model_len = min(settings.max_model_len or limit, limit)
        self.block_size = settings.block_size
        self.vocab_size = config.vocab_size
        self.eos_token_ids = loader.eos_token_ids(found.directory, config)
        kept = f"{kv_dtype}" if kv_dtype == dtype else f"{kv_dtype} of {dtype}"
        weights = "" if settings.quant == "none" else f" weights={settings.quant}"
        if statistics is not None:
            weights += f" smoothing={statistics.identity}"
        with torch.inference_mode(), current(self._device):
            model = loader.build(config, dtype, self._device, hf.ATTENTION)
            if settings.quant in moe.FORMATS and any(map(moe.fits, model.modules())):
                weights += " experts"
            self.root = found.identity(f"{config.model_type} kv={kept}{weights}{recipe.identity}")
            parts = sharding.split(model, parallel)
            self._weights = census.weight_bytes(model, scheme.counts_as if scheme else settings.quant, self._device)
            share = settings.memory_share
            memory.refuse_large_weights(self._weights, self._device, share, parallel.size)
            if settings.random_weights:
                loader.randomise(model, self._device)
            else:
                loader.fill(model, found, self._device, parts, scheme, skips=_SKIPS[recipe.task, recipe.head])
            if statistics is not None:
                smoothing.fold(model, statistics)
            parallel.meet()
            self.loaded = self._load(model, kv_dtype, settings, recipe, found)
            self.store = self.loaded.store
            self.graphs: Sequence[GraphState] = ()
            self._steps = self._ready(settings, capture)
            trial.run(self._steps, config.model_type, self.block_size, self.store.num_blocks, self.max_model_len)
        self.num_blocks = self.store.num_blocks
        self._thread_count = self._choice_of_threads()

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]:
        found = self.loaded.adapters
        if found is None:
            return {}
        return {name: LoadedAdapter(n, found.identities[name]) for name, n in found.slots.items()}

    def read_adapter(self, directory: Path) -> AdapterWeights:
        return adapters.read(directory)

    def add_adapter(self, name: str, weights: AdapterWeights) -> None:
        if self.loaded.adapters is None:
            raise ModelError(NO_ROOM)
        assert isinstance(weights, adapters.Weights)
        self.loaded.adapters.put(name, weights)

    def remove_adapter(self, name: str) -> None:
        assert self.loaded.adapters is not None
        self.loaded.adapters.unload(name)

    @property
    def abilities(self) -> Abilities:
        return self.loaded.pooler.abilities

    @property
    def lag(self) -> int:
        return self._steps.lag

    def launch(self, rows: Sequence[Row]) -> Ticket:
        if self._thread_count is None:
            return guarded(self._device, lambda: self._steps.launch(rows))
        num_tokens, began = sum(len(row.tokens) for row in rows), time.perf_counter()
        threads = self._thread_count.of(num_tokens)
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        ticket = guarded(self._device, lambda: self._steps.launch(rows))
        now = time.perf_counter()
        self._thread_count.add(num_tokens, threads, now - began, now)
        return ticket

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        """Runs one step and waits for its results."""
        return self.launch(rows).collect()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        guarded(self._device, lambda: self.store.copy_blocks(pairs))

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        guarded(self._device, lambda: self.store.move_tokens(moves))

    def host_blocks(self, num_bytes: int) -> HostStore:
        """Returns host memory for copies of KV blocks. Raises ModelError if there is too little memory."""
        return HostStore(self.store, self.loaded.ops, self._device, num_bytes)

    # --- at start ---

    def _load(
        self, model: PreTrainedModel, kv_dtype: torch.dtype, settings: RunnerSettings, recipe: Recipe, found: Checkpoint
    ) -> LoadedModel:
        """Loads the model with a KV store that has no blocks yet."""
        device, step = self._device, hf.StepSlot()
        min_tokens = MIN_ROWS if device.type == "cpu" else 1
        sites = hf.discover(model)
        self.takes_trees = all(site.window == 0 for site in sites)
        if settings.sparse and any(site.window or site.has_sinks for site in sites):
            raise ModelError(
                "HEADGATE_ENGINE_KV_SPARSITY does not go with the sliding windows and sinks of this model."
            )
        shape = KVShape(len(sites), sites[0].num_kv_heads, sites[0].head_dim, self.block_size, kv_dtype)
        self.bytes_per_block = shape.bytes_per_block * self._parallel.size
        ops, self.kernels = self_check.checked(dispatch.choose(device), self_check.shapes_of(model, shape, sites))
        quant.bind(model, ops)
        probe(model, device, ops, self._parallel)
        store = KVStore(shape, 0, device, ops)
        make_linear = quant.linear_maker(settings.quant, ops)
        if not llama.install(model, sites, store, ops, step, make_linear) and settings.fuse:
            fusers.install(model, sites, ops, make_linear)
        hf.attach(sites, store, ops, step)
        moe.install(model, ops, settings.quant)
        pack_linears(model, make_linear, model.get_output_embeddings())
        loader.leave_files(model)
        own: fused.FusedPass | cpu_pass.CpuPass | None = fused.build(model, ops, step, self.max_model_len)
        if own is None and (own := cpu_pass.build(model, ops, step, self.max_model_len)):
            min_tokens = own.min_tokens
        if device.type == "cpu":
            whole = isinstance(own, cpu_pass.CpuPass) and own.is_compiled
            products, layers = cpu_path.of_products(model.dtype), cpu_path.of_layers(whole)
            told = {"event": "cpu_path", "products": products, "layers": layers}
            log.info("steps on this CPU: %s; %s", products, layers, extra=told)
        head = hf.Head(model, min_tokens)
        logits = classifier_of(found, self._device, model.dtype) if recipe.head == "classifier" else head
        return LoadedModel(
            pooler=Pooler(recipe, model.config.hidden_size, self._device, logits),
            adapters=self._places(model, ops, settings),
            model=model,
            hidden_states=own or partial(hf.hidden_states, model),
            head=head,
            store=store,
            ops=ops,
            sampler=Sampler(ops, self.eos_token_ids),
            step=step,
            device=device,
            num_heads=sites[0].num_heads,
            min_tokens=min_tokens,
            leads=self._parallel.leads,
        )

    def _choice_of_threads(self) -> ThreadCount | None:
        """Returns None where all steps keep their threads: other layers than the compiled ones may have other bits with
        another number, ranks wait for the slowest of them, and on a GPU threads only launch."""
        layers = self.loaded.hidden_states
        compiled = isinstance(layers, cpu_pass.CpuPass) and layers.is_compiled
        if not compiled or self._device.type != "cpu" or self._parallel.size > 1 or torch.get_num_threads() == 1:
            return None
        return ThreadCount(torch.get_num_threads())

    def _places(self, model: PreTrainedModel, ops: Ops, settings: RunnerSettings) -> Adapters | None:
        """Returns memory for adapters, or None if there is none; on a CPU without a given number it is taken with the
        first adapter."""
        alone, rank = self._parallel.size == 1, settings.max_adapter_rank
        if settings.max_adapters is None:
            late = alone and self._device.type == "cpu" and settings.steps != "device"
            return Adapters(model, ops, ADAPTERS_ON_A_CPU, rank, late=True) if late else None
        if settings.max_adapters and not alone:
            raise ModelError("Adapters cannot be combined with tensor parallelism.")
        return Adapters(model, ops, settings.max_adapters, rank) if settings.max_adapters else None

    def _ready(self, settings: RunnerSettings, capture: Capture | None) -> Steps:
        """Takes memory for KV and then records steps, because recordings hold the addresses of that memory."""
        on_cuda = self._device.type == "cuda"
        # Followers of a parallel model learn drawn tokens from rank 0, so nothing is fed back on their devices.
        by_itself = on_cuda and self._parallel.size == 1
        by_itself = by_itself and not settings.max_adapters and not settings.sparse
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
            self.graphs = steps.graphs.states
        return steps

    def _take_memory(self, settings: RunnerSettings, steps: Steps, num_graphs: int) -> None:
        bounds = (settings.max_batch_tokens, settings.max_rows, self.max_model_len, self.block_size)
        largest = memory.Largest(*bounds)
        number = self._plan_blocks(settings, largest, steps, num_graphs)
        self.store.resize(self._parallel.smallest(number, self._device))
        if self._device.type == "cuda":
            memory.warm_up(self.store, largest, steps)

    def _plan_blocks(self, settings: RunnerSettings, largest: memory.Largest, steps: Steps, num_graphs: int) -> int:
        device, share, shape = self._device, settings.memory_share, self.store.shape
        least = self.max_model_len if settings.max_model_len else self.block_size
        need = Need(self._weights, shape.bytes_per_block, self.block_size, least)
        if settings.num_blocks is not None:
            return settings.num_blocks
        if settings.kv_memory is not None or device.type == "cpu":
            given, num_ranks = settings.kv_memory, self._parallel.size
            return plan_num_blocks(need, device, self.max_model_len, given, num_ranks)
        return memory.measure(self.store, device, share, largest, steps, num_graphs, need)
