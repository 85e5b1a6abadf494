"""Kernels against their twins at start: wrong ones give their place to the twin, and the metric says so."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from prometheus_client import generate_latest

from kernels import dispatch
from kernels.dispatch import TWINS
from workers.engine.device.self_check import CASES, Attention, Shapes, checked
from workers.engine.kv.kv_store import KVShape
from workers.engine.metrics import Metrics
from workers.engine.values.plan import KernelState

CPU = torch.device("cpu")
SHAPES = Shapes(
    KVShape(2, 2, 16, 16, torch.float32),
    torch.float32,
    num_heads=4,
    hidden=64,
    vocab_size=90,
    attention=(Attention(0.25, 0, 0.0, False), Attention(0.25, 24, 5.0, True)),
)

QUANTIZED = dataclasses.replace(SHAPES, kv=KVShape(2, 2, 16, 16, torch.int8))


def ops_with(name: str, kernel: dispatch.Kernel) -> dispatch.Ops:
    return dispatch.Ops(CPU, dict(TWINS) | {name: kernel})


def state_of(name: str, states: list[KernelState]) -> KernelState:
    (state,) = [state for state in states if state.op == name]
    return state


@pytest.mark.parametrize("shapes", [SHAPES, QUANTIZED], ids=["kv float32", "kv int8"])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_equals_its_twin_stays(name: str, shapes: Shapes) -> None:
    def same(*args: object) -> object:
        return TWINS[name](*args)

    ops, states = checked(ops_with(name, same), shapes)
    assert ops.chosen[name] is same
    assert state_of(name, states) == KernelState(name, "triton", "equal")
    assert {state.state for state in states if state.op != name} == {"twin"}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_that_is_wrong_gives_its_place_to_its_twin(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong by not doing what it does, whatever that is."""

    def idle(*args: object) -> object:
        return torch.zeros(len(args[0]), dtype=torch.int64) if name == "sample" else None

    with caplog.at_level(logging.WARNING):
        ops, states = checked(ops_with(name, idle), SHAPES)
    assert ops.chosen[name] is TWINS[name]
    assert state_of(name, states) == KernelState(name, "torch", "differs")
    assert f"kernel {name}: its twin takes its place" in caplog.text


@pytest.mark.parametrize("scale", [1 + 1e-2, 1 + 1e-6])
def test_rounding_is_no_difference_and_one_percent_is(scale: float) -> None:
    def off(out: torch.Tensor, *args: object) -> None:
        TWINS["rms_norm"](out, *args)
        out *= scale

    _, states = checked(ops_with("rms_norm", off), SHAPES)
    assert state_of("rms_norm", states).state == ("differs" if scale > 1.001 else "equal")


def test_a_kernel_that_raises_is_told_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no kernel image is available for this device")

    ops, _ = checked(ops_with("attention_decode", broken), SHAPES)
    assert ops.chosen["attention_decode"] is TWINS["attention_decode"]
    assert "it raised RuntimeError: no kernel image is available" in caplog.text


def test_numbers_that_are_none_are_a_difference() -> None:
    def nan(out: torch.Tensor, *_: object) -> None:
        out.fill_(float("nan"))

    _, states = checked(ops_with("silu_mul", nan), SHAPES)
    assert state_of("silu_mul", states).state == "differs"


def test_every_compiled_kernel_that_a_worker_runs_has_a_case() -> None:
    not_run = {"attention_shared", "group_rows", "lora"}
    assert set(dispatch.COMPILED) - set(CASES) == not_run


def test_the_metric_says_what_runs_for_each_op() -> None:
    metrics = Metrics("model", 0, 16, 10)
    metrics.tell_kernels([KernelState("rms_norm", "torch", "differs")])
    line = 'headgate_kernel_info{implementation="torch",op="rms_norm",state="differs"} 1.0'
    assert line in generate_latest(metrics.registry).decode()
