"""The files in `deploy/`: valid for the programs that read them, and true to the code.

A command in them is one that there is; a metric in them is one that a real job shows.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

# These register the types of panels and queries.
from grafana_foundation_sdk.models import prometheus, stat, timeseries  # noqa: F401
from grafana_foundation_sdk.models.dashboard import Dashboard

import aioflow as af
from aioflow.cli.command import _parser
from aioflow.monitoring.routes import ROUTES
from tests import needs
from tests.monitoring.test_prometheus import program
from tests.monitoring.watching import PATIENCE_S, watched

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "aioflow.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "aioflow.json"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
METRIC = re.compile(r"\baioflow_\w+")
PATHS = {route.path for route in ROUTES}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {}).get("template", {}).get("spec", {})
    return list(spec.get("containers", ()))


def expressions() -> dict[str, str]:
    """Returns each query of the alerts and the dashboard, by the name of its place."""
    found = {
        rule["alert"]: rule["expr"]
        for group in documents(RULES)[0]["groups"]
        for rule in group["rules"]
    }
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["query"]["query"]
    return found


# Prometheus and Grafana.


async def test_alerts_and_dashboard_use_metrics_that_a_real_job_shows(tmp_path: Path) -> None:
    """Each name is on the page of a job with async calls, windows, event time and checkpoints."""

    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value

    flow = program()
    marks = af.WatermarkStrategy.monotonous_timestamps(timestamp=lambda value: value)
    numbers = flow.source(af.io.push(), name="pushed", watermarks=marks)
    numbers.map(later, concurrency=2, name="calls").key_by(lambda value: value % 7).window(
        af.tumbling("1m")
    ).aggregate(af.count()).sink(af.io.blackhole())
    used = {name for text in expressions().values() for name in METRIC.findall(text)}
    assert len(used) > 20
    missing = used
    async with (
        asyncio.timeout(PATIENCE_S),
        watched(
            flow,
            checkpoints=f"file://{tmp_path}",
            every="200ms",
            latency_tracking="50ms",
            stop_timeout="0s",
        ) as client,
    ):
        while missing:
            page = await client.get("/metrics")
            missing = used - set(re.findall(r"^(aioflow_\w+)", page, re.MULTILINE))
            await asyncio.sleep(0.1)


def test_each_alert_fires_and_stays_silent_where_it_should() -> None:
    promtool = needs.program("promtool")
    cases = Path(__file__).with_name("aioflow.rules.test.yml")
    done = subprocess.run([promtool, "test", "rules", cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }
    tested = {
        (case["alertname"], bool(case.get("exp_alerts")))
        for test in yaml.safe_load(cases.read_text())["tests"]
        for case in test["alert_rule_test"]
    }
    assert tested == {(name, fires) for name in alerts for fires in (True, False)}


@pytest.mark.parametrize(
    ("what", "path"), [("rules", RULES), ("config", DEPLOY / "prometheus" / "prometheus.yml")]
)
def test_promtool_accepts_the_rules_and_the_configuration(what: str, path: Path) -> None:
    promtool = needs.program("promtool")
    done = subprocess.run(
        [promtool, "check", what, "--lint=all", "--lint-fatal", path]
        if what == "rules"
        else [promtool, "check", what, path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    """promtool parses them as recording rules."""
    promtool = needs.program("promtool")
    rules = []
    for number, (name, text) in enumerate(expressions().items()):
        if text.startswith("label_values"):
            continue
        text = text.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$task", ".*")
        rules.append({"record": f"test:{number}", "expr": text, "labels": {"name": name[:1]}})
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(
        [promtool, "check", "rules", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dashboard_has_only_fields_of_grafanas_schema() -> None:
    """Grafana's own types read the dashboard, and lose nothing of it."""
    text = json.loads(DASHBOARD.read_text())
    read = Dashboard.from_json(text)
    again = json.loads(JSONEncoder(sort_keys=True).encode(read))
    assert _lost(text, again) == []
    places = [tuple(panel["gridPos"].values()) for panel in text["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in text["panels"]}) == len(places)


def _lost(before: Any, after: Any, place: str = "") -> list[str]:
    """Returns the places whose values are not in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            lost
            for name, value in before.items()
            for lost in (
                _lost(value, after[name], f"{place}.{name}")
                if name in after
                else [f"{place}.{name}"]
            )
            if value not in ([], {})
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = zip(before, after, strict=True)
        return [
            lost for number, pair in enumerate(pairs) for lost in _lost(*pair, f"{place}[{number}]")
        ]
    return [] if before == after else [place]


# Kubernetes.


@pytest.mark.parametrize("version", ["1.28", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid_for_kubernetes(path: Path, version: str) -> None:
    """Strictly: an unknown field is an error."""
    for document in documents(path):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_call_commands_and_probes_that_there_are(path: Path) -> None:
    count = 0
    for document in documents(path):
        for container in containers(document):
            count += 1
            argv = [text.replace("$(POD_IP)", "127.0.0.1") for text in container["args"]]
            _parser(argv[0]).parse_args(argv)
            ports = {port["name"] for port in container["ports"]}
            probes = {name: probe for name, probe in container.items() if name.endswith("Probe")}
            assert {"livenessProbe", "readinessProbe"} <= set(probes)
            for probe in probes.values():
                assert probe["httpGet"]["path"].partition("?")[0] in PATHS
                assert probe["httpGet"]["port"] in ports
    assert count


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_containers_are_not_root_and_write_only_to_volumes(path: Path) -> None:
    for document in documents(path):
        for container in containers(document):
            spec = document["spec"]["template"]["spec"]
            assert spec["securityContext"]["runAsNonRoot"] is True
            for one in (container, *spec["initContainers"]):
                assert one["securityContext"]["readOnlyRootFilesystem"] is True
                assert one["securityContext"]["allowPrivilegeEscalation"] is False
            volumes = {volume["name"] for volume in spec["volumes"]} | {
                claim["metadata"]["name"]
                for claim in document["spec"].get("volumeClaimTemplates", ())
            }
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


# Docker and systemd.


def test_the_image_is_not_root_and_is_checked_by_the_probe() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    last = lines[lines.index(stages[-1]) :]
    assert "USER 10001:10001" in last
    (check,) = [line for line in last if line.startswith("HEALTHCHECK ")]
    assert json.loads(check[check.index("[") :]) == ["python", "/opt/aioflow/health.py"]
    assert "COPY deploy/health.py /opt/aioflow/health.py" in last
    (environment,) = [line for line in last if line.startswith("ENV ")]
    assert "AIOFLOW_MONITOR=127.0.0.1:8081 AIOFLOW_HEALTH=127.0.0.1:8081" in environment
    copied = [line.split()[1] for line in lines if line.startswith("COPY aioflow")]
    assert copied == ["aioflow"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "argv", [["run", "-q", "program.py:flow"], ["jobmanager", "--port", "0"], ["taskmanager"]]
)
def test_the_health_check_finds_each_command_without_an_option(
    argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(
        "import asyncio\nimport aioflow as af\nflow = af.Flow('f')\n"
        "async def ticks(position):\n    while True:\n        yield 1, 1\n"
        "        await asyncio.sleep(1)\nflow.source(ticks).sink(print)\n"
    )
    (tmp_path / ".aioflow").mkdir(mode=0o700)
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 40)
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "AIOFLOW_MONITOR": address, "AIOFLOW_HEALTH": address}
    if argv[0] != "run":
        argv = [*argv, "--secret-file", str(secret)]
    check = [sys.executable, str(DEPLOY / "health.py")]
    assert b"port" in subprocess.run(check, env=environment, capture_output=True).stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "aioflow", *argv], cwd=tmp_path, env=environment
    )
    try:
        deadline = time.monotonic() + 60
        while subprocess.run(check, env=environment, capture_output=True).returncode:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_call_commands_that_there_are(path: Path) -> None:
    (command,) = re.findall(r"^ExecStart=(.*)$", path.read_text(), re.MULTILINE)
    program, *argv = shlex.split(command)
    assert program.endswith("/bin/aioflow")
    _parser(argv[0]).parse_args(argv)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_units(path: Path, tmp_path: Path) -> None:
    analyze = needs.program("systemd-analyze")
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.M))
    done = subprocess.run(
        [analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if path.name in line]
    assert complaints == []
