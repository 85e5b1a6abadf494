"""The model of a worker: rows of a step in, drawn tokens out. Implements `plan.StepRunner`.

Owns the weights and the KV tensor. Does not know sequences, tenants or who pays: all state of a sequence comes with
its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels import dispatch
from workers.engine.errors import ModelError
from workers.engine.kv_store import KVShape, KVStore, plan_num_blocks
from workers.engine.layers.linear import MIN_ROWS, pack_linears
from workers.engine.model import checkpoint, hf, llama, loader, support
from workers.engine.model.packing import PackedStep, pack
from workers.engine.model.probe import probe
from workers.engine.plan import Collected, Draw, Drawn, Row, RowResult, Ticket
from workers.engine.sampling.sampler import Sampler, token_logprobs
from workers.protocol.messages import TokenLogprob

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LOGPROB_ROWS = 64
"""Prompt tokens whose logits exist at one time: a long prompt times the vocabulary would be gigabytes."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    model: str
    """A Hugging Face directory, or a hub id."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    dtype: str = "auto"
    """auto: the checkpoint's on cuda, float32 on a CPU, where results are to be exact."""
    block_size: int = 16
    num_blocks: int | None = None
    """The null block included. None: as many as the KV memory holds."""
    kv_memory: int | None = None
    """Bytes for KV. None: a share of the free memory (kv_store)."""
    max_model_len: int | None = None
    """None: what the model was made for."""
    num_threads: int | None = None
    """Threads of a CPU's kernels. None: torch's default."""


class ModelRunner:
    """Raises ModelError, with one sentence, if the model cannot be served exactly."""

    lag = 0

    def __init__(self, settings: RunnerSettings) -> None:
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._device = _device(settings.device)
        self._ops = dispatch.choose(self._device)
        self._min_rows = MIN_ROWS if self._device.type == "cpu" else 1
        found = checkpoint.find(settings.model)
        config = loader.read_config(found)
        support.refuse_unsupported(config)
        loader.refuse_large_tokenizer(found.directory, config)
        dtype = _dtype(settings.dtype, self._device, config.dtype)
        limit = support.context_limit(config)
        self.max_model_len = min(settings.max_model_len or limit, limit)
        self.block_size = settings.block_size
        self.vocab_size = config.vocab_size
        self.eos_token_ids = loader.eos_token_ids(found.directory, config)
        self.root = found.identity(f"{config.model_type} kv={dtype}")
        with torch.inference_mode():
            self._model = loader.build(config, dtype, self._device, hf.ATTENTION)
            loader.fill(self._model, found, self._device)
            probe(self._model, self._device, self._ops)
            sites = hf.discover(self._model)
            shape = KVShape(
                len(sites), sites[0].num_kv_heads, sites[0].head_dim, self.block_size, dtype
            )
            self.num_blocks = settings.num_blocks or plan_num_blocks(
                shape, self._device, self.max_model_len, settings.kv_memory
            )
            self.store = KVStore(shape, self.num_blocks, self._device, self._ops)
            self._step = hf.StepSlot()
            llama.install(self._model, sites, self.store, self._ops, self._step)
            hf.attach(sites, self.store, self._ops, self._step)
            pack_linears(self._model)
        self._head = hf.Head(self._model, self._min_rows)
        self._sampler = Sampler(self._ops, self.eos_token_ids)

    def launch(self, rows: Sequence[Row]) -> Ticket:
        return Collected(self.execute(rows))

    @torch.inference_mode()
    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        packed = pack(rows, self.block_size, self._device, self._min_rows)
        self._step.context = packed.context
        hidden = hf.hidden_states(self._model, packed.token_ids, packed.positions)
        drawn = self._draw(rows, packed, hidden)
        results = []
        for index, row in enumerate(rows):
            prompt = self._prompt_logprobs(row, packed.starts[index], hidden)
            results.append(RowResult(tuple(drawn[index]), prompt))
        return results

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.store.copy_blocks(pairs)

    def _draw(
        self, rows: Sequence[Row], packed: PackedStep, hidden: torch.Tensor
    ) -> list[list[Drawn]]:
        """Only the last token of a row that draws reaches the head; its draws share the logits."""
        drawing = [index for index, row in enumerate(rows) if row.draws]
        drawn: list[list[Drawn]] = [[] for _ in rows]
        if not drawing:
            return drawn
        last = [packed.starts[index] + len(rows[index].tokens) - 1 for index in drawing]
        logits = self._head(hidden[torch.tensor(last, device=self._device)])
        owners: list[int] = []
        draws: list[Draw] = []
        for place, index in enumerate(drawing):
            owners += [place] * len(rows[index].draws)
            draws += rows[index].draws
        if len(owners) != len(drawing):
            logits = logits[torch.tensor(owners, device=self._device)]
        for place, token in zip(owners, self._sampler.draw(logits, draws), strict=True):
            drawn[drawing[place]].append(token)
        return drawn

    def _prompt_logprobs(
        self, row: Row, start: int, hidden: torch.Tensor
    ) -> tuple[TokenLogprob, ...]:
        if row.prompt_logprobs < 0:
            return ()
        targets = [*row.tokens[1:], *([row.next_token] if row.next_token >= 0 else [])]
        found: list[TokenLogprob] = []
        for first in range(0, len(targets), _LOGPROB_ROWS):
            part = targets[first : first + _LOGPROB_ROWS]
            logits = self._head(hidden[start + first : start + first + len(part)])
            found += token_logprobs(logits, part, row.prompt_logprobs)
        return tuple(found)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"The device {name} is not there.")
    return torch.device(name)


def _dtype(name: str, device: torch.device, checkpoints: torch.dtype | None) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else checkpoints or torch.bfloat16
    if name not in _DTYPES:
        raise ModelError(f"The dtype {name} is not one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]
