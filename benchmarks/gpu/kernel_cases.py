"""Every kernel at every shape: first right, then timed, beside its peers."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch

import benchmarks.kernels
from benchmarks.gpu.timing import Ceilings, timed
from benchmarks.kernels.case import Case, Prepared

MODULES = tuple(found.name for found in pkgutil.iter_modules(benchmarks.kernels.__path__) if found.name != "case")


def all_cases(tiny: bool, only: str) -> Iterator[Case]:
    for name in MODULES:
        for case in importlib.import_module(f"benchmarks.kernels.{name}").cases(tiny):
            if only in f"{case.kernel} {case.shape}":
                yield case


def measure(case: Case, device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    """One row of the table. What fails is a row too: with `failed`, and no figures."""
    row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "bar": case.bar}
    try:
        prepared = case.prepare(device)
        row |= _checked(prepared)
        if "failed" not in row:
            row |= _figures(case, prepared, device, ceilings)
    except Exception as error:  # noqa: BLE001  # one kernel that breaks must not cost the others their figures
        row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return row


def _checked(prepared: Prepared) -> dict[str, Any]:
    error = prepared.error()
    if error <= prepared.tolerance:
        return {"error": error, "tolerance": prepared.tolerance}
    return {"failed": f"wrong: error {error:.3g} above {prepared.tolerance:.3g}"}


def _figures(case: Case, prepared: Prepared, device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    took = timed(prepared.run, device, case.in_graph)
    row: dict[str, Any] = {"us": took.seconds * 1e6, "spread": took.spread}
    if prepared.num_bytes:
        rate = prepared.num_bytes / took.seconds
        row["share_of_copy"] = rate / ceilings.copy_bytes_per_s
    if prepared.flops:
        row["share_of_matmul"] = prepared.flops / took.seconds / ceilings.matmul_flops_per_s
    row["peers"] = {}
    for name, call in prepared.peers.items():
        try:
            row["peers"][name] = timed(call, device, case.in_graph).seconds / took.seconds
        except Exception as error:  # noqa: BLE001  # a peer that does not run here is listed as such
            row["peers"][name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return row
