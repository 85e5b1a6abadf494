"""Compose file, chart and units: each judged by its own tool, and by what Headgate itself needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_page import LABELS, NAME, family_of, foreign_labels
from packaged import ROOT, TOOLS, ran

CHART = ROOT / "ops" / "helm" / "headgate"
KUBERNETES = ("1.31", "1.34")
RENDER = """
import helm_python, json, sys
values = json.loads(sys.argv[2])
with helm_python.Chart.load(sys.argv[1]) as chart:
    print(json.dumps(chart.render(values, name="demo", namespace="prod")))
"""
EVERYTHING: dict[str, Any] = {
    "autoscaling": {"enabled": True},
    "gateway": {"autoscaling": {"enabled": True}, "env": {"HEADGATE_TRUSTED_NETWORKS": "10.0.0.0/8"}},
    "ingress": {"enabled": True, "tlsSecret": "tls"},
    "podMonitor": {"enabled": True},
    "modelsVolume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    "otlpEndpoint": "http://collector:4318",
    "models": [
        {"name": "large", "path": "/models/large", "firstSlot": 0, "replicas": 2, "gpus": 2, "maxOutputTokens": 4096},
        {
            "name": "small",
            "path": "/models/small",
            "firstSlot": 100,
            "replicas": 1,
            "gpus": 0,
            "env": {"HEADGATE_ENGINE_QUANT": "int8"},
        },
    ],
}
FOREIGN = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1"}
"""Kinds that the cluster's own operators bring; Kubernetes' schemas do not know them."""


def helm(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOLS / "python", "-c", code, *arguments], capture_output=True, text=True, check=False)


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    done = helm(RENDER, str(CHART), json.dumps(values))
    assert done.returncode == 0, done.stderr
    texts = (text for name, text in json.loads(done.stdout).items() if name.endswith(".yaml"))
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one["spec"]["template"] for one in objects if "template" in one.get("spec", {})}


@pytest.mark.parametrize("has_tls", [True, False])
def test_an_ingress_and_names_of_workers_fit_tls(has_tls):
    """The ingress speaks TLS to gateways that do, and a worker is found by its name before it is ready."""
    tls = {"tls": {"secret": "a"}, "links": {"workerSecret": "b", "gatewaySecret": "c"}} if has_tls else {}
    by_kind = {}
    for one in rendered(EVERYTHING | tls):
        by_kind.setdefault(one["kind"], []).append(one)
    (ingress,) = by_kind["Ingress"]
    told = ingress["metadata"]["annotations"].get("nginx.ingress.kubernetes.io/backend-protocol")
    assert told == ("HTTPS" if has_tls else None)
    workers = [one["spec"] for one in by_kind["Service"] if "worker" in one["metadata"]["name"]]
    assert len(workers) == 2
    assert [one.get("publishNotReadyAddresses", False) for one in workers] == [has_tls] * 2


def test_the_chart_passes_helms_own_lint():
    done = helm("import helm_python, json, sys; print(json.dumps(helm_python.lint(sys.argv[1])))", str(CHART))
    found = json.loads(done.stdout)
    assert [told for told in found["messages"] if told["severity"] > 1] == [], found


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_every_object_of_the_chart_fits_kubernetes_schemas(values, version, tmp_path):
    objects = rendered(values)
    ours = [one for one in objects if one["apiVersion"] not in FOREIGN]
    assert len(ours) > 12
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all(ours))
    done = subprocess.run(
        [TOOLS / "kubernetes-validate", "-k", version, "--strict", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"models": []}, "minItems"),
        ({"gatewayz": {}}, "gatewayz"),
        ({"models": [{"name": "Large!", "path": "/m"}]}, "name"),
        ({"gateway": {"env": {"PATH": "/x"}}}, "PATH"),
        ({"drain": {"seconds": -1}}, "minimum"),
        ({"existingSecret": ""}, "minLength"),
    ],
)
def test_values_that_are_mistyped_are_refused_by_name(values, told):
    done = helm(RENDER, str(CHART), json.dumps(values))
    assert done.returncode != 0
    assert told in done.stderr


def test_migrations_run_with_the_key_files_of_the_installation():
    """Without them `headgate migrate` refuses a database that has API keys, and with it every upgrade."""
    (pod,) = (pod for name, pod in pods(rendered(EVERYTHING)).items() if name.endswith("migrate"))
    (container,) = pod["spec"]["containers"]
    assert "/var/lib/headgate/secrets" in [one["mountPath"] for one in container["volumeMounts"]]
    assert "secrets" in [one["name"] for one in pod["spec"]["volumes"]]


def test_every_pod_is_unprivileged_and_its_root_is_read_only():
    for name, pod in pods(rendered(EVERYTHING)).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["automountServiceAccountToken"] is False, name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["requests"] if "large" not in name and "small" not in name else True
            inline = {one["name"]: one.get("value", "") for one in container["env"]}
            assert not [
                key for key in inline if key in ("HEADGATE_DATABASE_URL", "HEADGATE_BROKER_URL") and inline[key]
            ], name


def test_pods_are_probed_drained_and_given_longer_than_a_drain_takes():
    drain = {"graceSeconds": 7, "seconds": 120}
    for name, pod in pods(rendered({**EVERYTHING, "drain": drain})).items():
        if name.endswith(("jobs", "migrate")):
            continue
        (container,) = pod["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert float(env["HEADGATE_DRAIN_S"]) == 120, name
        settle_s = 10
        assert pod["spec"]["terminationGracePeriodSeconds"] >= 7 + 120 + settle_s + 5, name
        assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
        script = container["lifecycle"]["preStop"]["exec"]["command"][1]
        assert (ROOT / "ops" / "docker" / Path(script).name).is_file()


def test_workers_of_all_models_have_slots_of_their_own_and_the_gpus_they_were_given():
    sets = {one["metadata"]["name"]: one["spec"] for one in rendered(EVERYTHING) if one["kind"] == "StatefulSet"}
    large, small = sets["demo-worker-large"], sets["demo-worker-small"]
    assert (large["ordinals"]["start"], small["ordinals"]["start"]) == (0, 100)
    (container,) = large["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert container["args"] == ["worker", "--tensor-parallel", "2"]
    assert "worker-cuda" in container["image"]
    (container,) = small["template"]["spec"]["containers"]
    assert "worker-cuda" not in container["image"]


@pytest.mark.parametrize(
    ("first_slot", "replicas", "autoscaling", "told"),
    [
        (None, 1, False, "models large and small have slot 0"),
        (1, 2, False, "models large and small have slot 1"),
        (2, 2, False, ""),
        (3, 1, True, "models large and small have slot 3"),
        (4, 1, True, ""),
    ],
)
def test_models_whose_workers_would_share_a_slot_are_refused(first_slot, replicas, autoscaling, told):
    large = {"name": "large", "path": "/models/large", "replicas": replicas, "gpus": 0}
    small = {"name": "small", "path": "/models/small", "gpus": 0}
    if first_slot is not None:
        small["firstSlot"] = first_slot
    values = {"models": [large, small], "autoscaling": {"enabled": autoscaling, "maxReplicas": 4}}
    done = helm(RENDER, str(CHART), json.dumps(values))
    assert (done.returncode != 0, told in done.stderr) == (bool(told), True)


def test_only_gateways_reach_workers():
    policies = {one["metadata"]["name"]: one["spec"] for one in rendered({}) if one["kind"] == "NetworkPolicy"}
    (rule,) = policies["demo-worker"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert rule["ports"] == [{"port": 7000, "protocol": "TCP"}]


def test_the_operators_prometheus_calls_the_jobs_as_the_alerts_do():
    """By itself the label is namespace and name of the PodMonitor, and the alert on a lost target would never fire."""
    objects = rendered(EVERYTHING)
    (monitor,) = [one for one in objects if one["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (rule,) = endpoint["relabelings"]
    assert rule["targetLabel"] == "job"
    assert rule["sourceLabels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    label = "app.kubernetes.io/component"
    scraped = {
        pod["metadata"]["labels"][label]
        for pod in pods(objects).values()
        if any(port["name"] == endpoint["port"] for port in pod["spec"]["containers"][0].get("ports", ()))
    }
    made = {re.sub(f"^(?:{rule['regex']})$", rule["replacement"].replace("$1", r"\1"), part) for part in scraped}
    known = set(re.findall(r"job_name: (\S+)", (ROOT / "ops" / "prometheus" / "prometheus.yml").read_text()))
    assert made == known == {"headgate-gateway", "headgate-worker", "headgate-jobs"}


def test_the_notes_name_the_namespace():
    done = helm(RENDER, str(CHART), "{}")
    notes = next(text for name, text in json.loads(done.stdout).items() if name.endswith("NOTES.txt"))
    assert "kubectl exec -n prod demo-gateway-0 -- headgate keys create" in notes


def test_a_drain_of_nodes_takes_one_pod_of_a_set_at_a_time():
    """Each set of gateways or workers has a budget of disruptions, which selects the pods of this set alone."""
    objects = rendered(EVERYTHING)
    budgets = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"}
    assert set(budgets) == {"demo-gateway", "demo-worker-large", "demo-worker-small"}
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    for name, budget in budgets.items():
        assert budget["maxUnavailable"] == 1, name
        wanted = budget["selector"]["matchLabels"].items()
        assert [pod for pod, has in labels.items() if wanted <= has.items()] == [name]


def test_the_workers_of_a_model_are_scaled_by_metrics_and_labels_that_exist():
    """Each metric is asked for by the model that the object scales: a slow model adds no workers to another one."""
    scaled = {one["metadata"]["name"]: one["spec"] for one in rendered(EVERYTHING) if one["kind"] == "ScaledObject"}
    assert set(scaled) == {"demo-worker-large", "demo-worker-small"}
    for model in ("large", "small"):
        queries = [trigger["metadata"]["query"] for trigger in scaled[f"demo-worker-{model}"]["triggers"]]
        names = [name for query in queries for name in re.findall(NAME, query)]
        assert names == [
            "headgate_oldest_wait_seconds",
            "headgate_router_ttft_seconds_total",
            "headgate_router_choices_total",
        ]
        assert {family_of(name) for name in names} <= set(LABELS)
        assert [foreign_labels(query) for query in queries] == [set(), set()]
        selectors = [found for query in queries for found in re.findall(rf"{NAME}\{{([^}}]*)\}}", query)]
        assert len(selectors) == len(names), "each metric is narrowed to the model"
        assert all(re.search(rf'\bmodel(_name)?="{model}"', one) for one in selectors), selectors


def test_the_compose_file_fits_the_specification_and_names_files_that_exist(tool):
    path = ROOT / "ops" / "compose" / "compose.yaml"
    env = {**os.environ, "POSTGRES_PASSWORD": "x"}
    told = json.loads(ran(tool("docker-compose"), "-f", path, "config", "--format", "json", env=env))
    services = told["services"]
    assert set(services) == {
        "postgres",
        "valkey",
        "migrate",
        "gateway",
        "worker",
        "jobs",
        "prometheus",
        "grafana",
        "jaeger",
    }
    for name, service in services.items():
        for volume in service.get("volumes", []):
            if volume["type"] == "bind":
                assert Path(volume["source"]).exists(), (name, volume["source"])
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", [])), name
        if service.get("image", "").startswith("headgate/"):
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"], name
    without = subprocess.run(
        [tool("docker-compose"), "-f", path, "config", "-q"],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "POSTGRES_PASSWORD"},
    )
    assert without.returncode != 0
    assert "POSTGRES_PASSWORD" in without.stderr


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """Instances of the units, with this environment's program in place of the installed one."""
    made = []
    for path in sorted((ROOT / "ops" / "systemd").glob("*.service")):
        text = path.read_text().replace("/opt/headgate/bin", str(Path(sys.executable).parent))
        made.append(tmp_path / path.name.replace("@", "@0"))
        made[-1].write_text(text)
        if "@" in path.name:
            (tmp_path / path.name).write_text(text)
    return made


def test_systemd_verifies_the_units(units, tool):
    done = subprocess.run([tool("systemd-analyze"), "verify", *units], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "headgate" in line]
    assert (done.returncode, ours) == (0, [])


def test_systemd_finds_the_units_little_exposed(units, tool):
    assert len(units) == 4
    for unit in units:
        ran(tool("systemd-analyze"), "security", "--offline=yes", "--threshold=20", unit)


def test_units_stop_no_sooner_than_their_process_drains(units):
    for unit in units:
        if "migrate" in unit.name:
            continue
        limit = int(re.search(r"TimeoutStopSec=(\d+)", unit.read_text())[1])
        assert limit >= (40 if "jobs" in unit.name else 5 + 60 + 10), unit.name
