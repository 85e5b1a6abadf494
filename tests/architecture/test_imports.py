"""What the import graph alone cannot show (the rest is import-linter's, `make check`)."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = ("gateway", "accounting", "workers.protocol", "workers.jobs", "cache")
PACKAGES = ("gateway", "accounting", "workers", "cache", "kernels")


def modules(package: str) -> list[str]:
    folder = ROOT / package.replace(".", "/")
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
    )


def run(code: str) -> str:
    """In a fresh interpreter, outside of the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_module_of_a_torch_free_package_loads_torch_or_transformers(package):
    names = [name for name in modules(package) if not name.endswith("__main__")]
    code = f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
    loaded = run(
        code + "print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_each_module_imports_alone():
    """No module needs another one to have been imported first. Forked from one warm parent: torch loads once."""
    names = [
        n
        for p in PACKAGES
        for n in modules(p)
        if not n.endswith("__main__") and ".versions." not in n
    ]
    names = [n for n in names if n != "accounting.migrations.env"]
    code = f"""
import importlib, os, sys
import torch, transformers, aiohttp, sqlalchemy, celery, msgspec, redis, opentelemetry.sdk
bad = []
for name in {names!r}:
    pid = os.fork()
    if pid == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(name, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        bad.append(name)
print('bad:', bad)
"""
    assert "bad: []" in run(code)


def test_cache_uses_the_standard_library_only():
    for path in (ROOT / "cache").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top == "cache" or top in sys.stdlib_module_names, (
                    f"{path.name} imports {name}"
                )


def test_the_name_kernels_is_ours_and_transformers_is_not_misled():
    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    assert Path(spec.origin).resolve() == ROOT / "kernels/__init__.py"
    assert (ROOT / "kernels/__init__.py").read_bytes() == b""
    version = importlib.metadata.version("headgate")
    assert version.split(".")[:2] not in (["0", "18"], ["0", "19"])
    said = run("from transformers.utils import is_kernels_available; print(is_kernels_available())")
    assert said.strip() == "False"


def test_packages_that_must_be_importable_alone_have_an_empty_init():
    for name in ("workers", "workers/protocol", "workers/engine", "cache", "kernels"):
        assert (ROOT / name / "__init__.py").read_bytes() == b"", name


def test_every_package_is_listed_for_the_wheel():
    import tomllib

    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert found <= listed


def test_redis_keys_are_named_in_two_files_only():
    allowed = {ROOT / "gateway/redis_keys.py", ROOT / "workers/protocol/registry.py"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path not in allowed:
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        assert not node.value.startswith("hg:"), (
                            f"{path.relative_to(ROOT)} names a Redis key"
                        )
