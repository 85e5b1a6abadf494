"""What is written in Dockerfile, compose file, chart and units exists in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accounting.values.setting_rows import NAMES
from gateway.cli.exit_codes import CONFIG

ROOT = Path(__file__).parents[2]
FOLDERS = ("compose", "docker", "helm", "systemd")
FILES = [
    ROOT / "Dockerfile",
    *(path for folder in FOLDERS for path in sorted((ROOT / "ops" / folder).rglob("*")) if path.is_file()),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_setting_that_packaging_names_is_known(path):
    named = set(re.findall(r"\bHEADGATE_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    assert named - NAMES - {"HEADGATE_ENGINE"} == set()


def test_every_folder_that_the_dockerfile_copies_is_there_and_reaches_the_builder():
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    sources = {name for line in copied for name in line.split()}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {"gateway", "accounting", "workers", "migrations"} <= sources
    for name in sources:
        assert (ROOT / name).exists(), name
        assert any(name == one or name.startswith(f"{one}/") for one in allowed), f"{name} is left out by .dockerignore"


def test_no_final_image_has_what_builds():
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.M)[1:]
    final = {
        name: stage
        for stage in stages
        if (name := stage.split(" AS ")[1].split()[0]) in ("base", "gateway", "worker", "worker-cuda")
    }
    assert len(final) == 4
    for name, stage in final.items():
        assert not re.search(r"\b(apt-get|pip|gcc)\b", stage), name
    assert "USER 10001:10001" in final["base"]
    assert all("HEALTHCHECK" in final[name] for name in final if name != "base")


@pytest.mark.parametrize("path", sorted((ROOT / "ops" / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_no_unit_is_restarted_for_a_setting_that_cannot_be_used(path):
    lines = path.read_text().splitlines()
    assert f"RestartPreventExitStatus={CONFIG}" in lines or not any(line.startswith("Restart=") for line in lines)


def test_backups_can_be_taken_in_the_gateway_image():
    """pg_dump refuses a server that is newer than itself."""
    client_of = {"bookworm": 15, "trixie": 17}
    text = (ROOT / "Dockerfile").read_text()
    stage = re.search(r"^FROM base AS gateway-base$(.*?)^FROM gateway-base AS gateway$", text, re.M | re.S)
    assert stage, "the gateway's stage is not made of the one with PostgreSQL's programs"
    assert re.search(r"apt-get install .*\bpostgresql-client\b", stage[1])
    assert stage[1].rstrip().endswith("USER 10001:10001")
    server = re.search(r"image: postgres:(\d+)", (ROOT / "ops" / "compose" / "compose.yaml").read_text())
    assert client_of[re.search(r"^ARG DEBIAN=(\w+)$", text, re.M)[1]] >= int(server[1])


def test_the_charts_notes_name_the_namespace():
    folder = ROOT / "ops" / "helm" / "headgate" / "templates"
    commands = [line for line in (folder / "NOTES.txt").read_text().splitlines() if "kubectl" in line]
    assert all("-n {{ .Release.Namespace }}" in line for line in commands)


def unit(name: str) -> list[str]:
    return (ROOT / "ops" / "systemd" / f"headgate-{name}.service").read_text().splitlines()


def test_a_migration_runs_at_each_start_and_again_when_the_database_comes_late():
    lines = unit("migrate")
    assert not any(line.startswith("RemainAfterExit=") for line in lines), "after an upgrade it would not run again"
    assert {"Type=oneshot", "Restart=on-failure", "StartLimitIntervalSec=0"} <= set(lines)
    for name in ("gateway@", "jobs"):
        assert not any(line.startswith("Requires=") for line in unit(name)), "one failed migration would keep it down"
        assert any(re.match(r"Wants=.*headgate-migrate\.service", line) for line in unit(name))
        assert any(re.match(r"After=.*headgate-migrate\.service", line) for line in unit(name))


@pytest.mark.parametrize(
    ("name", "own"), [("gateway@", "gateway-%i.env"), ("worker@", "worker-%i.env"), ("jobs", "jobs.env")]
)
def test_the_file_of_one_process_wins_over_the_file_of_all(name, own):
    """Of two files that set a variable, systemd takes the later one."""
    files = [line for line in unit(name) if line.startswith("EnvironmentFile=")]
    assert files == ["EnvironmentFile=/etc/headgate/headgate.env", f"EnvironmentFile=-/etc/headgate/{own}"]


def test_the_jobs_unit_listens_where_prometheus_looks():
    scraped = (ROOT / "ops" / "prometheus" / "prometheus.yml").read_text()
    (target,) = re.findall(r'job_name: headgate-jobs.*?targets: \["(\S+)"\]', scraped, re.S)
    assert f"Environment=HEADGATE_OPS_BIND={target}" in unit("jobs")


def test_the_prometheus_of_compose_keeps_what_leads_from_a_chart_to_a_trace():
    prometheus = (ROOT / "ops" / "compose" / "compose.yaml").read_text().split("\n  prometheus:\n")[1].split("\n\n")[0]
    flags = re.findall(r"^      - (--\S+)$", prometheus, re.M)
    assert "--enable-feature=exemplar-storage" in flags
    # A command stands in place of the image's own, which names these two.
    assert {"--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"} <= set(flags)


def test_the_chart_has_the_version_of_the_package():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    chart = (ROOT / "ops" / "helm" / "headgate" / "Chart.yaml").read_text()
    assert f"\nversion: {version}\n" in chart
    assert f"\nappVersion: {version}\n" in chart
