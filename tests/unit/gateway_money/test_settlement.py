"""Every cell of the settlement table, metering.md section 8."""

from __future__ import annotations

from typing import get_args

import pytest

from accounting.values.types import Outcome, Usage
from gateway.metering.settlement import decide

NOTHING = Usage()
PROMPT = Usage(cache_read=64, cache_write=32, uncached=5)
FULL = Usage(cache_read=64, cache_write=32, uncached=5, output=40)

FREE = {
    "internal": "internal",
    "worker_lost": "worker_crash",
    "drain": "drain",
    "lease_lost": "lease_lost",
    "batch_cancelled": "batch_cancelled",
    "gateway_crash": "gateway_crash",
}


@pytest.mark.parametrize("usage", [NOTHING, PROMPT, FULL])
def test_a_good_end_is_charged_what_the_engine_counted(usage: Usage) -> None:
    ending = decide("ok", usage, engine_final=True)
    assert (ending.kind, ending.outcome, ending.billed) == ("settle", "ok", usage)


@pytest.mark.parametrize("usage", [NOTHING, PROMPT, FULL])
def test_a_good_end_without_the_engines_final_is_a_lost_worker_and_free(usage: Usage) -> None:
    ending = decide("ok", usage, engine_final=False)
    assert (ending.kind, ending.outcome, ending.billed) == ("void", "worker_lost", NOTHING)
    assert ending.write_off == "worker_crash"


@pytest.mark.parametrize(
    ("usage", "engine_final", "kind", "billed", "write_off"),
    [
        (NOTHING, True, "void", NOTHING, "late_abort"),  # still queued: nothing was computed
        (PROMPT, True, "settle", PROMPT, "late_abort"),
        (FULL, True, "settle", FULL, "late_abort"),
        (NOTHING, False, "void", NOTHING, "worker_crash"),
        (PROMPT, False, "void", NOTHING, "worker_crash"),
        (FULL, False, "settle", FULL, "worker_crash"),
    ],
)
def test_a_client_that_leaves_pays_what_was_computed_for_it(
    usage: Usage, engine_final: bool, kind: str, billed: Usage, write_off: str
) -> None:
    ending = decide("client_gone", usage, engine_final=engine_final)
    assert (ending.kind, ending.outcome) == (kind, "client_gone")
    assert (ending.billed, ending.write_off) == (billed, write_off)


def test_a_client_that_left_does_not_pay_beyond_the_abort_bound() -> None:
    ending = decide("client_gone", FULL, engine_final=True, max_output=25)
    assert ending.billed == Usage(cache_read=64, cache_write=32, uncached=5, output=25)
    assert decide("client_gone", FULL, engine_final=True, max_output=40).billed == FULL


def test_a_client_that_left_before_its_worker_was_lost_does_not_pay_beyond_the_bound_either() -> None:
    ending = decide("client_gone", Usage(0, 0, 10, 200), engine_final=False, max_output=11)
    assert (ending.kind, ending.billed, ending.write_off) == ("settle", Usage(0, 0, 10, 11), "worker_crash")


@pytest.mark.parametrize("outcome", sorted(FREE))
@pytest.mark.parametrize("usage", [NOTHING, PROMPT, FULL])
@pytest.mark.parametrize("engine_final", [True, False])
def test_our_error_is_free_and_names_its_reason(outcome: Outcome, usage: Usage, engine_final: bool) -> None:
    ending = decide(outcome, usage, engine_final=engine_final)
    assert (ending.kind, ending.outcome, ending.billed) == ("void", outcome, NOTHING)
    assert ending.write_off == FREE[outcome]


def test_the_cells_above_cover_every_outcome() -> None:
    assert {"ok", "client_gone", *FREE} == set(get_args(Outcome))
