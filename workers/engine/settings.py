"""Settings of a worker process: one frozen class, read once from the environment, passed on as values.

Names that other processes share are `HEADGATE_<NAME>`, the engine's own `HEADGATE_ENGINE_<NAME>`.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import pydantic

from workers.engine.values.errors import StartError
from workers.process import refused_settings, setting_forms
from workers.process.tls.certificates import Files, link_files
from workers.protocol import addresses

PREFIX = "HEADGATE_"
OWN_PREFIX = "HEADGATE_ENGINE_"
LOG_FORM = "HEADGATE_LOG_FORM"
EXIT_CONFIG = 78
"""Exit status of a configuration error (sysexits.h). The supervisor does not restart a process that ends with it."""
EXIT_NOT_YET = 1
"""The status of a start that may succeed later with the same settings, so that a supervisor tries again."""


class WorkerSettings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), validate_default=True)

    home: Path = Path("~/.headgate")
    """The state directory, with journal and sockets."""
    state_dir: Path | None = None
    """Directory of the slots' journals. Unset: `home/state`."""
    slot: int = pydantic.Field(default=0, ge=0)
    """Number of this worker among those of the state directory. Each has its own journal."""
    model: str
    """A Hugging Face directory or a hub id."""
    model_id: str = ""
    """Name of the model for clients. Unset: the last part of `model`."""
    worker_address: setting_forms.WorkerAddress = ""
    """Address of the worker, `unix:/path` or `tcp:host:port`. Unset: a socket in the home's run directory."""
    link_ca: Path | None = None
    """A file with the authority by which gateways and workers know each other (PEM). With it, a `tcp:` address speaks TLS,
    and both ends show a certificate (docs/several-hosts.md)."""
    link_cert: Path | None = None
    """File with this worker's certificate, which is for the host of its address (PEM). It is read again when it changes."""
    link_key: Path | None = None
    """File of that certificate's private key (PEM, without a password)."""
    link_plain: bool = False
    """Whether a `tcp:` address beyond this machine may go without TLS. Prompts and answers travel in the clear then, and
    whoever reaches the port can use the worker."""
    redis_url: setting_forms.RedisUrl = ""
    """Redis server where gateways look for workers. Unset: they find workers another way."""
    threads: int | None = pydantic.Field(default=None, ge=1)
    """Number of threads that compute on this CPU. Unset: as many as cores."""
    ops_bind: setting_forms.Bind = ""
    """Address of probes and metrics. Unset: 127.0.0.1, port 9400 + slot, or any port if that one is taken."""
    ops_fd: int | None = pydantic.Field(default=None, ge=0)
    """File descriptor of an inherited listening socket for probes and metrics. It replaces `ops_bind`."""
    heartbeat_fd: int | None = pydantic.Field(default=None, ge=0)
    """Inherited descriptor that the loop beats on each second. `headgate up` restarts a worker that is silent."""
    drain_s: float = pydantic.Field(default=60.0, ge=0)
    """Time that a stop waits for running requests before it ends them."""
    metrics_tenant_detail: bool = False
    """Whether cache metrics have a series per tenant: held and retained blocks, block-seconds, evictions."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level of the messages that are logged."""

    engine_task: Literal["auto", "generate", "embed", "score"] = "auto"
    """Task of the model. auto: the one that its files show. generate: tokens. embed: vectors. score: scores of pairs of texts,
    by a classifier or, of a model that generates, by the tokens yes and no."""
    engine_device: str = pydantic.Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device that runs the model: `auto`, `cpu`, `cuda` or `cuda:N`."""
    engine_cpu: Literal["auto", "avx2", "avx512", "avx512_bf16", "amx"] = "auto"
    """Instructions that the CPU kernels may use. auto: those that this CPU has. A kind: none beyond it, for finding
    faults and for equal outputs on unlike CPUs. The kernels read it from the environment
    (`kernels.cpu.instructions`)."""
    engine_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of weights and activations in computation."""
    engine_tensor_parallel: int = pydantic.Field(default=1, ge=1, le=64)
    """Processes (GPUs) that one copy of the model is split over."""
    engine_kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Data type of stored KV. auto: the dtype. 8-bit KV holds about twice the tokens and changes outputs a little."""
    engine_kv_sparsity: Literal["off", "heavy", "recent"] = "off"
    """LOSSY: a sequence holds `engine_kv_budget` tokens of KV at most once its prompt is computed, and sees no others.
    heavy: the first block, the latest ones, and those that received the most attention (H2O). recent: the first and the
    latest (StreamingLLM). Sequences that cannot grow beyond the budget are not changed."""
    engine_kv_budget: int | None = pydantic.Field(default=None, ge=1)
    """Number of tokens, rounded down to blocks. There must be at least 4 blocks."""
    engine_quant: Literal["none", "int8", "int4", "fp8", "w8a8", "llm_int8"] = "none"
    """Format to which linear layers are rounded at load; the head is not. It needs less memory, and makes steps of few
    rows faster on a GPU."""
    engine_fuse: Literal["on", "off"] = "on"
    """Fusion of layers, for models whose layers are transformers' own. on: layers with the same input become one
    product, and norms and activations become fewer operations, each compared at load with what it replaces. off: for
    finding faults."""
    engine_smoothing: Path | None = None
    """File of statistics from `headgate calibrate`. Activations are smoothed with it before a rounding format rounds
    them."""
    engine_adapters: Path | None = None
    """A directory with a LoRA adapter (PEFT's form) in each folder. Each is loaded at start under the folder's name."""
    engine_max_adapters: int | None = pydantic.Field(default=None, ge=0, le=256)
    """Number of adapters that can be loaded, those of the directory included. Unset: 8 on a CPU, allocated with the
    first adapter; none on a GPU, where adapters cost the recorded decode steps."""
    engine_max_adapter_rank: int = pydantic.Field(default=16, ge=1, le=64)
    """The largest rank that an adapter may have."""
    engine_block_size: int = pydantic.Field(default=16, ge=1, le=256)
    """Number of tokens of KV in a block. Blocks are the unit of sharing and eviction."""
    engine_num_blocks: int | None = pydantic.Field(default=None, ge=8)
    """Number of KV blocks, the null block included. Unset: as many as fit the memory."""
    engine_kv_memory: int | None = pydantic.Field(default=None, ge=1)
    """Bytes for KV on each rank, used where the number of blocks is not given."""
    engine_memory_share: float = pydantic.Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory for weights, a step's activations, recorded steps and KV together. KV gets the part that
    the others leave, measured at start. The share is not used where blocks or KV memory are given, nor on a CPU."""
    engine_shared_attention: Literal["off", "on"] = "off"
    """Shared attention on a GPU: a long prefix that many rows share is read once for all of them. A row's last bits
    then depend on its neighbours, and such steps are called, not replayed."""
    engine_graphs: Literal["on", "off", "check"] = "on"
    """Execution of decode steps on a GPU. on: they are recorded at start and replayed. off: they are called. check:
    they are replayed and compared with a call each time, for finding faults."""
    engine_max_model_len: int | None = pydantic.Field(default=None, ge=2)
    """Largest number of positions of a sequence. Unset: the model's own."""
    engine_max_batch_tokens: int = pydantic.Field(default=512, ge=1)
    """Token budget of a step. A larger one is faster for prompts, and slower between two tokens of a stream."""
    engine_max_running: int = pydantic.Field(default=256, ge=1)
    """Largest number of sequences in one step."""
    engine_ttft_target_ms: int = pydantic.Field(default=60_000, ge=1)
    """Longest forecast wait of an interactive request before its prompt begins. A request that would wait longer is
    refused, and is sent the time to come again. The default is a minute because clients wait for ten, and a refused
    client sends the whole request again."""
    engine_token_gap_target_ms: int = pydantic.Field(default=50, ge=1)
    """Time that a step should take while an interactive request waits. Steps have no more tokens than that allows, down
    to 256, and streams take turns where there is no time for all of them."""
    engine_lease_wait_ms: int = pydantic.Field(default=2000, ge=0)
    """Time for which a sequence whose lease has run out keeps its blocks while it waits for the next lease."""
    engine_speculate: Literal["off", "ngram", "suffix", "tree", "draft", "heads", "lookahead"] = "off"
    """Proposer of tokens, which a step then verifies, several at a time. Outputs stay the same. ngram: the request's
    own text, which pays where an answer copies from its prompt. suffix: also what its tenant's own namespace computed
    before. tree: as suffix, but several continuations at a time where texts went on differently. draft: a small model,
    `engine_draft_model`. heads: heads trained for the model, `engine_heads`. lookahead: the model itself, which
    computes guesses together with each token; set 24 proposals for it."""
    engine_draft_model: str = ""
    """Directory or hub id of the draft model, whose vocabulary is the model's. On a GPU the memory share must leave
    memory for it."""
    engine_heads: Path | None = None
    """A safetensors file of Medusa heads that were trained for the model, or a directory with one."""
    engine_speculate_proposals: int = pydantic.Field(default=8, ge=1, le=63)
    """Largest number of proposals for one sequence in a step, all branches of a tree together."""
    engine_speculate_step_tokens: int = pydantic.Field(default=128, ge=2)
    """Largest value of sequences times (1 + proposals) in a step with proposals. Above it nothing is proposed, because
    a step is bound by arithmetic there."""
    engine_host_cache: int = pydantic.Field(default=0, ge=0)
    """Bytes of host memory for copies of cached blocks. Copied are blocks that were hit twice or have a high priority,
    and those of preempted sequences. The memory is pinned where there is a GPU."""
    engine_shared_cache: str = pydantic.Field(default="", pattern=r"^((redis|rediss|unix)://.+|[/~].*|)$")
    """Store in which workers of one model share copies of blocks: a Redis or Valkey URL, or a directory. It needs the
    host cache, through which all copies pass."""
    engine_shared_cache_bytes: int = pydantic.Field(default=16 * 1024**3, ge=1)
    """Largest number of bytes of all workers' shared copies together. The oldest are dropped first."""
    engine_shared_cache_ttl_s: int = pydantic.Field(default=3600, ge=1)
    """Time after which a shared copy is dropped, counted from when it was written."""
    engine_shared_cache_secret: Path | None = None
    """A file of 32 bytes or more, the same for all workers that share. Unset: `secrets/shared_cache.key` in the home,
    drawn by the first worker."""
    engine_preempt: Literal["auto", "recompute", "swap"] = "auto"
    """Treatment of the blocks of a preempted sequence. recompute: they are computed again. swap: they are kept in the
    host cache. auto: whichever was measured to be faster."""
    engine_policy: Literal["fair", "fcfs"] = "fair"
    """Order of requests inside a tier. fair: tenants in shares by their weights, and inside a tenant the longest cached
    prefix first. fcfs: first come, first served, whoever the tenant is; the latest is preempted first. fcfs is a
    baseline: a flood of one tenant makes everybody wait."""
    engine_lag: Literal["auto", "off"] = "auto"
    """Planning of steps ahead. auto: a step is planned while the device runs the one before, where the runner can do
    that. off: never."""

    _are_named = pydantic.field_validator(
        "home",
        "state_dir",
        "engine_smoothing",
        "engine_adapters",
        "engine_heads",
        "engine_shared_cache_secret",
        "link_ca",
        "link_cert",
        "link_key",
        mode="before",
    )(setting_forms.named)

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
                "HEADGATE_ENGINE_KV_SPARSITY cannot be combined with HEADGATE_ENGINE_SPECULATE or HEADGATE_ENGINE_TENSOR_PARALLEL"
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
            raise ValueError("HEADGATE_ENGINE_HOST_CACHE cannot be combined with HEADGATE_ENGINE_TENSOR_PARALLEL")
        return self

    @pydantic.model_validator(mode="after")
    def _links_are_closed_to_strangers(self) -> WorkerSettings:
        setting_forms.of_links(self.link_ca, self.link_cert, self.link_key, is_plain=self.link_plain)
        if self.link_ca is None and not self.link_plain and addresses.is_open(self.address):
            raise ValueError(f"HEADGATE_WORKER_ADDRESS = {self.address}: {addresses.NEEDS_TLS}")
        return self

    @property
    def link_files(self) -> Files | None:
        """The files of the certificate for links to gateways."""
        return link_files(self.link_ca, self.link_cert, self.link_key)

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
    """Reads the settings from the environment. Raises `StartError` that names the variable."""
    known = {PREFIX + name.upper() for name in WorkerSettings.model_fields}
    for name in sorted(os.environ):
        if name.startswith(OWN_PREFIX) and name not in known:
            meant = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {meant[0]}?" if meant else ""
            raise StartError(f"{name} is not a setting of the worker.{hint}")
    environ = setting_forms.given(os.environ)
    values = {
        name: environ[PREFIX + name.upper()] for name in WorkerSettings.model_fields if PREFIX + name.upper() in environ
    }
    found = refused_settings.read(WorkerSettings, values, {LOG_FORM: setting_forms.OF_ALL[LOG_FORM]}, environ)
    if isinstance(found, list):
        raise StartError(found[0].message, found)
    return found


def check() -> int:
    """Reads the settings of this process's environment, and says what is wrong with them: a sentence, and all as JSON."""
    try:
        load()
    except StartError as error:
        print(json.dumps([asdict(one) for one in error.problems]))
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(check())
