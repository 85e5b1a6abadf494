"""`python -m workers.engine`: one worker process. Reads the environment, takes the slot, loads the model, serves.

Exit status 0 after a drain, 78 with one sentence if it cannot start, 2 if the engine broke while serving.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import uuid

from cache.prefix_cache import PrefixCache
from workers.engine import logs, settings
from workers.engine.engine import Engine
from workers.engine.errors import StartError
from workers.engine.journal import EngineJournal
from workers.engine.metrics import Metrics
from workers.engine.ops_server import OpsServer
from workers.engine.parallel.ranks import Ranks, meeting_file
from workers.engine.plan import StepRunner
from workers.engine.service import Identity, Service, hello_of
from workers.engine.settings import WorkerSettings
from workers.engine.speculate.draft import DraftProposer
from workers.engine.speculate.ngram import NgramProposer
from workers.engine.speculate.proposer import Proposer
from workers.engine.speculate.speculation import Speculation
from workers.engine.speculate.suffix import SuffixProposer
from workers.engine.step_plan import Limits

logger = logging.getLogger("workers.engine")

EXIT_CONFIG = 78
"""sysexits.h: the supervisor does not restart what ends with it."""
PIN_SHARE = 5
"""A fifth of the pool may be pinned; what one sequence can need is the rest of it."""


def main() -> int:
    try:
        told = settings.load()
        logs.configure(told.log_level, told.worker)
        meeting = meeting_file(told.run_dir, told.worker)
        with Ranks(told.engine_tensor_parallel, meeting) as ranks:
            return run(told, ranks)
    except StartError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG


def run(told: WorkerSettings, ranks: Ranks) -> int:
    """The exit status. Raises `StartError`."""
    runner = load_runner(told, ranks)
    process = str(uuid.uuid4())
    journal = EngineJournal(told.journal_dir, told.worker, process, runner.root)
    engine = build_engine(told, runner, journal)
    metrics = Metrics(told.served_name, told.slot, runner.block_size, runner.num_blocks)
    metrics.tell_kernels(runner.kernels)
    identity = Identity(told.worker, told.served_name, told.address, told.redis_url)
    hello = hello_of(engine, told.served_name, process)
    service = Service(identity, engine, hello, metrics, journal.unacked, told.drain_s)
    try:
        asyncio.run(serve(service, OpsServer(service, metrics.registry), told))
    except OSError as error:
        raise StartError(f"The worker cannot listen: {error}.") from error
    finally:
        journal.close()
    return 2 if service.engine_error is not None else 0


def load_runner(told: WorkerSettings, ranks: Ranks) -> StepRunner:
    """Imports torch, which takes seconds: after the settings are known to be sound."""
    from workers.engine.loading import load
    from workers.engine.parallel.runner import ParallelRunner

    if ranks.size == 1:
        return load(told)
    return ParallelRunner(load(told, 0, ranks.size, ranks.meeting), ranks)


def build_engine(told: WorkerSettings, runner: StepRunner, journal: EngineJournal) -> Engine:
    pin_limit = runner.num_blocks // PIN_SHARE
    capacity = (runner.num_blocks - 1 - pin_limit) * runner.block_size
    limits = Limits(
        told.engine_max_batch_tokens,
        told.engine_max_running,
        min(runner.max_model_len, capacity),
        told.engine_lease_wait_ms / 1000,
    )
    cache = PrefixCache(runner.num_blocks, runner.block_size, pin_limit=pin_limit)
    lag = told.engine_lag == "auto"
    return Engine(
        runner, cache, limits, journal, lag=lag, speculation=speculation(told, runner, cache)
    )


def speculation(told: WorkerSettings, runner: StepRunner, cache: PrefixCache) -> Speculation | None:
    """Raises `StartError` for a draft model that does not fit the model."""
    proposer: Proposer
    match told.engine_speculate:
        case "off":
            return None
        case "ngram":
            proposer = NgramProposer()
        case "suffix":
            proposer = SuffixProposer(cache.block_size)
        case "draft":
            from workers.engine.loading import load_draft

            proposer = DraftProposer(load_draft(told, runner))
    return Speculation(
        proposer,
        cache,
        max_proposals=told.engine_speculate_proposals,
        max_step_tokens=told.engine_speculate_step_tokens,
    )


async def serve(service: Service, ops: OpsServer, told: WorkerSettings) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.drain)
    server = await ops.listen(told.ops_bind, told.slot)
    try:
        await service.run()
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
