"""A cluster whose processes prove themselves by certificates, as the command line makes it, and
what it refuses to do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import aioflow as af
from tests.integration.clusters import FLOWS, Cluster, aioflow
from tests.network.certificates import Authority

pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    yield made
    made.close()


def options(files: af.TlsFiles) -> list[str]:
    return ["--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority]


async def test_cluster_with_tls_serves_only_peers_with_a_certificate(
    cluster: Cluster, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("member")
    started = aioflow(
        "cluster",
        "start",
        "--data",
        cluster.data,
        "--workers",
        "2",
        "--slots",
        "1",
        "--port",
        "0",
        *options(files),
    )
    assert started.returncode == 0, started.stderr
    assert "2 taskmanagers with 2 slots" in started.stdout
    at = ["--at", cluster.address, "--secret-file", cluster.secret]

    listed = aioflow("list", *at, *options(authority.issue("operator")))
    assert (listed.returncode, listed.stdout) == (0, "no jobs\n"), listed.stderr
    plain = aioflow("list", *at)
    assert plain.returncode != 0
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "other").issue("stranger")
    assert aioflow("list", *at, *options(stranger)).returncode != 0

    flow = af.Flow("over tls", parallelism=2)
    counted = flow.source(af.io.datagen(int, count=1_000, splits=2)).key_by(_last_digit).count()
    rows = await counted.collect(
        on=af.RemoteCluster(cluster.address, secret=cluster.secret, tls=files)
    )
    assert sorted(row for row in rows if row[1] == 100) == [(digit, 100) for digit in range(10)]

    stopped = aioflow("cluster", "stop", "--data", cluster.data, *options(files))
    assert (stopped.returncode, stopped.stdout) == (0, "cluster stopped\n"), stopped.stderr


def _last_digit(n: int) -> int:
    return n % 10


def test_incomplete_or_open_configuration_does_not_start(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("member")
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    secret.chmod(0o600)
    jobmanager = ["jobmanager", "--port", "0", "--data", tmp_path / "data", "--secret-file", secret]
    halves = aioflow(*jobmanager, "--tls-cert", files.certificate)
    assert halves.returncode == 2
    assert "TLS is configured by halves: --tls-key and --tls-ca is missing" in halves.stderr
    absent = aioflow(
        "list",
        "--secret-file",
        secret,
        "--tls-cert",
        "absent",
        "--tls-key",
        files.key,
        "--tls-ca",
        files.authority,
    )
    assert absent.returncode == 2
    assert "TLS cannot use the certificate absent" in absent.stderr
    plain = aioflow(*jobmanager, "--bind", "0.0.0.0")
    assert plain.returncode == 2
    assert "0.0.0.0 can be reached from other machines, in plain text" in plain.stderr
    assert "Traceback" not in halves.stderr + absent.stderr + plain.stderr
    submitted = aioflow(
        "submit", f"{FLOWS}:endless", "--secret-file", secret, "--tls-key", files.key
    )
    assert submitted.returncode == 2
    assert "by halves" in submitted.stderr
