"""The world that fairness is played in: an engine on a simulated or a real device, and everybody who sends to it."""

from __future__ import annotations

import heapq
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fakes import generate_request, scripted_engine
from simulation import BlindRunner

from workers.engine.settings import WorkerSettings
from workers.protocol.messages import Failed, Finished, GenerateRequest, StepFrame

if TYPE_CHECKING:
    from workers.engine.device.runner import ModelRunner

PACE = (0.008, 30e-6, 20e-9)
SLOW_PACE = (0.004, 130e-6, 100e-9)
"""The costs of a small model on two cores: fixed costs are small, tokens are not."""
NUM_BLOCKS = 16_000
TARGET_S = WorkerSettings.model_fields["engine_ttft_target_ms"].default / 1000
"""The target of a worker at its default settings. A request that would wait longer is refused."""
IDLE_S = 0.002
"""A round without work takes the clock on by so much."""


@dataclass
class Client:
    """One request, as its sender sees it."""

    at: float
    request: GenerateRequest
    first: float = -1.0
    ended: float = -1.0
    refusals: list[float] = field(default_factory=list)
    """Seconds told at each refusal."""

    @property
    def ttft(self) -> float:
        return self.first - self.at


class Simulated:
    """A device of a known pace, and time that its steps take on."""

    def __init__(self, pace: tuple[float, float, float] = PACE) -> None:
        self.now = 0.0
        self.max_batch_tokens, self.max_running = (2048, 128) if pace == PACE else (512, 256)
        self.runner = BlindRunner(pace, num_blocks=NUM_BLOCKS, max_model_len=40_000)
        self.runner.elapse = self.wait

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def rest(self, before: float, *, busy: bool) -> None:
        """Moves the clock on after a round that began at `before` and took no time."""
        if self.now == before:
            self.now += IDLE_S


class Real:
    """A loaded model, and the clock on the wall."""

    max_batch_tokens, max_running = 512, 64

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._start = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._start

    def rest(self, before: float, *, busy: bool) -> None:
        if not busy:
            time.sleep(IDLE_S / 4)


@dataclass
class World:
    """An engine on a device, and everybody who sends to it. Clients are given in any order."""

    clients: list[Client]
    patient: bool = False
    """Come again when told."""
    device: Simulated | Real = field(default_factory=Simulated)
    policy: str = "fair"
    num_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Prompt and output tokens that ended requests and streams got, by tenant."""

    def run(self, until: float) -> World:
        device = self.device
        engine = scripted_engine(
            device.runner,
            max_batch_tokens=device.max_batch_tokens,
            max_running=device.max_running,
            policy=self.policy,
            ttft_s=TARGET_S,
            clock=lambda: device.now,
        )
        coming = [(client.at, number) for number, client in enumerate(self.clients)]
        heapq.heapify(coming)
        by_id = {client.request.request_id: client for client in self.clients}
        number_of = {id(client): number for number, client in enumerate(self.clients)}
        while device.now < until and (coming or engine.attempts):
            inbox = []
            while coming and coming[0][0] <= device.now:
                inbox.append((1, self.clients[heapq.heappop(coming)[1]].request))
            before = device.now
            out = engine.step(inbox)
            device.rest(before, busy=bool(out.steps or engine.num_in_flight))
            for _, message in out.messages:
                if isinstance(message, StepFrame):
                    self._deltas(message, by_id)
                elif isinstance(message, Finished):
                    by_id[message.request_id].ended = device.now
                elif isinstance(message, Failed):
                    client = by_id[message.request_id]
                    after_s = message.retry_after_ms / 1000
                    client.refusals.append(after_s)
                    if self.patient:
                        heapq.heappush(coming, (device.now + after_s, number_of[id(client)]))
        return self

    def _deltas(self, frame: StepFrame, by_id: dict[str, Client]) -> None:
        for delta in frame.deltas:
            client = by_id[delta.request_id]
            tenant = client.request.tenant
            self.num_tokens[tenant] += len(delta.tokens)
            if client.first < 0:
                client.first = self.device.now
                self.num_tokens[tenant] += len(client.request.prompt)


def poisson(
    tenant: str,
    rate: float,
    until: float,
    seed: int,
    *,
    prompt: tuple[int, int] = (200, 1000),
    output: tuple[int, int] = (20, 80),
    tier: str = "interactive",
    since: float = 0.0,
    **fields: Any,
) -> list[Client]:
    """Requests of one tenant, `rate` a second, no two prompts alike."""
    rng = random.Random(f"{tenant}/{seed}")
    clients, at = [], since
    while (at := at + rng.expovariate(rate)) < until:
        name = f"{tenant}{len(clients)}"
        head = [rng.randrange(256) for _ in range(16)]
        tokens = (head + [98] * rng.randint(*prompt))[: rng.randint(*prompt)]
        num_output = rng.randint(*output)
        request = generate_request(name, tokens, num_output, tenant=tenant, tier=tier, **fields)
        clients.append(Client(at, request))
    return clients


def p99(clients: list[Client]) -> float:
    values = sorted(c.ttft for c in clients if c.first >= 0)
    assert len(values) >= 100, f"only {len(values)} requests: no 99th percentile"
    return values[min(len(values) - 1, int(0.99 * len(values)))]


def percentiles(clients: list[Client]) -> dict[str, float]:
    values = sorted(c.ttft for c in clients if c.first >= 0)
    return {f"p{p}": values[min(len(values) - 1, p * len(values) // 100)] for p in (50, 90, 95, 99)}


def jain_of(clients: list[Client]) -> dict[str, float]:
    """Jain's index of the charges of each tenant's ended requests."""
    charges = dict.fromkeys((client.request.tenant for client in clients), 0.0)
    for client in clients:
        if client.ended >= 0:
            message = client.request
            charges[message.tenant] += len(message.prompt) + 2 * message.max_tokens
    values = list(charges.values())
    jain = sum(values) ** 2 / (len(values) * sum(v * v for v in values))
    return {"jain": jain, **{f"charge_{tenant}": value for tenant, value in charges.items()}}
