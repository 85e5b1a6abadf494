"""A real Prometheus beside a running Headgate. Debian's package has it; `make prometheus` unpacks it into .venv."""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
import yaml
from load import stretched

ROOT = Path(__file__).parents[1]
RULES = ROOT / "ops" / "prometheus" / "rules"
UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips the test where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{name} is not installed: `make prometheus` unpacks it")
    return found


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=20)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    def values(self, expression: str, since: float, until: float) -> list[float]:
        """All numbers of a range query but those that are not numbers: a quotient without traffic."""
        found = self.get("query_range", query=expression, start=since, end=until, step=1)["result"]
        values = [float(value) for series in found for _, value in series["values"]]
        return [value for value in values if not math.isnan(value)]

    def unhealthy_targets(self) -> list[str]:
        targets = self.get("targets")["activeTargets"]
        return [f"{t['scrapeUrl']}: {t['health']} {t['lastError']}" for t in targets if t["health"] != "up"]


@contextlib.contextmanager
def running_prometheus(directory: Path, pages: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """Scrapes the pages of a ready file each second, with the jobs' names and the rules of ops/prometheus."""
    config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES / "*.yml")]
    for job in config["scrape_configs"]:
        urls = pages[job["job_name"].removeprefix("headgate-")]
        job["static_configs"] = [{"targets": [urlsplit(url).netloc for url in urls]}]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    command = [
        program("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}/-/ready", process, directory / "prometheus.log")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(20)


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + stretched(60)
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail(f"Prometheus did not get ready:\n{log.read_text()[-2000:]}")
