"""What the import graph alone cannot show (the rest is import-linter's, `make check`)."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import pytest
from load import stretched

ROOT = Path(__file__).resolve().parents[2]
TORCH_FREE = ("cache", "workers.protocol", "accounting", "workers.jobs", "gateway")
PACKAGES = ("gateway", "accounting", "workers", "cache", "kernels")


def modules(package: str) -> list[str]:
    folder = ROOT / package.replace(".", "/")
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in folder.rglob("*.py")
    )


def run(code: str) -> str:
    """In a fresh interpreter, outside of the repository."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=stretched(100))
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def loaded() -> dict[str, list[str] | bool]:
    """Returns what each torch-free package loads of torch and its kin that those before it did not, and last what
    transformers says of the name `kernels`. All is loaded one after the other by one interpreter."""
    code = "import importlib, json, sys\nloaded = {}\nkin = {'torch', 'transformers', 'triton'}\n"
    for package in TORCH_FREE:
        names = [name for name in modules(package) if not name.endswith("__main__")]
        code += f"before = kin & sys.modules.keys()\nfor n in {names!r}: importlib.import_module(n)\n"
        code += f"loaded[{package!r}] = sorted((kin & sys.modules.keys()) - before)\n"
    code += "from transformers.utils import is_kernels_available\nloaded['is misled'] = is_kernels_available()\n"
    return json.loads(run(code + "print(json.dumps(loaded))"))


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_module_of_a_torch_free_package_loads_torch_or_transformers(package):
    assert loaded()[package] == []


def test_no_module_imports_itself_through_others():
    """Without a cycle in the graph each module can be imported first, alone; with one, the order decides."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


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
                assert top == "cache" or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def test_the_name_kernels_is_ours_and_transformers_is_not_misled():
    spec = importlib.util.find_spec("kernels")
    assert spec is not None
    assert Path(spec.origin).resolve() == ROOT / "kernels/__init__.py"
    assert (ROOT / "kernels/__init__.py").read_bytes() == b""
    version = importlib.metadata.version("headgate")
    assert version.split(".")[:2] not in (["0", "18"], ["0", "19"])
    assert loaded()["is misled"] is False


def test_packages_that_must_be_importable_alone_have_an_empty_init():
    for name in ("workers", "workers/protocol", "workers/engine", "cache", "kernels"):
        assert (ROOT / name / "__init__.py").read_bytes() == b"", name


def test_every_package_is_listed_for_the_wheel():
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert found <= listed


def test_redis_keys_are_named_in_two_files_only():
    allowed = {ROOT / "gateway/limiter/redis_keys.py", ROOT / "workers/protocol/registry.py"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path not in allowed and "hg:" in (source := path.read_text()):
                for node in ast.walk(ast.parse(source)):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        assert not node.value.startswith("hg:"), f"{path.relative_to(ROOT)} names a Redis key"
