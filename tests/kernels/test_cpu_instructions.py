"""What counts as there is what the CPU has, less what is hidden."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import compiled, instructions

EVERY: tuple[instructions.Instruction, ...] = ("avx512", "bf16", "amx", "amx_fp16")


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    instructions.has.cache_clear()
    yield
    monkeypatch.undo()
    instructions.has.cache_clear()


@pytest.mark.parametrize(
    ("kind", "most"), [("avx2", ()), ("avx512", ("avx512",)), ("avx512_bf16", ("avx512", "bf16")), ("amx", EVERY)]
)
def test_nothing_beyond_the_kind_that_is_asked_for_is_used(
    monkeypatch: pytest.MonkeyPatch, kind: str, most: tuple[str, ...]
) -> None:
    monkeypatch.delenv(instructions.VARIABLE, raising=False)
    there = {each for each in EVERY if instructions.has(each)}
    instructions.has.cache_clear()
    monkeypatch.setenv(instructions.VARIABLE, kind)
    assert {each for each in EVERY if instructions.has(each)} == there & {*most}


def test_an_unknown_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(instructions.VARIABLE, "sse9")
    with pytest.raises(ValueError, match="HEADGATE_ENGINE_CPU: sse9 is not one of auto, avx2"):
        instructions.has("amx")


def test_what_is_compiled_for_one_kind_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = set()
    for kind in ("auto", "avx512", "avx512_bf16", "amx"):
        monkeypatch.setenv(instructions.VARIABLE, kind)
        folders.add(compiled.cache_folder())
    assert len(folders) == 4


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="nothing to hide")
def test_torch_and_onednn_are_told_the_same() -> None:
    code = (
        "from kernels.cpu import instructions; instructions.limit_libraries()\n"
        "import torch; print(torch.backends.cpu.get_cpu_capability())\n"
        "print(torch.ops.mkldnn._is_mkldnn_bf16_supported())"
    )
    ours = {"HEADGATE_ENGINE_CPU": "avx2"}
    taken = {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"}
    environment = {name: value for name, value in os.environ.items() if name not in taken} | ours
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "AVX512" not in told.stdout
    assert told.stdout.split()[1] == "False"


def test_llvm_that_cannot_tell_what_a_cpu_has_means_no_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some kinds of Arm."""
    binding = pytest.importorskip("llvmlite.binding")

    def cannot() -> None:
        raise RuntimeError("failed to get host cpu features.")

    monkeypatch.setattr(binding, "get_host_cpu_features", cannot)
    assert compiled.refusal() == "this CPU has no registers of 512 bits"
