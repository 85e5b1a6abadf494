"""The Dockerfile's own steps, run by buildah; the images, run by bubblewrap: another user, a root that is read-only.

No container engine and no registry is needed: the base is made of Debian's packages (mmdebstrap) under the name that the
Dockerfile asks for. What is built stays in a store (`HEADGATE_TEST_IMAGES`), so that a second run is short. The worker is
built on Debian 12, whose Python is that of most environments; the gateway on the Dockerfile's own default.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaged import ROOT, ran

STORE = Path(os.environ.get("HEADGATE_TEST_IMAGES", Path(sys.prefix) / "images"))
USER = 10001
CERTIFICATES = "/etc/certificates-of-the-builder.crt"
NEEDED = ("buildah", "bwrap", "mmdebstrap")
pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in NEEDED) or os.geteuid() != 0,
    reason=f"needs root and Debian's {', '.join(NEEDED)}",
)


def buildah(*arguments: str | Path) -> str:
    place = ("--root", STORE / "store", "--runroot", STORE / "run", "--storage-driver", "overlay")
    return ran("buildah", *place, *arguments, cwd=ROOT).strip()


def base(debian: str) -> None:
    """Makes `debian:<name>-slim` of Debian's packages, unless the store has it."""
    name = f"docker.io/library/debian:{debian}-slim"
    if name in buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
        return
    tar = STORE / f"{debian}.tar"
    ran("mmdebstrap", "--variant=minbase", debian, tar, "http://deb.debian.org/debian")
    container = buildah("from", "scratch")
    buildah("add", "-q", container, tar, "/")
    buildah("commit", "-q", "--rm", container, name)
    tar.unlink()


@dataclass
class Image:
    name: str
    root: Path
    config: dict

    def program(self, arguments: Sequence[str], home: Path, env: dict[str, str]) -> list[str]:
        """Returns the command that runs the image as an engine would: its user, its environment, a read-only root."""
        config = self.config["config"]
        places = ["--ro-bind", str(self.root), "/", "--bind", str(home), "/var/lib/headgate", "--tmpfs", "/tmp"]
        system = [
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--unshare-user",
            "--unshare-pid",
            "--unshare-ipc",
            "--cap-drop",
            "ALL",
        ]
        who = ["--uid", str(USER), "--gid", str(USER), "--clearenv", "--die-with-parent", "--chdir", "/"]
        told = {**dict(one.split("=", 1) for one in config["Env"]), **env}
        variables = [part for name, value in told.items() for part in ("--setenv", name, value)]
        return ["bwrap", *places, *system, *who, *variables, *arguments]

    def run(self, *arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
        command = self.program(arguments, home, env)
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def images() -> Iterator:
    STORE.mkdir(parents=True, exist_ok=True)
    pip = STORE / "pip.conf"
    listed = ran(sys.executable, "-m", "pip", "config", "list")
    rows = dict(
        re.findall(r"^\S*?\.?(find-links|cert|index-url|extra-index-url)='(.*)'$", listed.replace(":env:.", ""), re.M)
    )
    mounted = [f"{pip}:/etc/pip.conf:ro"]
    if host := rows.get("cert"):
        # Beside the image's own certificates, which the package that installs them writes.
        rows["cert"] = CERTIFICATES
        mounted.append(f"{Path(host).resolve()}:{CERTIFICATES}:ro")
    pip.write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items() if "file:" not in value)
    )
    mounted += [f"{links}:{links}:ro" for links in rows.get("find-links", "").split() if Path(links).is_dir()]
    containers = []

    def build(target: str, debian: str) -> Image:
        base(debian)
        name = f"headgate/{target}:{debian}"
        options = ["--isolation", "chroot", "--layers", "--pull-never", "--network", "host", "--format", "docker"]
        arguments = ["--build-arg", f"DEBIAN={debian}", "--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
        volumes = [part for one in mounted for part in ("--volume", one)]
        buildah("bud", "-q", *options, *arguments, *volumes, "--target", target, "-t", name, ".")
        containers.append(buildah("from", "--pull-never", name))
        root = Path(buildah("mount", containers[-1]))
        return Image(name, root, json.loads(buildah("inspect", name))["Docker"])

    yield build
    for container in containers:
        with contextlib.suppress(AssertionError):
            buildah("rm", container)


@pytest.fixture(scope="module")
def gateway(images) -> Image:
    return images("gateway", "trixie")


@pytest.fixture(scope="module")
def worker(images) -> Image:
    return images("worker", "bookworm")


def test_hadolint_finds_nothing(tool):
    ran(tool("hadolint"), ROOT / "Dockerfile")


def test_the_gateway_image_is_small_and_has_neither_torch_nor_tools(gateway, tmp_path):
    config = gateway.config["config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python3"]
    assert (config["Entrypoint"], config["Cmd"]) == (["headgate"], ["gateway"])
    missing = gateway.run(
        "/bin/sh",
        "-c",
        "for p in pip pip3 gcc cc make git curl; do command -v $p && exit 1; done; exit 0",
        home=tmp_path,
    )
    assert missing.returncode == 0, missing.stdout
    assert gateway.run("python3", "-c", "import torch", home=tmp_path).returncode != 0
    bits = gateway.run("find", "/", "-xdev", "-perm", "/6000", "-type", "f", home=tmp_path).stdout
    assert bits == "", "a program in the image changes who runs it"
    size = sum(path.lstat().st_size for path in gateway.root.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < 600 << 20, f"{size >> 20} MiB"


def test_it_runs_as_another_user_on_a_read_only_root(gateway, tmp_path):
    told = gateway.run("/bin/sh", "-c", "id -u; touch /opt/headgate/x || touch /usr/x || touch /x", home=tmp_path)
    assert told.stdout.strip() == str(USER)
    assert told.stderr.count("Read-only file system") == 3
    done = gateway.run("headgate", "migrate", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "headgate.db").exists()
    assert gateway.run("headgate", "verify-books", home=tmp_path).returncode == 0


def test_it_has_postgresqls_own_programs_for_backups(gateway, tmp_path):
    server = re.search(r"image: postgres:(\d+)", (ROOT / "ops" / "compose" / "compose.yaml").read_text())
    for program in ("pg_dump", "pg_restore"):
        told = gateway.run(program, "--version", home=tmp_path).stdout
        assert int(re.search(r"\(PostgreSQL\) (\d+)", told)[1]) >= int(server[1]), told


def test_its_health_check_says_what_the_process_is(gateway, tmp_path):
    check = gateway.config["config"]["Healthcheck"]["Test"][1:]
    assert gateway.run(*check[:-1], "1", home=tmp_path).returncode == 1
    gateway.run("headgate", "migrate", home=tmp_path)
    models = json.dumps({"headgate-demo": {"path": "/opt/headgate/headgate-demo"}})
    env = {"HEADGATE_BIND": "127.0.0.1:0", "HEADGATE_OPS_BIND": "127.0.0.1:19300", "HEADGATE_MODELS": models}
    with started(gateway, ["headgate", "gateway"], tmp_path, env, tmp_path / "log"):
        deadline = time.monotonic() + 60
        while gateway.run(*check[:-1], "19300", home=tmp_path).returncode != 0:
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.5)
        drain = gateway.run("python3", "/usr/local/lib/headgate/drain.py", "gateway", home=tmp_path)
        assert drain.returncode == 0, drain.stderr
        assert "gateway_draining" in (tmp_path / "log").read_text()


def test_the_worker_image_is_a_whole_headgate(worker, tmp_path):
    """`docker run headgate/worker up`: gateway, worker, jobs and Valkey in one container, state in one volume."""
    env = {"HEADGATE_OPS_BIND": ""}
    with started(worker, ["headgate", "up", "--port", "0"], tmp_path, env, tmp_path / "log") as process:
        ready = tmp_path / "run" / "ready.json"
        deadline = time.monotonic() + 240
        while not ready.exists():
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.5)
        told = json.loads(ready.read_text())
        body = {"model": told["model"], "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        request = urllib.request.Request(
            told["base_url"] + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"authorization": f"Bearer {told['api_key']}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
    assert worker.run("headgate", "verify-books", home=tmp_path).returncode == 0


def test_a_gpu_needs_no_compiler_in_its_image(tmp_path):
    """Triton's driver module is compiled while the image is built, and is found where a process looks for it."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not on PATH")
    env = {**os.environ, "TRITON_LIBCUDA_PATH": "/usr/lib/x86_64-linux-gnu"}
    ran(sys.executable, ROOT / "ops" / "docker" / "triton_driver.py", tmp_path / "cache", env=env)
    # What Triton does where there is a GPU, up to the point where the module is loaded.
    look = (
        "from triton.backends.nvidia import driver\nfrom triton.runtime import build\n"
        "def load(name, path):\n    print(path)\n    raise SystemExit\n"
        "build._load_module_from_path = load\ndriver.CudaUtils()"
    )
    programs = tmp_path / "programs"
    programs.mkdir()
    if (file := shutil.which("file")) is not None:  # Python asks it for the machine's architecture, a part of the key
        (programs / "file").symlink_to(file)
    bare = {**env, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PATH": str(programs)}
    found = Path(ran(sys.executable, "-c", look, env=bare).strip())
    assert found.is_relative_to(tmp_path / "cache")


@contextlib.contextmanager
def started(
    image: Image, arguments: list[str], home: Path, env: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            image.program(arguments, home, env), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops what runs inside: bwrap itself hands no signal on."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    inner = [pid for child in children for pid in Path(f"/proc/{child}/task/{child}/children").read_text().split()]
    for pid in inner or children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 15)
    process.wait(90)
