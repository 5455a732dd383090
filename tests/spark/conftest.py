"""One Spark session for all tests of a process: starting Java takes seconds.

Tests that use it take the fixture `spark`.

Without Java such a test fails in CI, and is skipped elsewhere with the reason.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator

import pytest

from aioflow.spark.bridge.jvm import find_java
from aioflow.spark.bridge.session import SparkBridge
from aioflow.spark.failures import SparkError
from aioflow.spark.versions import installed_version, java_max, java_min
from tests import needs
from tests.conftest import AsyncioErrors, left_threads, new_descriptors, open_descriptors
from tests.spark.brief import BRIEF

__all__: list[str] = []

OPEN_SOCKETS = "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
"""PySpark before 4.2 leaves the sockets of `collect` to the garbage collector."""

OLD_MODULE = "ignore:distutils Version classes are deprecated:DeprecationWarning"
"""PySpark 3.5 compares versions with distutils."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that use the session, and keeps them in one process if tests are spread by
    group.
    """
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.xdist_group("spark"))
            if installed_version() < (4, 2):
                item.add_marker(pytest.mark.filterwarnings(OPEN_SOCKETS))
            if installed_version() < (4, 0):
                item.add_marker(pytest.mark.filterwarnings(OLD_MODULE))


@pytest.fixture(scope="session")
def java() -> str:
    """Returns JAVA_HOME of a runtime that is new enough."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return find_java(os.environ, scratch, java_min(), java_max()).home
        except SparkError as error:
            needs.missing("Java", f"{needs.SETUP} ({error})")


@pytest.fixture(scope="session")
def spark(java: str) -> Iterator[SparkBridge]:
    """A bridge whose session is there."""
    config = {
        "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
        "spark.driver.extraJavaOptions": BRIEF,
    }
    bridge = SparkBridge("local[2]", app="tests", config=config)
    with asyncio.Runner() as runner:
        runner.run(bridge.session())
    yield bridge
    with asyncio.Runner() as runner:
        runner.run(bridge.close())


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, asyncio_errors: AsyncioErrors
) -> Iterator[None]:
    """Checks as for every test; only the connections of Py4J stay, one for each thread that ever
    called Java.
    """
    if "spark" in request.fixturenames:
        request.getfixturevalue("spark")
    import threading

    threads = set(threading.enumerate())
    descriptors = open_descriptors()
    asyncio_errors.messages.clear()
    yield
    leaks = left_threads(threads)
    if new_descriptors(descriptors):
        import gc

        gc.collect()
        java = _inodes_to_java()
        leaks += [
            line
            for line in new_descriptors(descriptors)
            if not any(f"socket:[{inode}]" in line for inode in java)
        ]
    if (
        asyncio_errors.messages
        and request.node.get_closest_marker("expects_asyncio_errors") is None
    ):
        leaks += [f"asyncio logged: {message}" for message in asyncio_errors.messages]
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


def _inodes_to_java() -> set[str]:
    """The sockets that are connections with the Java process, by either side's port."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return set()
    ports = {gateway.gateway_parameters.port, gateway._python_proxy_port or 0}
    context = SparkContext._active_spark_context
    if context is not None:
        # Java connects to it once, with the first task that runs Python.
        ports.add(context._accumulatorServer.server_address[1])
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with open(table) as file:
            for line in list(file)[1:]:
                fields = line.split()
                if {
                    int(fields[1].rsplit(":", 1)[1], 16),
                    int(fields[2].rsplit(":", 1)[1], 16),
                } & ports:
                    found.add(fields[9])
    return found
