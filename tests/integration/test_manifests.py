"""The commands of `deploy/kubernetes/cluster.yaml` as processes, each at an address of its own.

The test takes the part of Kubernetes: it replaces paths and addresses, and asks the probes.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.clusters import FLOWS, ROOT, Cluster, aioflow, ask_url, until
from tests.network.certificates import Authority

pytestmark = pytest.mark.timeout(900)  # It starts eight processes, and each may be slow.

MANIFEST = ROOT / "deploy" / "kubernetes" / "cluster.yaml"
DATA = "/var/lib/aioflow"


class Pod:
    """The process of a container, with the paths and addresses of this test."""

    def __init__(self, container: dict[str, Any], address: str, changes: dict[str, str]) -> None:
        changes = {**changes, "$(POD_IP)": address, "0.0.0.0": address}
        self.argv = list(container["args"])
        for before, after in changes.items():
            self.argv = [text.replace(before, after) for text in self.argv]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        self._probes = {}
        for name, probe in container.items():
            if name.endswith("Probe"):
                get = probe["httpGet"]
                self._probes[name] = f"http://{address}:{ports[get['port']]}{get['path']}"

    def passes(self) -> bool:
        """Whether each probe of the container answers 200."""
        return all(self._status(url) == 200 for url in self._probes.values())

    def is_ready(self) -> bool:
        return self._status(self._probes["readinessProbe"]) == 200

    def _status(self, url: str) -> int:
        try:
            return ask_url(url)[0]
        except OSError:
            return 0


@pytest.fixture
def changes(cluster: Cluster, tmp_path: Path) -> dict[str, str]:
    """Directories instead of the volumes, with the secrets as the init container leaves them."""
    cluster.data.mkdir(mode=0o2775)  # As a volume with fsGroup.
    cluster.data.chmod(0o2775)
    run = tmp_path / "run"
    run.mkdir()
    for name in ("secret", "monitor-token"):
        (run / name).touch(mode=0o400)
        (run / name).chmod(0o600)
        (run / name).write_text(os.urandom(24).hex())
        (run / name).chmod(0o400)
    files = Authority(tmp_path).issue("pod")
    return {
        DATA: str(cluster.data),
        "/run/aioflow": str(run),
        "/tls/tls.crt": files.certificate,
        "/tls/tls.key": files.key,
        "/tls/ca.crt": files.authority,
    }


def test_commands_of_the_cluster_survive_the_loss_of_the_leader(
    cluster: Cluster, changes: dict[str, str]
) -> None:
    documents = list(yaml.safe_load_all(MANIFEST.read_text()))
    containers = {
        document["metadata"]["name"]: document["spec"]["template"]["spec"]["containers"][0]
        for document in documents
        if "template" in document["spec"]
    }
    # A network of this test alone: other tests may use the same ports.
    network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
    leaders = [f"{network}.{number}" for number in (1, 2)]
    for number, address in enumerate(leaders):
        changes[f"jobmanager-{number}.jobmanager"] = address
    jobmanagers = [Pod(containers["jobmanager"], address, changes) for address in leaders]
    workers = [Pod(containers["taskmanager"], f"{network}.{number}", changes) for number in (3, 4)]
    first = cluster.spawn(*jobmanagers[0].argv)
    until(jobmanagers[0].passes, "the leader passes its probes")
    cluster.spawn(*jobmanagers[1].argv)
    for worker in workers:
        cluster.spawn(*worker.argv)
    for pod in (jobmanagers[1], *workers):
        until(pod.passes, "a standby and the TaskManagers pass their probes")

    options = [text for text in workers[0].argv if text.startswith(("--secret", "--tls"))]
    at = ["--at", ",".join(f"{address}:6123" for address in leaders), *options]
    state = cluster.data / "state"
    submitted = aioflow(
        *("submit", "-d", f"{FLOWS}:wide_endless", *at),
        *("--checkpoints", state, "--every", "200ms", "--restarts", "100"),
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()

    def checkpoints() -> int:
        found = [int(path.name) for path in state.glob("*/checkpoints/*")]
        return max(found, default=0)

    until(lambda: checkpoints() > 1, "a checkpoint is complete")
    first.kill()
    first.wait()
    until(lambda: "recovered" in cluster.log("extra"), "the standby leads")
    before = checkpoints()
    until(lambda: checkpoints() > before + 1, "the job goes on at the standby")
    cluster.spawn(*jobmanagers[0].argv)
    until(jobmanagers[0].passes, "the dead one stands by")
    for worker in workers:
        until(worker.is_ready, "the TaskManagers are registered again")
    listed = aioflow("list", *at)
    assert f"{job}  RUNNING" in listed.stdout, listed.stdout + listed.stderr
