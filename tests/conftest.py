"""Rules for every test: it leaves nothing behind, and randomness is repeatable.

A test that leaves a pending task, a live non-daemon thread, an open file descriptor or an error
that asyncio could only log fails, and the message names what is left. The price is two `listdir` a
test, so it is always on.

Markers follow the place of a test: `tests/integration`, `tests/simulation` and
`tests/test_examples*.py` mark themselves, and so do the modules of connectors and of the dashboard.
Modules about keys, routing and simulation are repeated under several `PYTHONHASHSEED`s.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import needs

__all__: list[str] = []

TESTS = Path(__file__).parent
FD_DIRECTORY = "/proc/self/fd"
THREAD_GRACE_S = 30.0
"""How long a thread that was already told to stop may take to do so."""

SHARED_DEVICES = frozenset({"/dev/null", "/dev/random", "/dev/urandom"})
"""Libraries open these once a process and keep them."""

SHARED_LIBRARY = re.compile(r".*/libffi\.so[.0-9]*$")
"""libffi keeps its own file open from the first callback on."""

WITHOUT_ROCKSDB = not os.environ.get("CI") and importlib.util.find_spec("rocksdict") is None
"""Whether tests of state in RocksDB are skipped, as on a Python too new for its wheel."""

collect_ignore_glob = ["*/test_rocksdb*.py"] if WITHOUT_ROCKSDB else []

LOOP_TURNS = 5
"""How many turns of the loop a task that was already cancelled may take to end."""

SERVICES_MODULES = re.compile(
    r"^test_(kafka|mqtt|mysql|nats|postgres(_changes)?|rabbitmq|redis|schema_registry"
    r"|sink|source)\.py$"
)
"""Modules whose integration tests start servers: connectors, and the contracts that they pass."""

HASHSEED_MODULES = re.compile(r"^test_.*(key|rout|partitioner|simul|canonical)")

# Two shared cores make deadlines flaky; a fixed derivation makes a failure in CI the failure on the
# desk.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_configure(config: pytest.Config) -> None:
    # pytest-asyncio runs its loops without debug mode, even if the environment asks for it.
    if os.environ.get("PYTHONASYNCIODEBUG"):
        config.option.asyncio_debug = True


def pytest_report_header() -> str:
    return f"hash seed: {os.environ.get('PYTHONHASHSEED', 'random')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    for line in needs.summary(
        report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)
    ):
        terminalreporter.write_line(line)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The lane of hash seeds does not read the modules that have none of its tests: that takes
    longer than the tests.
    """
    if not config.option.markexpr.startswith("hashseed") or collection_path.suffix != ".py":
        return None
    is_read = "simulation" in collection_path.parts or HASHSEED_MODULES.match(collection_path.name)
    return None if is_read else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ()
        if "integration" in place[:-1]:
            item.add_marker(pytest.mark.integration)
        if item.get_closest_marker("integration") is not None:
            if SERVICES_MODULES.match(item.path.name):
                item.add_marker(pytest.mark.services)
            if item.path.name.startswith("test_dashboard"):
                item.add_marker(pytest.mark.browser)
        if "simulation" in place[:-1]:
            item.add_marker(pytest.mark.simulation)
            if (
                item.path.name != "test_planted.py"
            ):  # That a planted bug is found hangs on no seed of hashes.
                item.add_marker(pytest.mark.hashseed)
        if item.path.name.startswith("test_examples"):
            item.add_marker(pytest.mark.examples)
        if HASHSEED_MODULES.match(item.path.name):
            item.add_marker(pytest.mark.hashseed)
        if "rocksdb" in item.nodeid and WITHOUT_ROCKSDB:
            item.add_marker(pytest.mark.skip(needs.reason("rocksdict", "wait for its wheel")))


@pytest.fixture(autouse=True)
def no_word_of_held_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drops warnings of a held loop from the log, unless the test is marked `slow_callbacks`.

    On a busy machine any action may take 100 ms of the clock, and tests count what is logged.
    asyncio has a warning of its own in debug mode.
    """
    if request.node.get_closest_marker("slow_callbacks") is not None:
        yield
        return
    logs = [
        logging.getLogger(name)
        for name in ("aioflow.mailbox.metrics", "aioflow.inspection.loop_watch", "asyncio")
    ]
    for log in logs:
        log.addFilter(_is_not_of_a_held_loop)
    yield
    for log in logs:
        log.removeFilter(_is_not_of_a_held_loop)


def _is_not_of_a_held_loop(record: logging.LogRecord) -> bool:
    message = str(record.msg)
    return "held the event loop" not in message and not message.startswith("Executing %s took")


class AsyncioErrors(logging.Handler):
    """Keeps what asyncio reports only to its log: exceptions never retrieved, tasks destroyed
    while pending.
    """

    def __init__(self) -> None:
        super().__init__(level=logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="session")
def uvloop() -> Any:
    """The module, after its first loop. libuv opens a pipe for signals then, and keeps it: no leak
    of the test that is first.
    """
    module = pytest.importorskip("uvloop")
    module.new_event_loop().close()
    return module


@pytest.fixture(scope="session")
def asyncio_errors() -> Iterator[AsyncioErrors]:
    handler = AsyncioErrors()
    logging.getLogger("asyncio").addHandler(handler)
    yield handler
    logging.getLogger("asyncio").removeHandler(handler)


@pytest.fixture(autouse=True)
def no_task_left(request: pytest.FixtureRequest, nothing_left_behind: None) -> None:
    """Brings in `no_task_pending` for a test that has a loop, ahead of the test's own fixtures.

    It runs after `nothing_left_behind`, so that one is torn down last, when the loop has been
    closed.
    """
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("no_task_pending")


@pytest.fixture
async def no_task_pending() -> AsyncIterator[None]:
    """Fails the test if a task of its loop is pending once the test and its other fixtures are
    done.
    """
    yield
    for _ in range(LOOP_TURNS):
        if not pending_tasks():
            return
        await asyncio.sleep(0)
    if left := pending_tasks():
        pytest.fail(
            "tasks left pending: " + ", ".join(sorted(repr(task) for task in left)), pytrace=False
        )


def pending_tasks() -> list[asyncio.Task[object]]:
    me = asyncio.current_task()
    return [task for task in asyncio.all_tasks() if task is not me and not task.done()]


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, asyncio_errors: AsyncioErrors
) -> Iterator[None]:
    """Fails the test that leaks a thread, a file descriptor, or an unretrieved error."""
    threads = set(threading.enumerate())
    descriptors = open_descriptors()
    asyncio_errors.messages.clear()
    yield
    leaks = left_threads(threads) + left_descriptors(descriptors)
    if (
        asyncio_errors.messages
        and request.node.get_closest_marker("expects_asyncio_errors") is None
    ):
        leaks += [f"asyncio logged: {message}" for message in asyncio_errors.messages]
    if leaks:
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


def left_threads(before: set[threading.Thread]) -> list[str]:
    left = []
    for thread in threading.enumerate():
        if thread not in before and not thread.daemon:
            thread.join(THREAD_GRACE_S)
            if thread.is_alive():
                left.append(f"thread {thread.name}")
    return left


def open_descriptors() -> dict[str, str]:
    """Returns each open descriptor with what it points to; empty where the system does not tell."""
    try:
        numbers = os.listdir(FD_DIRECTORY)
    except FileNotFoundError:
        return {}
    found = {}
    for number in numbers:
        try:
            found[number] = os.readlink(f"{FD_DIRECTORY}/{number}")
        except FileNotFoundError:
            continue  # It was the descriptor of the listing itself.
    return found


def left_descriptors(before: dict[str, str]) -> list[str]:
    if not before or not new_descriptors(before):
        return []
    # Only now: a cycle may still hold a transport, and collecting after each test would be dear.
    gc.collect()
    return new_descriptors(before)


def new_descriptors(before: dict[str, str]) -> list[str]:
    after = sorted(open_descriptors().items(), key=lambda entry: int(entry[0]))
    return [
        f"descriptor {number} -> {target}"
        for number, target in after
        if number not in before
        and target not in SHARED_DEVICES
        and not SHARED_LIBRARY.match(target)
    ]
