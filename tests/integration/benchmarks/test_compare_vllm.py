"""P2: the server that Headgate is compared with has all cores and what its documents recommend."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STUB = """\
import http.server, json, os, pathlib, sys
told = {"arguments": sys.argv[1:], "environment": dict(os.environ)}
pathlib.Path("told.json").write_text(json.dumps(told))
class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Models).serve_forever()
"""


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compare_vllm

    return compare_vllm


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Of an environment whose vLLM answers nothing but which models it has."""
    for folder in ("bin", "lib"):
        (tmp_path / "venv" / folder).mkdir(parents=True)
    for library in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        (tmp_path / "venv" / "lib" / library).touch()
    (tmp_path / "stub.py").write_text(STUB)
    path = tmp_path / "venv" / "bin" / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/stub.py "$@" 2>>{tmp_path}/err\n')
    path.chmod(0o755)
    return path


def test_p2_vllm_gets_all_cores_its_libraries_and_its_own_dtype(compare, python, tmp_path):
    with compare.vllm(python, tmp_path / "model", tmp_path / "vllm.log", 2) as server:
        assert server["base_url"].startswith("http://127.0.0.1:")
    told = json.loads((tmp_path / "told.json").read_text())
    environment = told["environment"]
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "libtcmalloc_minimal.so.4" in environment["LD_PRELOAD"]
    assert "libiomp5.so" in environment["LD_PRELOAD"]
    assert "--enable-prefix-caching" in told["arguments"]
    assert "--dtype" not in told["arguments"]


def test_p2_a_missing_library_is_named_with_what_brings_it(compare, tmp_path, monkeypatch):
    monkeypatch.setitem(compare.PRELOADED, "libnothing", "the wheel nothing")
    with pytest.raises(SystemExit, match="libnothing: install the wheel nothing"):
        compare.preloaded(tmp_path / "bin" / "python", "libnothing")


def test_p2_ratios_are_of_all_rounds_that_both_servers_ran(compare):
    def one(tokens: float) -> dict[str, object]:
        return {"load": {"rate": 0.0}, "output_tokens_per_s": tokens, "ttft_ms": {"p50": 100.0 / tokens}}

    rounds = {
        "1": {"headgate": {"one": one(10.0), "shared": one(5.0)}, "vllm": {"one": one(20.0)}},
        "2": {"headgate": {"one": one(30.0)}, "vllm": {"one": one(20.0)}},
        "3": {"headgate": {"one": one(99.0)}},
    }
    assert compare.ratios(rounds) == {
        "one": {
            "num_rounds": 2,
            "headgate output_tokens_per_s": {"median": 20.0, "lowest": 10.0, "highest": 30.0},
            "vllm output_tokens_per_s": {"median": 20.0, "lowest": 20.0, "highest": 20.0},
            "ratio of output_tokens_per_s": {"median": 1.0, "lowest": 0.5, "highest": 1.5},
            "headgate ttft_ms": {"median": 6.67, "lowest": 3.33, "highest": 10.0},
            "vllm ttft_ms": {"median": 5.0, "lowest": 5.0, "highest": 5.0},
            "ratio of ttft_ms": {"median": 1.0, "lowest": 0.5, "highest": 1.5},
        }
    }
