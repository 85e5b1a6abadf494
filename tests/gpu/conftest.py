"""What only a GPU shows. `make test-gpu` runs this folder in a process of its own, because Triton interprets kernels
in all other tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import stand_in

stand_in.install()

HERE = Path(__file__).parent


class FailuresAtOnce:
    """Prints each failure when it happens: a rented GPU may be given back before the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f"\n{report.nodeid}\n{report.longreprtext[-1500:]}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("HEADGATE_TEST_GPU") == "1" and torch.cuda.is_available():
        return
    reason, here = "needs a CUDA device, and `make test-gpu`", f"{HERE}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.skip(reason=reason))
