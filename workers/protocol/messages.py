"""The frames between a gateway and a worker: frozen msgspec structs, and nothing else.

They have token ids, block counts and opaque tenant ids, but no text, API keys, money or tensors.

A frame is a u32 length and one msgpack tagged union (`Message`), at most 16 MiB, on one ordered stream (`frames.py`).
Every new field has a default, so adjacent versions work together during a rollout. Integers are milliseconds where the
name ends in `_ms`. No clock time is sent. The ids of a prompt are four bytes each (`workers/protocol/frames.py`).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal

from workers.protocol.base import Frame
from workers.protocol.counts import EngineAck, EngineRecords, PromptCounts, ResidencyReport, TokenUsage
from workers.protocol.reports import AdapterReport, EngineReport, WorkerStatus

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # it takes no parameter at run time before Python 3.12

PROTOCOL_VERSION = 1

GATHERED_TOKENS = 16
"""The most tokens of one delta of a request with `gather`. A gateway extends a lease when 64 tokens are left of it by
what it has received, so it must stay well below."""

Tier = Literal["interactive", "batch"]
Task = Literal["generate", "embed", "score"]
FinishReason = Literal["stop", "length", "budget", "lease", "cancelled"]
FailCode = Literal["no_lease", "overloaded", "draining", "too_long", "grammar", "disk_full", "wrong_root", "internal"]


class Hello(Frame, frozen=True, tag="hello"):
    """The first frame in both directions. A gateway leaves the worker's fields at their defaults."""

    version: int
    process: str
    """A uuid of the process, drawn at its start."""
    model: str = ""
    root: str = ""
    """The KV identity: model, weight version, tokenizer revision, adapter, KV format. Equal roots mean equal KV."""
    block_size: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    max_running: int = 0
    """The most sequences that run at once."""
    tasks: tuple[Task, ...] = ("generate",)
    """The tasks that the worker's model can do."""
    vector_size: int = 0
    """The numbers of a vector, for a worker that can `embed`."""
    dimensions: tuple[int, ...] = ()
    """The sizes to which a vector may be cut."""
    any_dimensions: bool = False
    """A vector may be cut to any size."""
    pairs: Literal["", "segments", "labels"] = ""
    """The way in which a worker that can `score` takes two texts. `segments`: as one input of two segments. `labels`: in
    a prompt that is answered by one of two tokens."""
    vocabulary: str = ""
    """The digest of the tokens and their ids (`workers/process/vocabulary_digest.py`). A worker that says none is sent
    every prompt, one that says another than the gateway's is sent none."""
    takes_over: bool = False
    """The worker goes on with requests of lost workers, and takes a drain back. Earlier versions do neither well."""


class SamplingParams(Frame, frozen=True, weakref=True):
    """The way in which one request draws its tokens. The order of application is: penalties, bias, min_tokens and bans,
    temperature, top-k, top-p, min-p. `temperature` 0 is greedy."""

    seed: int
    """An unsigned integer of 64 bits. Choice 0 draws with it, choice i with the first 8 bytes of BLAKE2b over (seed,
    i)."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    """The number of logprobs. -1: none; k >= 0: the sampled token's logprob and those of the k best."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a choice, in addition to the model's own end ids. The token is committed and counted."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """The number of output tokens below which no end token, the model's or a given one, can be drawn."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences whose last token cannot be drawn directly after the tokens before it; tokens of the prompt do not
    count."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that can be drawn, end tokens included, unless the tuple is empty."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose logprobs come instead of those of the k best, in this order, if logprobs are wanted."""


class BeamParams(Frame, frozen=True):
    """A beam search instead of draws, by raw logprobs. Of the sampling parameters only end ids and `logprobs` count."""

    length_penalty: float = 1.0
    """The exponent of the length: the score of a text is the sum of its logprobs divided by its length to this
    power."""


class PoolingParams(Frame, frozen=True):
    """A request for a vector or a score of each input instead of tokens. The inputs follow each other in the prompt, and
    no input sees another. `max_tokens` is 0."""

    task: Literal["embed", "score"]
    lengths: tuple[int, ...]
    """The number of tokens of each input. Their sum is the length of the prompt."""
    dimensions: int = 0
    """The numbers of a vector that are kept; then it has length 1 again. 0 keeps all."""
    segments: tuple[int, ...] = ()
    """The tokens before the second segment of each input; empty if the inputs are single texts."""
    labels: tuple[int, ...] = ()
    """The two token ids whose logits make the score: the one that means yes, and the one that means no."""


class Region(Frame, frozen=True):
    """One entry of a namespace path (cache/tree/namespaces.py)."""

    id: bytes
    """16 bytes: a keyed hash of level, tenant, key or user, salt. The gateway makes it; it is opaque here."""
    end: int = -1
    """The first token outside of the region; -1 in the last entry of a path."""


class CacheRange(Frame, frozen=True):
    """The priority of a run of prompt tokens in the prefix cache. The gateway makes it from tier and key, never from a
    request body. If two ranges overlap, the later one counts."""

    start: int = 0
    end: int = -1
    """The first token after the range; -1 stands for the end of the prompt."""
    priority: int = 50
    """A value from 0 to 100."""
    ttl_s: int = 0
    """Seconds for which the range and all tokens before it are pinned after each use, as far as the budget of pins
    allows."""


class GenerateRequest(Frame, frozen=True, tag="generate"):
    request_id: str
    tenant: str
    model: str
    root: str
    namespace: tuple[Region, ...]
    prompt: TokenIds
    sampling: SamplingParams
    max_tokens: int
    """The bound on output tokens of each choice; 0 means prefill only."""
    lease_bound: int = 0
    """Output tokens that the request may commit over all choices and attempts. 0 is refused with no_lease unless
    max_tokens is 0."""
    lease_seq: int = 0
    attempt: int = 0
    num_choices: int = 1
    tier: Tier = "interactive"
    weight: float = 1.0
    cache_read: bool = True
    cache_write: bool = True
    pinned: bool = False
    cache_floor_blocks: int = 0
    """Blocks of the tree that stay with the tenant even if others need them. The last value of a tenant stays."""
    cache_quota_blocks: int = -1
    """The most blocks of the tree that the tenant may have; -1 stands for no bound. The last value of a tenant
    stays."""
    retention: tuple[CacheRange, ...] = ()
    output_priority: int = -1
    """The priority of output blocks in the prefix tree; -1 stands for a little less than the prompt's."""
    grammar: str = ""
    traceparent: str = ""
    prompt_logprobs: int = -1
    """The number of logprobs of prompt tokens. -1: none; k >= 0: the logprob of each prompt token and those of the k
    best. Such a prompt is computed and not read from the cache."""
    resume: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """The (index, output ids) of each unfinished choice when an attempt > 0 continues another."""
    num_output_spent: int = 0
    adapter: str = ""
    """The name of a LoRA adapter that the worker has; empty stands for the model itself. Its KV differs from the
    model's, so the worker appends the adapter's identity to every region id of the path."""
    beams: BeamParams | None = None
    """Beam search with `num_choices` beams. Its tokens come at its end, with the choices in the order of their
    scores."""
    pooling: PoolingParams | None = None
    """Vectors or scores instead of tokens. Only a worker whose `Hello.tasks` names the task is sent such a request."""
    gather: bool = False
    """Nobody reads the answer before its end: after the first token, `GATHERED_TOKENS` may travel in one delta. Only for
    a request of one choice without logprobs."""


class ExtendLease(Frame, frozen=True, tag="extend"):
    request_id: str
    lease_seq: int
    bound: int
    """An absolute bound over all choices. It never falls, and it applies only if `lease_seq` is newer."""
    last: bool = False
    """There is no budget beyond this: at the bound the request ends with reason `budget`."""
    wait_ms: int = 0
    """Milliseconds after which the gateway tries to extend the lease again, as the request is paced. The time that the
    worker waits for a lease starts anew."""


class Cancel(Frame, frozen=True, tag="cancel"):
    request_id: str
    index: int = -1
    """The choice to cancel; -1 stands for every choice."""
    reason: str = "client"


class CacheCommand(Frame, frozen=True, tag="cache_command"):
    action: Literal["snapshot", "unpin", "drop"]
    region: bytes = b""
    """The region of an `unpin`."""
    tenant: str = ""
    """The tenant of a `drop`: all that this tenant has in any tier is dropped."""
    key: bytes = b""
    """The key of group hashes for a `snapshot` (cache/tree/hashing.py). From then on the link gets every `CacheEvent`, the
    snapshot first."""


class CacheProbe(Frame, frozen=True, tag="peek"):
    """A question: how much of this prompt is cached, and how long would it wait? Nothing is run, and no cache entry is
    touched."""

    peek_id: int
    """A number of the sender, which the answer repeats."""
    root: str
    namespace: tuple[Region, ...]
    prompt: TokenIds
    cache_read: bool = True
    adapter: str = ""


class TopLogprob(Frame, frozen=True, gc=False):
    token: int
    logprob: float


class TokenLogprob(Frame, frozen=True, gc=False):
    # Without the collector's count: a prompt has 200,000 of both, and each part of them would begin a collection.
    logprob: float
    """The log-softmax of the raw logits, before every transformation."""
    top: tuple[TopLogprob, ...] = ()


class TokenDelta(Frame, frozen=True):
    request_id: str
    attempt: int
    index: int
    seq_no: int
    """The number of output tokens of that choice before this delta."""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop_token: int = -1
    """The token id that ended the choice, for finish `stop`."""
    prompt: PromptCounts | None = None
    """The counts of the prompt, only in the first delta of a request."""
    prompt_logprobs: tuple[bytes, ...] = ()
    """Logprobs of the prompt in parts (`prompt_logprobs.py`), only in the first delta and only if asked for."""
    num_spent: int = 0
    """The output tokens of all beams of a beam search up to now, discarded beams included."""
    vector: bytes = b""
    """The result of the input `index` of a request with `pooling`: float32, little endian. A score is one number."""


class StepFrame(Frame, frozen=True, tag="step"):
    """All deltas of one step for one gateway."""

    step: int
    deltas: tuple[TokenDelta, ...]


class CacheReport(Frame, frozen=True):
    """The reason why no more of the prompt was cached. It concerns only the caller's region and the public one."""

    cached_tokens: int = 0
    public_tokens: int = 0
    miss_reason: str = ""
    diverged_at_token: int = -1
    evicted_age_ms: int = -1
    num_pinned_blocks: int = 0


class TimelineEvent(Frame, frozen=True, array_like=True):
    """An event of a request. docs/observability.md names and explains all of them; a reader ignores names that it does
    not know."""

    name: str
    offset_us: int
    """Microseconds on the worker's monotonic clock since the request arrived there."""
    step: int = -1
    num_tokens: int = 0


class Finished(Frame, frozen=True, tag="finished"):
    """The successful end of an attempt. It comes after the last delta on the same link, also after `Cancel`."""

    request_id: str
    attempt: int
    usage: TokenUsage
    reason: FinishReason
    """The reason of the last choice. Each choice's own reason is in its delta."""
    cache: CacheReport = CacheReport()
    timeline: tuple[TimelineEvent, ...] = ()


class Failed(Frame, frozen=True, tag="failed"):
    """The unsuccessful end of an attempt."""

    request_id: str
    attempt: int
    usage: TokenUsage
    code: FailCode
    message: str = ""
    retry_after_ms: int = 0
    timeline: tuple[TimelineEvent, ...] = ()


class CacheProbed(Frame, frozen=True, tag="peeked"):
    peek_id: int
    num_cached_tokens: int = 0
    """The tokens of whole cached blocks, at most all tokens but one. -1 means that such a prompt would be refused
    here."""
    wait_ms: int = 0
    """The forecast of the waiting time if everything that waits goes first."""


class AdapterCommand(Frame, frozen=True, tag="adapter_command"):
    """A command to load or unload an adapter. It is idempotent, so every gateway may send it. `unload` waits for the
    sequences that run with the adapter."""

    action: Literal["load", "unload"]
    name: str
    path: str = ""
    """A directory in PEFT's format, on the worker's machine."""


class DrainCommand(Frame, frozen=True, tag="drain"):
    """The worker takes nothing new from now on and finishes what runs. It is idempotent. The process stays until its
    operator ends it."""

    taken_back: bool = False
    """The worker takes requests again, unless its process was told to end."""


class Alive(Frame, frozen=True, tag="alive"):
    """The gateway's heartbeat, sent each second. A link that is silent for 3 to 4 s is lost, and its sequences end with
    it."""


class CacheEvent(Frame, frozen=True, tag="cache_event"):
    """Whole groups of 64 tokens that were inserted into the prefix tree or left it (cache/tree/groups.py)."""

    seq: int
    """A number that rises by one. A missing number means that events were lost; the gateway then asks for a
    snapshot."""
    reset: bool = False
    """The event is a snapshot as of `seq`: it has all groups that are present."""
    inserted: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


ToWorker = (
    Hello
    | GenerateRequest
    | ExtendLease
    | Cancel
    | CacheCommand
    | AdapterCommand
    | DrainCommand
    | CacheProbe
    | Alive
    | EngineAck
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
    | EngineReport
)
Message = ToWorker | ToGateway
