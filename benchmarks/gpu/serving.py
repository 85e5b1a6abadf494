"""Requests through the engine, without a gateway: the step loop of a worker, driven from here."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cache.prefix_cache import PrefixCache
from workers.engine.engine import Engine, Event
from workers.engine.scheduling.step_plan import Limits
from workers.engine.values.plan import StepRunner
from workers.protocol.messages import Failed, Finished, GenerateRequest, Region, SamplingParams, StepFrame

_LINK = 1
_REGION = Region(b"benchmark-tenant")


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass
class Served:
    """One run. Times in seconds."""

    seconds: float = 0.0
    num_output: int = 0
    num_cached: int = 0
    num_prefill: int = 0
    num_steps: int = 0
    first_token_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def output_per_s(self) -> float:
        return self.num_output / self.seconds

    @property
    def median_first_token_s(self) -> float:
        return statistics.median(self.first_token_s) if self.first_token_s else 0.0


def mixed_workload(num_seqs: int, longest: int, shortest: int = 100) -> list[Ask]:
    """The workload of nano-vllm's `bench.py`, with its generator and seed 0: input and output lengths uniform.
    With 256 sequences of up to 1,024 tokens: 142,827 in, 133,966 out."""
    draw = random.Random(0)
    prompts = [tuple(draw.randint(0, 10_000) for _ in range(draw.randint(shortest, longest))) for _ in range(num_seqs)]
    return [Ask(prompt, draw.randint(shortest, longest)) for prompt in prompts]


def shared_workload(num_users: int, shared: int, own: int, output: int, vocab: int) -> list[Ask]:
    """Users of one long system prompt, each with a question of their own."""
    draw = random.Random(1)
    system = [draw.randrange(vocab) for _ in range(shared)]
    return [Ask(tuple(system + [draw.randrange(vocab) for _ in range(own)]), output) for _ in range(num_users)]


def build(runner: StepRunner, max_batch_tokens: int, max_running: int) -> Engine:
    cache = PrefixCache(runner.num_blocks, runner.block_size)
    capacity = (runner.num_blocks - 1) * runner.block_size
    limits = Limits(max_batch_tokens, max_running, min(runner.max_model_len, capacity))
    return Engine(runner, cache, limits)


def serve(engine: Engine, asks: Sequence[Ask], temperature: float, cache_read: bool) -> Served:
    """All requests at once, until the last has ended."""
    served = Served()
    started = time.perf_counter()
    waiting = {str(number) for number in range(len(asks))}
    inbox: list[tuple[int, Event]] = [
        (_LINK, _request(number, ask, engine.runner.root, temperature, cache_read)) for number, ask in enumerate(asks)
    ]
    seen: set[str] = set()
    while waiting:
        output = engine.step(inbox)
        inbox = []
        served.num_steps += len(output.steps)
        now = time.perf_counter() - started
        for _, message in output.messages:
            if isinstance(message, StepFrame):
                new = {delta.request_id for delta in message.deltas if delta.tokens} - seen
                seen |= new
                served.first_token_s += [now] * len(new)
            elif isinstance(message, Finished | Failed):
                waiting.discard(message.request_id)
                _add(served, message)
    served.seconds = time.perf_counter() - started
    return served


def _request(number: int, ask: Ask, root: str, temperature: float, cache_read: bool) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number),
        tenant="benchmark",
        model="benchmark",
        root=root,
        namespace=(_REGION,),
        prompt=ask.prompt,
        sampling=SamplingParams(seed=number, temperature=temperature, ignore_eos=True),
        max_tokens=ask.max_tokens,
        lease_bound=ask.max_tokens,
        cache_read=cache_read,
        cache_write=cache_read,
    )


def _add(served: Served, message: Finished | Failed) -> None:
    if isinstance(message, Failed):
        served.failures.append(f"{message.code}: {message.message}")
    usage = message.usage
    served.num_output += usage.output
    served.num_cached += usage.cache_read
    served.num_prefill += usage.uncached + usage.cache_write
