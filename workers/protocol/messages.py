"""The frames between a gateway and a worker: frozen msgspec structs, and nothing else.

Knows token ids, block counts and opaque tenant ids. Does not know text, api keys, money or tensors.

A frame is a u32 length and one msgpack tagged union (`Message`), at most 16 MiB, on one ordered stream
(`frames.py`). Every new field has a default, so neighbouring versions work together during a rollout.
Integers are milliseconds where the name ends in `_ms`; no clock time crosses the wire.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PROTOCOL_VERSION = 1

Tier = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length", "budget", "lease", "cancelled"]
FailCode = Literal[
    "no_lease", "overloaded", "draining", "too_long", "grammar", "deadline", "disk_full", "wrong_root", "internal"
]


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """Base of every struct on the wire. `omit_defaults` keeps a step's frame small."""


class Hello(Frame, frozen=True, tag="hello"):
    """First frame, both ways. A gateway leaves the worker's fields at their defaults."""

    version: int
    process: str
    """uuid of the process, drawn at its start."""
    model: str = ""
    root: str = ""
    """KV identity: model, weight version, tokenizer revision, adapter, KV format. Equal roots, equal KV."""
    block_size: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    max_running: int = 0
    """Sequences that run at once."""
    peeks: bool = False
    """The worker answers `CacheProbe`; one that does not say so is not asked."""
    adapters: bool = False
    """Understands `AdapterCommand`, or `AdapterReport`: a neighbouring version is not sent what it cannot read."""
    residency: bool = False
    """Of a gateway: understands `ResidencyReport`."""


class SamplingParams(Frame, frozen=True):
    """How one request draws its tokens. The order of application: penalties, bias, min_tokens and bans, temperature,
    top-k, top-p, min-p. `temperature` 0 is greedy."""

    seed: int
    """64 bit, unsigned. Choice 0 draws with it, choice i with the first 8 bytes of BLAKE2b over (seed, i)."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    """-1: none; k >= 0: the sampled token's logprob and those of the k best."""
    stop_token_ids: tuple[int, ...] = ()
    """These end a choice in addition to the model's own end ids; the token is committed and counted."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """Below this no end token, own or given, can be drawn."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The last token of each cannot be drawn where the ones before it were drawn last; the prompt does not count."""
    allowed_token_ids: tuple[int, ...] = ()
    """If any: no other token can be drawn, end tokens included."""


class BeamParams(Frame, frozen=True):
    """A search in place of draws, by raw logprobs: of the sampling parameters only end ids and `logprobs` count."""

    length_penalty: float = 1.0
    """A text is worth the sum of its logprobs over its length to this power."""


class Region(Frame, frozen=True):
    """One step of a namespace path (cache/tree/namespaces.py)."""

    id: bytes
    """16 bytes: a keyed hash of level, tenant, key or user, salt; made by the gateway, opaque here."""
    end: int = -1
    """First token outside of the region; -1 in the last entry of a path."""


class CacheRange(Frame, frozen=True):
    """What a run of prompt tokens is worth to the prefix cache: made by the gateway from tier and key, never from a
    body. Later ranges decide where two overlap."""

    start: int = 0
    end: int = -1
    """Exclusive; -1: the end of the prompt."""
    priority: int = 50
    """0 to 100."""
    ttl_s: int = 0
    """Pinned, with all before it, for so long after each use; as much of it as the budget of pins allows."""


class GenerateRequest(Frame, frozen=True, tag="generate"):
    request_id: str
    tenant: str
    model: str
    root: str
    namespace: tuple[Region, ...]
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    """Output bound of each choice; 0 = prefill only."""
    lease_bound: int = 0
    """Output tokens the request may commit over all choices and attempts; 0 without max_tokens 0: no_lease."""
    lease_seq: int = 0
    attempt: int = 0
    num_choices: int = 1
    tier: Tier = "interactive"
    weight: float = 1.0
    cache_read: bool = True
    cache_write: bool = True
    pinned: bool = False
    cache_floor_blocks: int = 0
    """Blocks of the tree that no other tenant's need takes; the last value of a tenant stays."""
    cache_quota_blocks: int = -1
    """Blocks of the tree that the tenant may have; -1: no bound. The last value of a tenant stays."""
    retention: tuple[CacheRange, ...] = ()
    output_priority: int = -1
    """Of output blocks in the prefix tree; -1: a little less than the prompt's."""
    deadline_ms: int = 0
    """Time left at sending; 0 = none."""
    grammar: str = ""
    traceparent: str = ""
    prompt_logprobs: int = -1
    """-1: none; k >= 0: the logprob of each prompt token and of the k best (such a prompt is computed, not read)."""
    resume: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(index, output ids) of each unfinished choice when an attempt > 0 continues another."""
    num_output_spent: int = 0
    adapter: str = ""
    """Name of a LoRA adapter that the worker has; empty: the model itself. Its KV is not the model's: the worker puts the
    adapter's identity behind every region id of the path."""
    beams: BeamParams | None = None
    """Beam search with `num_choices` beams. Its tokens come at its end, choices in the order of their scores."""


class ExtendLease(Frame, frozen=True, tag="extend"):
    request_id: str
    lease_seq: int
    bound: int
    """Absolute, over all choices. Never falls; applied only if `lease_seq` is newer."""
    last: bool = False
    """No budget beyond this: at the bound the request ends with reason `budget`."""
    wait_ms: int = 0
    """Paced: the gateway will try again then. Restarts the parking clock."""


class Cancel(Frame, frozen=True, tag="cancel"):
    request_id: str
    index: int = -1
    """-1: every choice."""
    reason: str = "client"


class CacheCommand(Frame, frozen=True, tag="cache_command"):
    action: Literal["snapshot", "unpin", "drop"]
    region: bytes = b""
    tenant: str = ""
    """With `drop`, and instead of a region: all that this tenant has in the tree."""
    key: bytes = b""
    """With `snapshot`: what group hashes are keyed with (cache/tree/hashing.py). From here on the link gets every
    `CacheEvent`, the snapshot first."""


class CacheProbe(Frame, frozen=True, tag="peek"):
    """How much of this prompt is cached, and how long would it wait? Nothing runs, and nothing is touched."""

    peek_id: int
    """Of the link's other side: the answer carries it back."""
    root: str
    namespace: tuple[Region, ...]
    prompt: tuple[int, ...]
    cache_read: bool = True
    adapter: str = ""


class TopLogprob(Frame, frozen=True):
    token: int
    logprob: float


class TokenLogprob(Frame, frozen=True):
    logprob: float
    """Log-softmax of the raw logits, before every transformation."""
    top: tuple[TopLogprob, ...] = ()


class TokenDelta(Frame, frozen=True):
    request_id: str
    attempt: int
    index: int
    seq_no: int
    """Output tokens of that choice before this delta."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_token: int = -1
    """The token id that ended the choice, with finish `stop`."""
    prompt: PromptCounts | None = None
    """Only in the first delta of a request."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    """Only in the first delta, and only if asked for; the first entry is None."""
    num_spent: int = 0
    """Of a beam search: output tokens of all beams up to now, those of given up ones too."""


class PromptCounts(Frame, frozen=True):
    """Disjoint parts of the prompt, fixed when the prefill ends."""

    cache_read: int = 0
    cache_write: int = 0
    uncached: int = 0


class StepFrame(Frame, frozen=True, tag="step"):
    """All deltas of one step for one gateway."""

    step: int
    deltas: tuple[TokenDelta, ...]


class TokenUsage(Frame, frozen=True):
    """What the engine computed for one attempt. The first four are disjoint and billable:
    prompt = cache_read + cache_write + uncached."""

    cache_read: int = 0
    cache_write: int = 0
    """Computed by this request and inserted by it as prefix nodes."""
    uncached: int = 0
    """Computed, not inserted."""
    output: int = 0
    speculated: int = 0
    """Rejected draft tokens; never billed."""
    recomputed: int = 0
    """Tokens computed again after preemption or resumption; never billed."""

    @property
    def prompt(self) -> int:
        return self.cache_read + self.cache_write + self.uncached


class CacheReport(Frame, frozen=True):
    """Why the prompt was not cached further; speaks of the caller's region and the public one only."""

    cached_tokens: int = 0
    public_tokens: int = 0
    miss_reason: str = ""
    diverged_at_token: int = -1
    evicted_age_ms: int = -1
    num_pinned_blocks: int = 0


class TimelineEvent(Frame, frozen=True, array_like=True):
    """`name` is one of queued, matched, chunk, first_token, preempted, resumed, parked, finished."""

    name: str
    offset_us: int
    """Microseconds on the worker's monotonic clock since the request arrived there."""
    step: int = -1
    num_tokens: int = 0


class Finished(Frame, frozen=True, tag="finished"):
    """The one good ending of an attempt, behind its last delta on the same link, also after `Cancel`."""

    request_id: str
    attempt: int
    usage: TokenUsage
    reason: FinishReason
    """Of the last choice; each choice's own is in its delta."""
    cache: CacheReport = CacheReport()
    timeline: tuple[TimelineEvent, ...] = ()
    held_block_ms: int = 0
    """Blocks that its choices held, shared ones counted once, integrated over milliseconds."""


class Failed(Frame, frozen=True, tag="failed"):
    """The one bad ending of an attempt."""

    request_id: str
    attempt: int
    usage: TokenUsage
    code: FailCode
    message: str = ""
    retryable: bool = False
    retry_after_ms: int = 0
    timeline: tuple[TimelineEvent, ...] = ()
    held_block_ms: int = 0


class WorkerStatus(Frame, frozen=True, tag="status"):
    """Each second: the worker's heartbeat on a link."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0
    prefill_rate: float = 0.0
    """Prompt tokens per second in full steps, as long as such are forecast to take; 0: not known."""
    decode_rate: float = 0.0
    """Tokens per second, moving average."""
    last_step_age_ms: int = 0
    """Since the engine thread's last round; an engine without work, or with parked sequences only, still makes two a
    second, so a large age means a hang."""
    draining: bool = False
    cache_seq: int = -1
    """Of the last `CacheEvent`; -1: nobody has asked for them."""
    disk_full: bool = False
    """Its journal has no room: what runs ends, nothing new is accepted."""


class CacheProbed(Frame, frozen=True, tag="peeked"):
    peek_id: int
    num_cached_tokens: int = 0
    """Whole blocks, at most all tokens but one. -1: such a prompt would be refused here."""
    wait_ms: int = 0
    """Forecast for somebody whom all that waits goes before."""


class AdapterCommand(Frame, frozen=True, tag="adapter_command"):
    """Idempotent, so every gateway may say the same. `unload` waits for the sequences that run with it."""

    action: Literal["load", "unload"]
    name: str
    path: str = ""
    """A directory in PEFT's form, on the worker's machine."""


class AdapterState(Frame, frozen=True):
    name: str
    state: Literal["loading", "loaded", "unloading", "failed"]
    identity: bytes = b""
    """A digest of what was loaded: equal identities, equal KV."""
    reason: str = ""


class AdapterReport(Frame, frozen=True, tag="adapters"):
    """All LoRA adapters of a worker: behind its hello, and whenever one changes."""

    adapters: tuple[AdapterState, ...] = ()


class Alive(Frame, frozen=True, tag="alive"):
    """Each second: the gateway's heartbeat. A link silent for 3 s is lost, and its sequences end with it."""


class CacheEvent(Frame, frozen=True, tag="cache_event"):
    """Whole groups of 64 tokens that came into the prefix tree or left it (cache/tree/groups.py)."""

    seq: int
    """Counts up by one; a number left out means that events were lost, and a snapshot is asked for."""
    reset: bool = False
    """A snapshot as of `seq`: all that is there."""
    inserted: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()
    tier: Literal["device", "host", "shared"] = "device"


class EngineRecord(Frame, frozen=True):
    """One finished attempt in the engine's own journal: the independent witness of metering."""

    seq: int
    request_id: str
    attempt: int
    tenant: str
    root: str
    usage: TokenUsage
    lease_bound: int = 0
    reason: str = ""


class EngineRecords(Frame, frozen=True, tag="records"):
    """Shipped through any connected gateway; kept by the worker until `EngineAck`."""

    worker: str
    records: tuple[EngineRecord, ...]


class EngineAck(Frame, frozen=True, tag="ack"):
    worker: str
    seq: int
    """The last record that is committed in SQL."""


class TenantHour(Frame, frozen=True, array_like=True):
    """Byte-milliseconds of one hour so far: of KV in the tree, and of what pins kept there, which is not in `cache`."""

    hour: int
    """Its first Unix second."""
    tenant: str
    cache: int
    pinned: int


class ResidencyReport(Frame, frozen=True, tag="residency"):
    """Each minute, of this hour and the one before: sums of this process, which only rise. Not acknowledged."""

    process: str
    model: str
    hours: tuple[TenantHour, ...]


ToWorker = (
    Hello | GenerateRequest | ExtendLease | Cancel | CacheCommand | AdapterCommand | CacheProbe | Alive | EngineAck
)
ToGateway = (
    Hello
    | StepFrame
    | Finished
    | Failed
    | WorkerStatus
    | CacheEvent
    | AdapterReport
    | CacheProbed
    | EngineRecords
    | ResidencyReport
)
Message = ToWorker | ToGateway
