"""What several tests of clusters share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clusters import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that is not started yet; its directory does not exist."""
    made = Cluster(tmp_path / "cluster")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are away at the start of a job are not waited for."""
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", 0.0)
