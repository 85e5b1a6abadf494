"""The techniques that settings name: a scheduling policy, a KV layout, a source of proposals. Nothing else in the engine
knows one of them by its name. Each is built once, and is then used by its interface (`scheduling/policy.py`,
`scheduling/kv_layout.py`, `speculate/proposer.py`)."""

from __future__ import annotations

import logging
from typing import Any, Literal

from cache.prefix_cache import PrefixCache
from workers.engine.fcfs.policy import FIRST_COME
from workers.engine.scheduling.policy import FAIR, Policy
from workers.engine.scheduling.speculation import Speculation
from workers.engine.settings import WorkerSettings
from workers.engine.sizing import capacity
from workers.engine.sparsity.budget import MIN_BLOCKS, Sparsity
from workers.engine.sparsity.layout import SparseLayout
from workers.engine.speculate.draft import DraftProposer
from workers.engine.speculate.heads import HeadsProposer
from workers.engine.speculate.lookahead import LookaheadProposer
from workers.engine.speculate.lookup import NgramProposer
from workers.engine.speculate.proposer import Proposer
from workers.engine.speculate.suffix import SuffixProposer
from workers.engine.speculate.tree import TreeProposer
from workers.engine.values.errors import StartError
from workers.engine.values.plan import StepRunner

logger = logging.getLogger("workers.engine")

POLICIES: dict[Literal["fair", "fcfs"], Policy] = {"fair": FAIR, "fcfs": FIRST_COME}


def layout(told: WorkerSettings, runner: StepRunner) -> SparseLayout | None:
    """Returns the layout that keeps a KV budget, or None if there is no budget. Raises `StartError` for a budget that holds too few
    blocks, or too many for the worker's memory."""
    if told.engine_kv_sparsity == "off" or told.engine_kv_budget is None:
        return None
    num_blocks = told.engine_kv_budget // runner.block_size
    if num_blocks < MIN_BLOCKS:
        raise StartError(
            f"HEADGATE_ENGINE_KV_BUDGET: {told.engine_kv_budget} tokens are fewer than"
            f" {MIN_BLOCKS} blocks of {runner.block_size}."
        )
    most = capacity.longest_sequence(runner.num_blocks, runner.block_size) // runner.block_size
    if 2 * num_blocks > most:
        raise StartError(
            f"HEADGATE_ENGINE_KV_BUDGET: {told.engine_kv_budget} tokens are more than half of the"
            f" {most * runner.block_size} that this worker has memory for."
        )
    logger.warning(
        "lossy: sequences see %d tokens at most", num_blocks * runner.block_size, extra={"event": "kv_sparsity"}
    )
    return SparseLayout(Sparsity(told.engine_kv_sparsity, num_blocks, runner.block_size))


def speculation(told: WorkerSettings, runner: StepRunner, cache: PrefixCache) -> Speculation | None:
    """Returns the configured speculation, or None if it is off. Raises `StartError` for a draft model or heads that do
    not fit the model."""
    proposer: Proposer[Any]
    match told.engine_speculate:
        case "off":
            return None
        case "ngram":
            proposer = NgramProposer()
        case "suffix":
            proposer = SuffixProposer(cache.block_size)
        case "tree":
            proposer = TreeProposer(cache.block_size)
        case "draft":
            from workers.engine.loading import load_draft

            proposer = DraftProposer(load_draft(told, runner))
        case "lookahead":
            proposer = LookaheadProposer()
        case "heads":
            from workers.engine.loading import load_heads

            proposer = HeadsProposer(load_heads(told, runner))
    return Speculation(
        proposer,
        cache,
        max_proposals=told.engine_speculate_proposals,
        max_step_tokens=told.engine_speculate_step_tokens,
        takes_trees=runner.takes_trees,
        counts_guesses=runner.lag == 0,
    )
