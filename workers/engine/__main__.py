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
from workers.engine import capacity, logs, predecessor, settings
from workers.engine.engine import Engine
from workers.engine.errors import StartError
from workers.engine.journal import EngineJournal
from workers.engine.metrics import Metrics
from workers.engine.ops_server import OpsServer
from workers.engine.parallel.ranks import Ranks, meeting_file
from workers.engine.plan import StepRunner
from workers.engine.sampling import backends
from workers.engine.sampling.compiling import Grammars
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
    grammars = build_grammars(told, runner)
    engine = build_engine(told, runner, journal, grammars)
    predecessor.take(told.names_file, engine.cache, runner.root)
    metrics = Metrics(
        told.served_name,
        told.slot,
        runner.block_size,
        runner.num_blocks,
        by_tenant=told.metrics_tenant_detail,
    )
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
        if grammars is not None:
            grammars.close()
    if service.engine_error is not None:
        return 2
    predecessor.leave(told.names_file, engine.cache, runner.root)
    return 0


def load_runner(told: WorkerSettings, ranks: Ranks) -> StepRunner:
    """Imports torch, which takes seconds: after the settings are known to be sound."""
    from workers.engine.loading import load
    from workers.engine.parallel.runner import ParallelRunner

    if ranks.size == 1:
        return load(told)
    return ParallelRunner(load(told, 0, ranks.size, ranks.meeting), ranks)


def build_grammars(told: WorkerSettings, runner: StepRunner) -> Grammars | None:
    """None: the library is not installed, and requests with a grammar are refused."""
    from workers.engine.model import checkpoint
    from workers.engine.sampling import vocabulary

    if not backends.installed():
        logger.warning("no grammars: xgrammar is missing", extra={"event": "no_grammars"})
        return None
    directory = checkpoint.find(told.model).directory
    return Grammars(lambda: vocabulary.read(directory, runner.vocab_size))


def build_engine(
    told: WorkerSettings,
    runner: StepRunner,
    journal: EngineJournal,
    grammars: Grammars | None = None,
) -> Engine:
    longest = capacity.longest_sequence(runner.num_blocks, runner.block_size)
    limits = Limits(
        told.engine_max_batch_tokens,
        told.engine_max_running,
        min(runner.max_model_len, longest),
        told.engine_lease_wait_ms / 1000,
        ttft_s=told.engine_ttft_target_ms / 1000,
        token_gap_s=told.engine_token_gap_target_ms / 1000,
    )
    pin_limit = capacity.pin_limit(runner.num_blocks)
    cache = PrefixCache(runner.num_blocks, runner.block_size, pin_limit=pin_limit)
    lag = told.engine_lag == "auto"
    return Engine(
        runner,
        cache,
        limits,
        journal,
        grammars=grammars,
        lag=lag,
        speculation=speculation(told, runner, cache),
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
