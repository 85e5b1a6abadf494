"""Stand-ins for what is slow or random: a model of bytes, and a worker around it that can misbehave on purpose.

`ScriptedRunner` takes the place of the model and nothing else; `ScriptedWorker` serves the real protocol with the real
engine, scheduler, cache and journal. Vocabulary of 259: bytes 0-255, 256 bos, 257 eos, 258 pad.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
from scripted_host import ScriptedHost

from cache.host.tiers import HostTier
from cache.prefix_cache import PrefixCache
from workers.engine.engine import Engine
from workers.engine.journal.journal import EngineJournal
from workers.engine.metrics import Metrics
from workers.engine.scheduling.speculation import Speculation
from workers.engine.scheduling.step_plan import Limits
from workers.engine.service import Identity, Service, hello_of
from workers.engine.sparsity.budget import Sparsity
from workers.engine.sparsity.layout import SparseLayout
from workers.engine.step.attempts import GrammarSource
from workers.engine.techniques import POLICIES
from workers.engine.tiers.restores import Preempt
from workers.engine.values.abilities import GENERATES, Abilities
from workers.engine.values.errors import ModelError
from workers.engine.values.layout import Tree
from workers.engine.values.plan import (
    AdapterWeights,
    Collected,
    GraphState,
    KernelState,
    LoadedAdapter,
    Row,
    RowResult,
    SampledToken,
    SampleSpec,
    Ticket,
)
from workers.engine.values.probe import DECAY, AttentionMass, Pooled
from workers.process.tls.certificates import Certificate
from workers.protocol.messages import (
    GenerateRequest,
    Message,
    Region,
    SamplingParams,
    StepFrame,
    TokenLogprob,
    TopLogprob,
)

BOS, EOS, PAD = 256, 257, 258
BYTES_PER_BLOCK = 1_000_000
VOCAB_SIZE = 259
VECTOR_SIZE = 8
ROOT = "scripted@1"
MODEL = "scripted"
BALLAST_BYTES = 1024 * 1024
UNWRITTEN = -1
HEAVY = ord("!")
"""Blocks with this byte in them are looked at."""
LETTERS = b" abcdefghijklmnopqrstuvwxyz\n"


def encode(text: str) -> tuple[int, ...]:
    return (BOS, *text.encode())


def decode(tokens: Sequence[int]) -> str:
    return bytes(t for t in tokens if t < 256).decode(errors="replace")


def script(tokens: Sequence[int], draw: SampleSpec, eos_every: int = 0) -> int:
    """The token after `tokens`: a function of every one of them and, above temperature 0, of seed and position."""
    state = zlib.crc32(tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens))
    if draw.params.temperature > 0:
        state = zlib.crc32(f"{draw.seed}/{draw.position}".encode(), state)
    if eos_every and state % eos_every == 0 and len(draw.output) >= draw.params.min_tokens:
        return EOS
    return LETTERS[(state >> 8) % len(LETTERS)]


def allowed(token: int, mask: bytes | None, banned: Sequence[int] = ()) -> int:
    """The next token from there on, round and round, that the mask has and nothing bans."""
    if mask is None and token not in banned:
        return token
    bits = -1 if mask is None else int.from_bytes(mask, "little")
    bits &= ~sum(1 << t for t in set(banned))
    assert bits, "an empty mask"
    return next(t for t in chain(range(token, VOCAB_SIZE), range(token)) if bits >> t & 1)


def expected_output(
    prompt: Sequence[int], params: SamplingParams, max_tokens: int, *, seed: int | None = None, eos_every: int = 0
) -> list[int]:
    """Returns what one choice must be, computed without blocks, steps or neighbours."""
    output: list[int] = []
    while len(output) < max_tokens:
        tokens = [*prompt, *output]
        draw = SampleSpec(params, params.seed if seed is None else seed, len(tokens), prompt, output)
        output.append(script(tokens, draw, eos_every))
        ends = (() if params.ignore_eos else (EOS,)) + params.stop_token_ids
        if output[-1] in ends:
            break
    return output


def says_nothing(prompt: str) -> None:
    """No text of its own: the tokens are those of `script`."""


def scripted_vector(tokens: Sequence[int], probe: Pooled | None = None) -> bytes:
    """A vector that tells which tokens were seen, and in which order: `VECTOR_SIZE` numbers, or as many as are wanted. A
    score is one number."""
    state = zlib.crc32(array("i", list(tokens)).tobytes())
    probe = probe or Pooled(len(tokens))
    number = probe.dimensions or (1 if probe.labels else VECTOR_SIZE)
    return array(
        "f", [len(tokens), *(zlib.crc32(bytes([i]), state) % 1000 / 1000 for i in range(number - 1))]
    ).tobytes()


@dataclass(frozen=True)
class ScriptedAdapter:
    identity: bytes


class ScriptedRunner:
    """A model whose next token depends on all tokens it finds in its paged KV: a wrong block table, a block shared
    wrongly or written too early gives a wrong token or raises. `steps` records every plan it was given."""

    lag = 0

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        block_size: int = 16,
        max_model_len: int = 2048,
        eos_every: int = 0,
        step_s: float = 0.0,
        root: str = ROOT,
        abilities: Abilities = GENERATES,
        vocabulary: str = "",
    ) -> None:
        self.root = root
        self.vocabulary = vocabulary
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.bytes_per_block = BYTES_PER_BLOCK
        self.max_model_len = max_model_len
        self.eos_token_ids = (EOS,)
        self.vocab_size = VOCAB_SIZE
        self.kernels = (KernelState("attention", "torch", "twin"),)
        self.graphs = (GraphState(8, "equal"), GraphState(16, "differs"))
        self.takes_trees = True
        self.abilities = abilities
        self.adapters: dict[str, LoadedAdapter] = {}
        self.steps: list[list[Row]] = []
        self.says: Callable[[str], str | None] = says_nothing
        """Returns what the model answers to a prompt's text, where it is to say something that means something."""
        self.copies: list[tuple[int, int]] = []
        self.hanging = threading.Event()
        self.fail_next: Exception | None = None
        self._eos_every = eos_every
        self.step_s = step_s
        self._released = threading.Event()
        self._kv = [array("i", [UNWRITTEN] * block_size) for _ in range(num_blocks)]

    def launch(self, rows: Sequence[Row]) -> Ticket:
        return Collected(self.execute(rows))

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        assert rows, "an empty step"
        if self.hanging.is_set():
            self._released.wait()
        if self.step_s:
            time.sleep(self.step_s)
        if (error := self.fail_next) is not None:
            self.fail_next = None
            raise error
        self.steps.append(list(rows))
        for row in rows:  # all writes before all reads, as in one forward pass
            self._write(row)
        return [self._result(row) for row in rows]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.copies += pairs
        for source, destination in pairs:
            self._kv[destination][:] = self._kv[source]

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        found = [self._kv[source // size][source % size] for source, _ in moves]
        assert UNWRITTEN not in found, "KV was moved that nobody wrote"
        for (_, target), token in zip(moves, found, strict=True):
            self._kv[target // size][target % size] = token

    def read_adapter(self, directory: Path) -> ScriptedAdapter:
        try:
            return ScriptedAdapter((directory / "adapter").read_bytes().ljust(16)[:16])
        except OSError as error:
            raise ModelError(f"The adapter {directory} cannot be read: {error}.") from error

    def add_adapter(self, name: str, weights: AdapterWeights) -> None:
        self.adapters[name] = LoadedAdapter(len(self.adapters), weights.identity)

    def remove_adapter(self, name: str) -> None:
        del self.adapters[name]

    def hang(self) -> None:
        """The next step does not return until `release`."""
        self.hanging.set()

    def release(self) -> None:
        self.hanging.clear()
        self._released.set()

    def _write(self, row: Row) -> None:
        size = self.block_size
        for place, token in enumerate(row.tokens, row.kv_start):
            block = row.block_table[place // size]
            assert 0 < block < self.num_blocks, f"block {block} is not to be written"
            self._kv[block][place % size] = token

    def _read(self, row: Row) -> array[int]:
        tokens: array[int] = array("i")
        end = row.kv_start + len(row.tokens)
        for block in row.block_table[: -(-end // self.block_size)]:
            tokens += self._kv[block]
        tokens = tokens[:end]
        assert UNWRITTEN not in tokens, "KV was read that nobody wrote"
        return tokens

    def _branch(self, row: Row, node: int) -> list[int]:
        """Tokens of a tree's branch, read where the row wrote them: node i in the slot i + 1 behind the known token."""
        found = []
        while node >= 0:
            block, offset = divmod(row.start + 1 + node, self.block_size)
            found.append(self._kv[row.block_table[block]][offset])
            node = row.layout.parents[node]
        return found[::-1]

    def _result(self, row: Row) -> RowResult:
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if row.prompt_logprobs >= 0:
            following = [*row.tokens[1:], *([row.next_token] if row.next_token >= 0 else [])]
            prompt_logprobs = tuple(logprob_of(t, row.prompt_logprobs) for t in following)
        if isinstance(row.probe, Pooled):
            return RowResult(probed=self._pooled(row, row.probe))
        if not row.draws:
            return RowResult(prompt_logprobs=prompt_logprobs)
        tokens = self._read(row)
        drawn = []
        first = len(tokens) - row.num_proposed
        for place, draw in enumerate(row.draws):
            known = tokens[: first + place] if row.num_proposed else tokens
            if isinstance(row.layout, Tree):
                known = tokens[:first] + array("i", self._branch(row, place - 1))
            assert draw.position == len(known) + row.start - row.kv_start, "drawn at another position"
            assert is_thinned(known, [*draw.prompt, *draw.output], self.block_size), (
                "drawn behind other tokens than told"
            )
            token = allowed(self._next(known, draw), draw.mask, draw.banned)
            k = draw.params.logprobs
            drawn.append(SampledToken(token, logprob_of(token, k, draw.params.logprob_token_ids) if k >= 0 else None))
        return RowResult(tuple(drawn), prompt_logprobs, probed=self._mass(row))

    def _next(self, known: Sequence[int], draw: SampleSpec) -> int:
        said = None if self.says is says_nothing else self.says(decode(draw.prompt))
        if said is None:
            return script(known, draw, self._eos_every)
        return (*said.encode(), EOS)[min(len(draw.output), len(said.encode()))]

    def _pooled(self, row: Row, probe: Pooled) -> bytes | tuple[int, ...] | None:
        """`scripted_vector` of all tokens: of those in the KV, or of those that rows of this input had."""
        is_last = row.start + len(row.tokens) == probe.num_tokens
        if self.abilities.reuses_kv:
            return scripted_vector(self._read(row), probe) if is_last else None
        assert (probe.before is None) == (row.start == 0), "a sum that begins in the middle"
        assert is_last or not self.abilities.is_whole
        summed = (*(probe.before or ()), *row.tokens)
        return scripted_vector(summed, probe) if is_last else summed

    def _mass(self, row: Row) -> tuple[float, ...] | None:
        """A block is looked at by as much as it has `HEAVY` in it."""
        if not isinstance(row.probe, AttentionMass):
            return None
        tokens, size = self._read(row), self.block_size
        blocks = (tokens[first : first + size] for first in range(0, len(tokens), size))
        counts = [1e-3 + block.count(HEAVY) for block in blocks]
        total = (1 - DECAY**row.probe.num_tokens) / (1 - DECAY)
        return tuple(total * count / sum(counts) for count in counts)


def is_thinned(known: Sequence[int], tokens: Sequence[int], size: int) -> bool:
    """Whether these are the tokens without some whole blocks of them, in order; the end is there."""
    if len(known) == len(tokens) and list(known) == tokens:
        return True
    num_whole = len(known) - len(known) % size
    blocks = iter(tuple(tokens[i : i + size]) for i in range(0, len(tokens), size))
    kept = (tuple(known[i : i + size]) for i in range(0, num_whole, size))
    return all(block in blocks for block in kept) and (
        list(known[num_whole:]) == list(tokens[len(tokens) - len(known) + num_whole :])
    )


def logprob_of(token: int, k: int, given: Sequence[int] = ()) -> TokenLogprob:
    value = -1.0 - token / VOCAB_SIZE
    if given:
        return TokenLogprob(value, tuple(TopLogprob(one, -1.0 - one / VOCAB_SIZE) for one in given))
    return TokenLogprob(value, tuple(TopLogprob((token + i) % VOCAB_SIZE, value - i) for i in range(k)))


def generate_request(
    request_id: str = "req_1",
    prompt: Sequence[int] = encode("hello"),
    max_tokens: int = 8,
    *,
    tenant: str = "tenant",
    seed: int = 7,
    temperature: float = 0.0,
    sampling: SamplingParams | None = None,
    namespace: tuple[Region, ...] | None = None,
    **fields: object,
) -> GenerateRequest:
    """A request with a lease for all it may ask, unless told otherwise. Parameters that are to forbid an end at any length
    forbid it at this one."""
    fields.setdefault("lease_bound", max_tokens * int(fields.get("num_choices", 1)))
    sampling = sampling or SamplingParams(seed=seed, temperature=temperature)
    return GenerateRequest(
        request_id,
        tenant,
        MODEL,
        str(fields.pop("root", ROOT)),
        namespace or (Region(tenant.encode().ljust(16, b"\0")[:16]),),
        array("i", prompt),
        msgspec.structs.replace(sampling, min_tokens=min(sampling.min_tokens, max_tokens)),
        max_tokens,
        **fields,
    )


def scripted_engine(
    runner: ScriptedRunner,
    *,
    max_batch_tokens: int = 256,
    max_running: int = 64,
    journal: EngineJournal | None = None,
    allow_lag: bool = True,
    grammars: GrammarSource | None = None,
    speculate: Callable[[PrefixCache], Speculation] | None = None,
    host: ScriptedHost | None = None,
    preempt: Preempt = "auto",
    sparsity: Sparsity | None = None,
    policy: str = "fair",
    clock: Callable[[], float] = time.monotonic,
    **limits: float,
) -> Engine:
    cache = PrefixCache(
        runner.num_blocks,
        runner.block_size,
        now_ms=lambda: int(clock() * 1000),
        host=HostTier(host.num_slots, runner.block_size) if host else None,
    )
    num_blocks = runner.num_blocks - 1 - runner.num_blocks // 5
    if sparsity is not None:
        num_blocks -= sparsity.num_blocks
    capacity = num_blocks * runner.block_size
    max_len = min(runner.max_model_len, capacity)
    return Engine(
        runner,
        cache,
        Limits(max_batch_tokens, max_running, max_len, **limits),
        journal,
        grammars=grammars,
        lag=allow_lag,
        speculation=speculate(cache) if speculate else None,
        host=host,
        preempt=preempt,
        layout=None if sparsity is None else SparseLayout(sparsity),
        policy=POLICIES[policy],
        clock=clock,
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault says what goes wrong, once this many tokens have been sent over all links.

    crash: every link breaks and nobody listens any more; hang: steps stop, heartbeats go on; silence: nothing is sent
    any more, heartbeats included; garble: bytes that are no frame.
    """

    kind: Literal["crash", "hang", "silence", "garble"]
    after_tokens: int = 1


class ScriptedWorker:
    """`async with ScriptedWorker(tmp_path / "w.sock") as worker:` serves `worker.address` on the running loop."""

    def __init__(
        self,
        path: Path,
        *,
        tokens_per_s: float = 0.0,
        fault: Fault | None = None,
        redis_url: str = "",
        slot: int = 0,
        model: str = MODEL,
        runner: ScriptedRunner | None = None,
        journal_dir: Path | None = None,
        drain_s: float = 60.0,
        grammars: GrammarSource | None = None,
        address: str = "",
        certificate: Certificate | None = None,
        **limits: float,
    ) -> None:
        self.address = address or f"unix:{path}"
        self.runner = runner or ScriptedRunner(step_s=1 / tokens_per_s if tokens_per_s else 0.0)
        self.worker = f"worker-{slot}"
        self.num_tokens_sent = 0
        self._fault = fault
        process = str(uuid.uuid4())
        self._journal = (
            EngineJournal(journal_dir, self.worker, process, self.runner.root, ballast_bytes=BALLAST_BYTES)
            if journal_dir is not None
            else None
        )
        self.engine = scripted_engine(self.runner, journal=self._journal, grammars=grammars, **limits)
        self.service = _Service(
            self,
            Identity(
                self.worker,
                model,
                self.address,
                redis_url,
                self._journal.predecessor if self._journal else "",
                certificate,
            ),
            self.engine,
            hello_of(self.engine, model, process),
            Metrics(model, slot, self.runner.block_size, self.runner.num_blocks),
            self._journal.unacked if self._journal is not None else [],
            drain_s,
        )
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ScriptedWorker:
        self._task = asyncio.create_task(self.service.run())
        while not self.service.ready:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.runner.release()
        assert self._task is not None
        if not self._task.done():
            self.service._drain_s = 0.0
            self.service.drain()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._journal is not None:
            self._journal.close()

    def crash(self) -> None:
        """Ends as a killed process does, seen from outside."""
        self.service.crash()

    def sent(self, message: Message) -> Message | None:
        """Returns what becomes of a message on its way out; counts tokens and lets the fault happen."""
        if isinstance(message, StepFrame):
            self.num_tokens_sent += sum(len(delta.tokens) for delta in message.deltas)
        fault = self._fault
        if fault is None or self.num_tokens_sent < fault.after_tokens:
            return message
        if fault.kind == "crash":
            asyncio.get_running_loop().call_soon(self.crash)
        elif fault.kind == "hang":
            self.runner.hang()
            return message
        elif fault.kind == "garble":
            self.service.garble()
        return None


class _Service(Service):
    """The real one, with a hand on its cables."""

    def __init__(self, owner: ScriptedWorker, *args: object) -> None:
        super().__init__(*args)
        self._owner = owner

    def _send(self, link: int, message: Message) -> None:
        passed = self._owner.sent(message)
        if passed is not None:
            super()._send(link, passed)

    def garble(self) -> None:
        for connection in self._links.values():
            connection._writer.write(b"\xff" * 64)

    def crash(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self._links.values()):
            connection.abort()
