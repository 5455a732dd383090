"""What several tests of clusters, databases and brokers share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clusters import Cluster
from tests.io.driver import SinkContext, system_context


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


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of the test, for a topic, a queue, or a stream with one subject."""
    return "".join(sign if sign.isalnum() else "-" for sign in request.node.name)


@pytest.fixture
def schema(request: pytest.FixtureRequest) -> str:
    """The name of the test, short enough for a schema and for names that begin with it."""
    name: str = request.node.originalname
    return name[:50]


@pytest.fixture
def dsn(server: Any, schema: str) -> str:
    """Leads to an empty schema of the server of the module."""
    made: str = server.create(schema)
    return made


@pytest.fixture
async def ctx() -> AsyncIterator[SinkContext]:
    async with system_context() as context:
        yield SinkContext(context.host)
