"""What a worker process is told: one frozen class, read once from the environment, handed down as values.

Names that other processes share are `HEADGATE_<NAME>`, the engine's own `HEADGATE_ENGINE_<NAME>`.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Literal

import pydantic
import pydantic_settings

from workers.engine.values.errors import StartError

PREFIX = "HEADGATE_"
OWN_PREFIX = "HEADGATE_ENGINE_"


class WorkerSettings(pydantic_settings.BaseSettings):
    model_config = pydantic_settings.SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="ignore", protected_namespaces=()
    )

    home: Path = Path("~/.headgate")
    """The state directory: journal and sockets."""
    state_dir: Path | None = None
    """Where the slots' journals are; unset: `home/state`."""
    slot: int = pydantic.Field(default=0, ge=0)
    """Which of the workers of this state directory it is: each has a journal of its own."""
    model: str
    """A Hugging Face directory or a hub id."""
    model_id: str = ""
    """What clients call it; empty: the last part of `model`."""
    worker_address: str = pydantic.Field(default="", pattern=r"^(unix:/.+|tcp:.+:\d+|)$")
    """`unix:/path` or `tcp:host:port`; empty: a socket in the home's run directory."""
    redis_url: str = ""
    """Where gateways look for workers; empty: they are told another way."""
    threads: int | None = pydantic.Field(default=None, ge=1)
    """Threads that compute on this CPU; unset: as many as cores."""
    ops_bind: str = pydantic.Field(default="", pattern=r"^(.+:\d+|)$")
    """Probes and metrics; empty: 127.0.0.1, port 9400 + slot, or any port if that one is taken."""
    ops_fd: int | None = pydantic.Field(default=None, ge=0)
    """An inherited listening socket for them; wins over `ops_bind`."""
    drain_s: float = pydantic.Field(default=60.0, ge=0)
    """A stop waits so long for running requests before it ends them."""
    metrics_tenant_detail: bool = False
    """A series per tenant on cache metrics: held and retained blocks, block-seconds, evictions."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """How much is logged."""

    engine_device: str = pydantic.Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    engine_cpu: Literal["auto", "avx2", "avx512", "avx512_bf16", "amx"] = "auto"
    """auto: the instructions that this CPU has. A kind: none beyond it, for finding faults and for equal outputs on unlike
    CPUs; the kernels read it from the environment (`kernels.cpu.instructions`)."""
    engine_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """What weights and activations are computed in."""
    engine_tensor_parallel: int = pydantic.Field(default=1, ge=1, le=64)
    """Processes (GPUs) that one copy of the model is split over."""
    engine_kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """What KV is stored in. auto: the dtype; 8-bit KV holds about twice the tokens and changes outputs a little."""
    engine_kv_sparsity: Literal["off", "heavy", "recent"] = "off"
    """LOSSY: a sequence holds `engine_kv_budget` tokens of KV at most once its prompt is computed, and sees no others.
    heavy: the first block, the latest ones, and those that were looked at most (H2O); recent: the first and the latest
    (StreamingLLM). Sequences that cannot grow beyond the budget are untouched."""
    engine_kv_budget: int | None = pydantic.Field(default=None, ge=1)
    """Tokens, rounded down to blocks; at least 4 of these."""
    engine_quant: Literal["none", "int8", "int4", "fp8", "w8a8", "llm_int8"] = "none"
    """Linear layers are rounded to it at load, the head is not: less memory and faster steps of few rows on a GPU."""
    engine_fuse: Literal["on", "off"] = "on"
    """Models whose layers are transformers' own: layers with the same input become one product, norms and activations fewer
    operations, each compared with what it replaces at load. off: for finding faults."""
    engine_grammar: Literal["xgrammar", "llguidance"] = "xgrammar"
    """The library that follows grammars of requests; llguidance is the extra of that name."""
    engine_smoothing: Path | None = None
    """Statistics of `headgate calibrate`: activations are smoothed before a rounding format rounds them."""
    engine_adapters: Path | None = None
    """A directory with a LoRA adapter (PEFT's form) in each folder, loaded at start under the folder's name."""
    engine_max_adapters: int | None = pydantic.Field(default=None, ge=0, le=256)
    """Places for adapters, those of the directory included. Unset: 8 on a CPU, made with the first adapter; none on a
    GPU, where places cost the recorded decode steps."""
    engine_max_adapter_rank: int = pydantic.Field(default=16, ge=1, le=64)
    """The largest rank that an adapter may have."""
    engine_block_size: int = pydantic.Field(default=16, ge=1, le=256)
    """Tokens of KV in a block, which is what is shared and evicted."""
    engine_num_blocks: int | None = pydantic.Field(default=None, ge=8)
    """The null block included; unset: what the memory holds."""
    engine_kv_memory: int | None = pydantic.Field(default=None, ge=1)
    """Bytes for KV on each rank, where the number of blocks is not given."""
    engine_memory_share: float = pydantic.Field(default=0.9, gt=0, le=1)
    """Of a GPU's memory, for weights, a step's activations, recorded steps and KV together. KV gets what the rest
    leaves, measured at start; not used where blocks or KV memory are given, nor on a CPU."""
    engine_shared_attention: Literal["off", "on"] = "off"
    """On a GPU: a long prefix that many rows share is read once for all of them. A row's last bits then depend on its
    neighbours, and such steps are called, not replayed."""
    engine_graphs: Literal["on", "off", "check"] = "on"
    """Decode steps on a GPU: recorded at start and replayed; called; replayed and compared with a call each time, for
    finding faults."""
    engine_max_model_len: int | None = pydantic.Field(default=None, ge=2)
    """Positions of a sequence; unset: the model's own."""
    engine_max_batch_tokens: int = pydantic.Field(default=512, ge=1)
    """Token budget of a step: more is faster for prompts and slower between two tokens of a stream."""
    engine_max_running: int = pydantic.Field(default=256, ge=1)
    """Sequences in one step."""
    engine_ttft_target_ms: int = pydantic.Field(default=60_000, ge=1)
    """An interactive request that is forecast to wait longer before its prompt begins is refused, with the time to come
    again. A minute: clients wait ten, and whoever is refused sends it all again."""
    engine_token_gap_target_ms: int = pydantic.Field(default=50, ge=1)
    """What a step should take while somebody interactive waits: steps have no more tokens than that allows, down to 256, and
    streams take turns where there is no time for all of them."""
    engine_lease_wait_ms: int = pydantic.Field(default=2000, ge=0)
    """A sequence whose lease has run out keeps its blocks so long for the next one."""
    engine_speculate: Literal["off", "ngram", "suffix", "tree", "draft", "heads", "lookahead"] = "off"
    """Who proposes tokens that a step then proves, several at a time; outputs stay the same. ngram: the request's own
    text, which pays where an answer copies from its prompt. suffix: also what its tenant's own namespace computed before.
    tree: as suffix, but several continuations at a time where texts went on differently. draft: a small model,
    `engine_draft_model`. heads: trained for the model, `engine_heads`. lookahead: the model itself, which computes guesses
    beside each token; give it 24 proposals."""
    engine_draft_model: str = ""
    """A directory or hub id; its vocabulary is the model's. On a GPU leave memory for it with the memory share."""
    engine_heads: Path | None = None
    """A safetensors file of Medusa heads that were trained for the model, or a directory with one."""
    engine_speculate_proposals: int = pydantic.Field(default=8, ge=1, le=63)
    """At most so many for one sequence in a step, all branches of a tree together."""
    engine_speculate_step_tokens: int = pydantic.Field(default=128, ge=2)
    """Nothing is proposed where sequences times (1 + proposals) would be more: there a step is bound by arithmetic."""
    engine_host_cache: int = pydantic.Field(default=0, ge=0)
    """Bytes of host memory for copies of cached blocks: of what was hit twice, or is worth much, and of preempted
    sequences. Pinned where there is a GPU."""
    engine_shared_cache: str = pydantic.Field(default="", pattern=r"^((redis|rediss|unix)://.+|[/~].*|)$")
    """Where workers of one model leave copies for each other: a Redis or Valkey URL, or a directory. Needs the host
    cache, which everything passes through."""
    engine_shared_cache_bytes: int = pydantic.Field(default=16 * 1024**3, ge=1)
    """Of all workers together; the oldest goes first."""
    engine_shared_cache_ttl_s: int = pydantic.Field(default=3600, ge=1)
    """A shared copy that nobody took for so long is dropped."""
    engine_shared_cache_secret: Path | None = None
    """A file of 32 bytes or more, the same for all workers that share. Unset: `secrets/shared_cache.key` in the home,
    drawn by the first worker."""
    engine_preempt: Literal["auto", "recompute", "swap"] = "auto"
    """What becomes of the blocks of a sequence that has to make room: computed again, kept in the host cache, or
    whichever was measured to be faster."""
    engine_policy: Literal["fair", "fcfs"] = "fair"
    """Whose turn it is inside a tier. fair: tenants in shares by their weights, inside a tenant the longest cached prefix.
    fcfs: whoever came first, whoever's it is; the latest is preempted first. A baseline: one tenant's flood is everybody's
    wait."""
    engine_lag: Literal["auto", "off"] = "auto"
    """auto: plan a step while the device runs the one before, where the runner can; off: never."""

    @pydantic.field_validator(
        "home",
        "state_dir",
        "engine_smoothing",
        "engine_adapters",
        "engine_heads",
        "engine_shared_cache_secret",
        mode="before",
    )
    @classmethod
    def _is_named(cls, value: object) -> object:
        """An empty path would be the directory one happens to be in."""
        if value == "":
            raise ValueError("must not be empty")
        return value

    @pydantic.model_validator(mode="after")
    def _decodes_fit_a_step(self) -> WorkerSettings:
        if self.engine_max_running > self.engine_max_batch_tokens:
            raise ValueError("HEADGATE_ENGINE_MAX_RUNNING must not be above HEADGATE_ENGINE_MAX_BATCH_TOKENS")
        return self

    @pydantic.model_validator(mode="after")
    def _a_draft_is_a_model(self) -> WorkerSettings:
        if (self.engine_speculate == "draft") != bool(self.engine_draft_model):
            raise ValueError("HEADGATE_ENGINE_SPECULATE=draft and HEADGATE_ENGINE_DRAFT_MODEL need each other")
        return self

    @pydantic.model_validator(mode="after")
    def _what_is_dropped_is_bounded(self) -> WorkerSettings:
        if (self.engine_kv_sparsity == "off") != (self.engine_kv_budget is None):
            raise ValueError("HEADGATE_ENGINE_KV_SPARSITY and HEADGATE_ENGINE_KV_BUDGET need each other")
        if self.engine_kv_budget is None:
            return self
        if self.engine_speculate != "off" or self.engine_tensor_parallel > 1:
            raise ValueError(
                "HEADGATE_ENGINE_KV_SPARSITY goes with neither HEADGATE_ENGINE_SPECULATE nor HEADGATE_ENGINE_TENSOR_PARALLEL"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _heads_are_a_file(self) -> WorkerSettings:
        if (self.engine_speculate == "heads") != (self.engine_heads is not None):
            raise ValueError("HEADGATE_ENGINE_SPECULATE=heads and HEADGATE_ENGINE_HEADS need each other")
        return self

    @pydantic.model_validator(mode="after")
    def _a_swap_has_somewhere_to_go(self) -> WorkerSettings:
        if self.engine_preempt == "swap" and not self.engine_host_cache:
            raise ValueError("HEADGATE_ENGINE_PREEMPT=swap needs HEADGATE_ENGINE_HOST_CACHE")
        if self.engine_shared_cache and not self.engine_host_cache:
            raise ValueError("HEADGATE_ENGINE_SHARED_CACHE needs HEADGATE_ENGINE_HOST_CACHE")
        if self.engine_shared_cache and 64 % self.engine_block_size:
            raise ValueError("HEADGATE_ENGINE_SHARED_CACHE needs a block size that divides 64")
        if self.engine_host_cache and self.engine_tensor_parallel > 1:
            raise ValueError("HEADGATE_ENGINE_HOST_CACHE and HEADGATE_ENGINE_TENSOR_PARALLEL do not go together")
        return self

    @property
    def worker(self) -> str:
        return f"worker-{self.slot}"

    @property
    def served_name(self) -> str:
        return self.model_id or self.model.rstrip("/").rpartition("/")[2]

    @property
    def run_dir(self) -> Path:
        return self.home.expanduser().resolve() / "run"

    @property
    def address(self) -> str:
        return self.worker_address or f"unix:{self.run_dir / self.worker}.sock"

    @property
    def state_root(self) -> Path:
        return self.state_dir or self.home.expanduser().resolve() / "state"

    @property
    def journal_dir(self) -> Path:
        return self.state_root / self.worker / "journal"

    @property
    def shared_cache_secret(self) -> Path:
        told = self.engine_shared_cache_secret
        home = self.home.expanduser().resolve()
        return home / "secrets" / "shared_cache.key" if told is None else told.expanduser()

    @property
    def names_file(self) -> Path:
        return self.journal_dir.parent / "cached_names"


def load() -> WorkerSettings:
    """Raises `StartError` that names the variable."""
    known = {PREFIX + name.upper() for name in WorkerSettings.model_fields}
    for name in sorted(os.environ):
        if name.startswith(OWN_PREFIX) and name not in known:
            meant = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {meant[0]}?" if meant else ""
            raise StartError(f"{name} is not a setting of the worker.{hint}")
    try:
        return WorkerSettings()  # type: ignore[call-arg]  # from the environment
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # our own words about several
            raise StartError(f"{first['ctx']['error']}.") from None
        name = PREFIX + str(first["loc"][0]).upper()
        message = first["msg"]
        if first["type"] == "string_pattern_mismatch":
            message = "docs/configuration.md says how it is written"
        raise StartError(f"{name}: {message}.") from None
