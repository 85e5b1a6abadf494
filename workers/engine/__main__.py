"""`python -m workers.engine` runs one worker process. It reads the environment, takes the slot, loads the model and
serves.

The exit status is 0 after a drain, 78 with one sentence if the worker cannot start, 1 with one sentence if it cannot
because its journal's directory cannot be written now, and 2 if the engine broke while serving.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from cache.host.tiers import HostTier
from cache.prefix_cache import PrefixCache
from kernels.cpu import instructions
from workers.engine import settings, techniques
from workers.engine.engine import Engine
from workers.engine.grammars import library
from workers.engine.grammars.compiling import Grammars
from workers.engine.journal.journal import EngineJournal
from workers.engine.metrics import Metrics
from workers.engine.ops_server import OpsServer
from workers.engine.parallel.ranks import Ranks, meeting_file
from workers.engine.reports import predecessor
from workers.engine.scheduling.step_plan import Limits
from workers.engine.service import Identity, Service, hello_of
from workers.engine.settings import EXIT_CONFIG, EXIT_NOT_YET, WorkerSettings
from workers.engine.sizing import capacity
from workers.engine.tiers.shared_cache import opening
from workers.engine.tiers.shared_cache.store import Bounds
from workers.engine.untraced import untraced
from workers.engine.values.errors import CannotStartYet, StartError
from workers.engine.values.host_port import HostBlocks
from workers.engine.values.plan import StepRunner
from workers.process import file_systems, logs, waiting
from workers.process.heartbeat import Heartbeat
from workers.process.tls.certificates import Certificate, CertificateError, listening_context
from workers.process.tls.metrics import CertificateMetrics

logger = logging.getLogger("workers.engine")

GC_THRESHOLDS = (700, 5, 100)
"""Thresholds of the garbage collector. New objects are checked often and in small parts. All the objects that requests
hold are checked seldom, because steps wait for it."""
WARM_POLL_S, WARM_POLLS = 0.5, 10
"""Seconds between two polls, and the number of idle polls in a row after which a worker starts the compiler of
grammars."""


def main() -> int:
    # What a start makes is kept, so looking through it for garbage again and again finds little, and takes a second.
    gc.disable()
    try:
        told = settings.load()
        logs.configure(told.log_level, worker=told.worker)
        instructions.limit_libraries()
        waiting.bound()
        meeting = meeting_file(told.run_dir, told.worker)
        with Ranks(told.engine_tensor_parallel, meeting) as ranks:
            return run(told, ranks)
    except StartError as error:
        print(f"headgate worker: {error}", file=sys.stderr)
        return EXIT_NOT_YET if isinstance(error, CannotStartYet) else EXIT_CONFIG
    finally:
        gc.enable()


def run(told: WorkerSettings, ranks: Ranks) -> int:
    """Runs the worker and returns its exit status. Raises `StartError`."""
    if said := file_systems.on_a_network([told.journal_dir]):
        raise StartError(f"{said}. {file_systems.REMEDY}")
    try:
        certificate = None if told.link_files is None else Certificate(told.link_files, listening_context)
    except CertificateError as error:
        raise StartError(str(error)) from None
    runner = load_runner(told, ranks)
    process = str(uuid.uuid4())
    journal = EngineJournal(told.journal_dir, told.worker, process, runner.root)
    grammars = build_grammars(told, runner)
    engine = build_engine(told, runner, journal, grammars)
    predecessor.take(told.names_file, engine.cache, runner.root)
    metrics = Metrics(
        told.served_name, told.slot, runner.block_size, runner.num_blocks, by_tenant=told.metrics_tenant_detail
    )
    metrics.tell_kernels(runner.kernels)
    if certificate is not None:
        metrics.registry.register(CertificateMetrics({"links": certificate}))
    identity = Identity(told.worker, told.served_name, told.address, told.redis_url, journal.predecessor, certificate)
    hello = hello_of(engine, told.served_name, process)
    service = Service(identity, engine, hello, metrics, journal.unacked, told.drain_s)
    # The objects that exist now stay. A full collection of torch's and transformers' objects would stop every row for
    # 0.25 s.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()
    logger.info("collections are seldom", extra={"event": "collector_set", "num_frozen": gc.get_freeze_count()})
    try:
        asyncio.run(serve(service, OpsServer(service, metrics.registry), told, grammars))
    except OSError as error:
        raise StartError(f"The worker cannot listen: {error}.") from error
    finally:
        journal.close()
        if engine.shared is not None:
            engine.shared.close()
        if grammars is not None:
            grammars.close()
    if service.engine_error is not None:
        return 2
    if service.slot_is_taken:
        raise StartError(f"Slot {told.slot} is in use: a worker of another host or home runs in it.")
    predecessor.leave(told.names_file, engine.cache, runner.root)
    return 0


def load_runner(told: WorkerSettings, ranks: Ranks) -> StepRunner:
    """Loads the model and returns its runner. This imports torch, which takes seconds, so the settings are checked
    before. A single rank loads in a thread that ends. The reason is that OpenMP keeps threads for each of our threads.
    Where those are more than the cores, it no longer spins for a product's parts but sleeps at each, and a CPU's decode
    steps take half as long again."""
    with untraced():
        from workers.engine.loading import load
        from workers.engine.parallel.runner import ParallelRunner
    gc.freeze()  # so that the collection after the load does not look through the libraries

    if ranks.size == 1:
        with ThreadPoolExecutor(1, "load") as loader:
            return loader.submit(load, told).result()
    return ParallelRunner(load(told, 0, ranks.size, ranks.meeting), ranks)


def build_grammars(told: WorkerSettings, runner: StepRunner) -> Grammars | None:
    """Returns the compiler of grammars. Returns None if the library is not installed, and then requests with a grammar
    are refused."""
    from workers.engine.checkpoint import checkpoint
    from workers.engine.grammars import vocabulary

    if not library.is_installed():
        logger.warning("no grammars: llguidance is missing", extra={"event": "no_grammars"})
        return None
    if "generate" not in runner.abilities.tasks:
        return None
    directory = checkpoint.find(told.model).directory
    return Grammars(lambda: vocabulary.read(directory, runner.vocab_size))


def build_engine(
    told: WorkerSettings, runner: StepRunner, journal: EngineJournal, grammars: Grammars | None = None
) -> Engine:
    layout = techniques.layout(told, runner)
    longest = capacity.longest_sequence(runner.num_blocks, runner.block_size)
    if layout is not None:  # the kept blocks are copied while the prompt's blocks are still there
        longest -= layout.budget.num_blocks * runner.block_size
    limits = Limits(
        told.engine_max_batch_tokens,
        told.engine_max_running,
        min(runner.max_model_len, longest),
        told.engine_lease_wait_ms / 1000,
        ttft_s=told.engine_ttft_target_ms / 1000,
        token_gap_s=told.engine_token_gap_target_ms / 1000,
    )
    pin_limit = capacity.pin_limit(runner.num_blocks)
    store = host_blocks(told, runner)
    host = HostTier(store.num_slots, runner.block_size) if store is not None else None
    cache = PrefixCache(runner.num_blocks, runner.block_size, pin_limit=pin_limit, host=host)
    lag = told.engine_lag == "auto"
    engine = Engine(
        runner,
        cache,
        limits,
        journal,
        grammars=grammars,
        lag=lag,
        speculation=techniques.speculation(told, runner, cache),
        host=store,
        preempt=told.engine_preempt,
        layout=layout,
        policy=techniques.POLICIES[told.engine_policy],
    )
    if told.engine_shared_cache and store is not None:
        where = opening.open_store(
            told.engine_shared_cache, Bounds(told.engine_shared_cache_bytes, told.engine_shared_cache_ttl_s)
        )
        secret, prefill = opening.read_secret(told.shared_cache_secret), engine.scheduler.forecast
        engine.share(opening.open_tier(where, secret, runner, cache, store, prefill))
    return engine


def host_blocks(told: WorkerSettings, runner: StepRunner) -> HostBlocks | None:
    """Returns the host memory for cached blocks, or None if none is configured. Raises `StartError` if the memory is
    not there."""
    from workers.engine.device.runner import ModelRunner

    if not told.engine_host_cache or not isinstance(runner, ModelRunner):
        return None
    return runner.host_blocks(told.engine_host_cache)


class Warmable(Protocol):
    def warm(self) -> None: ...


class Watched(Protocol):
    @property
    def ready(self) -> bool: ...

    @property
    def idle(self) -> bool: ...


async def warm_when_idle(
    worker: Watched, grammars: Warmable, num_polls: int = WARM_POLLS, poll_s: float = WARM_POLL_S
) -> None:
    """Starts the compiler of grammars while there are no requests, because that takes a second or more of a core."""
    num_idle = 0
    while num_idle < num_polls:
        await asyncio.sleep(poll_s)
        num_idle = num_idle + 1 if worker.ready and worker.idle else 0
    grammars.warm()


async def serve(service: Service, ops: OpsServer, told: WorkerSettings, grammars: Grammars | None = None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.drain)
    if told.ops_fd is not None:
        server = await ops.inherit(told.ops_fd)
    else:
        server = await ops.listen(told.ops_bind, told.slot)
    warming = asyncio.create_task(warm_when_idle(service, grammars)) if grammars else None
    heartbeat = Heartbeat(told.heartbeat_fd, service.look_at_engine)
    heartbeat.begin()
    try:
        await service.run()
    finally:
        if warming is not None:
            warming.cancel()
        server.close()
        heartbeat.end()


if __name__ == "__main__":
    sys.exit(main())
