"""Whether there are compiled kernels, where they are kept, and in which threads they run."""

from __future__ import annotations

import builtins
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import compiled


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    compiled.functions.cache_clear()
    yield
    compiled.functions.cache_clear()


def needs_functions() -> None:
    if reason := compiled.refusal():
        pytest.skip(reason)


def test_without_numba_there_are_none_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    imported = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "kernels.cpu" and "emit" in (rest[2] or ()):
            raise ImportError("No module named 'numba'")
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.INFO, compiled.__name__):
        assert compiled.functions() is None
        assert compiled.functions() is None
    assert [r.getMessage() for r in caplog.records] == [
        "decode steps take torch's operations: numba is not installed (No module named 'numba')"
    ]


def test_without_a_folder_to_keep_them_in_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    needs_functions()
    compiled.functions.cache_clear()
    (tmp_path / "headgate").write_text("a file in the folder's place")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled.functions() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no folder for compiled kernels" in record.getMessage()


@pytest.mark.rest
def test_one_process_compiles_and_those_beside_and_after_it_load(tmp_path: Path) -> None:
    needs_functions()
    code = (
        "import logging, time; logging.basicConfig(level=logging.INFO)\n"
        "from kernels.cpu import compiled\n"
        "started = time.process_time(); assert compiled.functions() is not None\n"
        "print(time.process_time() - started)"
    )
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path))

    def begin() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes)

    together = [one.communicate() for one in [begin(), begin()]]
    assert sorted("compiled the kernels of this CPU in" in log for _, log in together) == [False, True]
    seconds, log = begin().communicate()
    assert "compil" not in log
    waited, worked = sorted(float(found) for found, _ in together)
    assert max(waited, float(seconds)) < worked / 2, "CPU seconds"


def test_a_process_that_stands_still_with_the_lock_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "MAX_WAIT_S", 0.3)
    with caplog.at_level(logging.INFO, compiled.__name__), compiled._alone(tmp_path / "kernels"):
        assert not caplog.records
        begun = time.monotonic()
        with compiled._alone(tmp_path / "kernels"):
            assert 0.3 <= time.monotonic() - begun < 10
    assert len(caplog.records) == 1


def test_the_folder_is_another_one_for_other_sources_and_for_another_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(compiled.__file__)
    folders = [compiled.cache_folder()]
    assert folders[0].parent == tmp_path / "headgate"
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        monkeypatch.setattr(compiled, "__file__", shutil.copy(source, tmp_path / place))
        for name in ("lanes.py", "team.py"):
            shutil.copy(source.with_name(name), tmp_path / place)
        folders.append(compiled.cache_folder())
        assert compiled.cache_folder() == folders[-1]
    (tmp_path / "other" / "lanes.py").write_bytes(b"#")
    folders.append(compiled.cache_folder())
    assert len(set(folders)) == 4


def test_a_job_runs_in_as_many_threads_as_torch_has_and_none_is_left_behind() -> None:
    needs_functions()
    from kernels.cpu import panels, team

    torch.set_num_threads(2)
    try:
        weight, x = panels.pack(torch.randn(640, 64)), torch.randn(40, 64)
        expected = panels.product(x, weight)
        (before,) = {len(os.listdir("/proc/self/task")) for _ in range(20) if panels.product(x, weight) is not None}
        assert team.size() in (1, 2)
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            assert torch.equal(panels.product(x, weight), expected)
        assert len(os.listdir("/proc/self/task")) == before
    finally:
        torch.set_num_threads(1)
