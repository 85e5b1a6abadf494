"""The reports of a worker: its heartbeat, its adapters, and each second a report for its operator."""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.protocol.base import Frame

MAX_REPORTED_STEPS = 60
MAX_REPORTED_TENANTS = 200


class WorkerStatus(Frame, frozen=True, tag="status"):
    """The worker's heartbeat on a link, sent each second."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0
    prefill_rate: float = 0.0
    """Prompt tokens per second in full steps, as the forecast of their duration gives it; 0 stands for not known."""
    decode_rate: float = 0.0
    """Tokens per second, as a moving average."""
    last_step_age_ms: int = 0
    """Milliseconds since the engine thread's last round. An engine without work, or with parked sequences only, still
    makes two rounds a second, so a large age means a hang."""
    draining: bool = False
    cache_seq: int = -1
    """The number of the last `CacheEvent`; -1 if nobody has asked for events."""
    disk_full: bool = False
    """The disk of the worker's journal is full: running requests end, and no new ones are accepted."""


class AdapterState(Frame, frozen=True):
    name: str
    state: Literal["loading", "loaded", "unloading", "failed"]
    identity: bytes = b""
    """A digest of the adapter that was loaded. Equal identities mean equal KV."""
    reason: str = ""


class AdapterReport(Frame, frozen=True, tag="adapters"):
    """All LoRA adapters of a worker. It is sent after the worker's hello, and whenever one changes."""

    adapters: tuple[AdapterState, ...] = ()


class KernelReport(Frame, frozen=True, array_like=True):
    """The implementation that runs for an op, and how its comparison with the op's twin at the start ended: `twin`,
    `equal`, `differs` or `unchecked`."""

    op: str
    implementation: str
    state: str


class GraphReport(Frame, frozen=True, array_like=True):
    """Whether decode steps of up to `num_rows` rows are replayed from a recording: `equal` if it gave the bits of the
    call; called if it did not (`differs`), or if nothing could be recorded (`failed`)."""

    num_rows: int
    state: str


class StepReport(Frame, frozen=True, array_like=True):
    """One step that ran recently."""

    step: int
    age_ms: int
    """Milliseconds from its end to the report."""
    execute_us: int
    num_sequences: int
    num_prefill_tokens: int
    num_decode_tokens: int


class TenantReport(Frame, frozen=True, array_like=True):
    """The requests and blocks that one tenant has in the worker now."""

    tenant: str
    weight: float = 1.0
    running: int = 0
    waiting: int = 0
    oldest_wait_ms: int = 0
    held_blocks: int = 0
    """Blocks of the prefix tree under a running sequence or a pin."""
    retained_blocks: int = 0
    """Blocks of the prefix tree that could be evicted."""
    pinned_blocks: int = 0
    evicted_blocks: int = 0
    """Blocks that the tenant lost to anybody's need since the process began."""


class StepTimes(Frame, frozen=True):
    """The costs of steps, as they were seen: fixed seconds, seconds per token, seconds per token of KV that is read."""

    num_steps: int = 0
    """Steps that were seen. Below eight nothing is predicted from them."""
    fixed_s: float = 0.0
    token_s: float = 0.0
    kv_token_s: float = 0.0


class EngineReport(Frame, frozen=True, tag="engine_report"):
    """The report of a worker for its operator, sent each second."""

    wait_ms: int = 0
    """The forecast of the waiting time of a request that comes now."""
    step_times: StepTimes = StepTimes()
    cache_nodes: int = 0
    pinned_blocks: int = 0
    evicted_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    """Blocks that were evicted since the process began, by cause."""
    kernels: tuple[KernelReport, ...] = ()
    graphs: tuple[GraphReport, ...] = ()
    """The decode steps that were to be recorded, by rising size."""
    steps: tuple[StepReport, ...] = ()
    """The last steps, the oldest first."""
    tenants: tuple[TenantReport, ...] = ()
    """The tenants with most requests, then most blocks, in the worker; at most `MAX_REPORTED_TENANTS`."""
