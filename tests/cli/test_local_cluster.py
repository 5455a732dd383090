"""When a TaskManager of `aioflow cluster start` is replaced, and when not."""

from __future__ import annotations

import asyncio
import subprocess
from typing import cast

import pytest

from aioflow.cli import local_cluster
from aioflow.cli.local_cluster import REPLACEMENTS_MAX, Replacements, keep_running


def test_delay_grows_to_a_bound_and_the_replacements_end() -> None:
    replacements = Replacements()
    delays = []
    for _ in range(REPLACEMENTS_MAX):
        replacements.started(0.0)
        delays.append(replacements.ended(-9, 1.0))
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    assert replacements.ended(-9, 2.0) is None


def test_process_that_ran_for_long_is_replaced_as_the_first_time() -> None:
    replacements = Replacements()
    for _ in range(REPLACEMENTS_MAX):
        assert replacements.ended(1, 1.0) is not None
    replacements.started(10.0)
    assert replacements.ended(1, 70.0) == 1.0


@pytest.mark.parametrize("code", [0, 2], ids=["told to end", "wrong usage"])
def test_process_that_would_end_again_is_not_replaced(code: int) -> None:
    assert Replacements().ended(code, 1.0) is None


class EndedProcess:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.returncode = code

    def poll(self) -> int:
        return self.returncode


async def test_each_process_is_replaced_until_it_ends_as_it_was_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_cluster, "FIRST_S", 0.001)
    codes = {1: [-9, 0], 2: [1, -11, 0]}

    def start(number: int) -> subprocess.Popen[bytes]:
        return cast("subprocess.Popen[bytes]", EndedProcess(codes[number].pop(0)))

    async with asyncio.timeout(60):
        await keep_running(start, 2, lambda: False, lambda: 0.0)
    assert codes == {1: [], 2: []}
    assert "taskmanager 1 ended by signal 9, another one takes its place" in caplog.text
    assert "taskmanager 2 ended by signal 11" in caplog.text


async def test_nothing_is_replaced_while_the_cluster_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[int] = []
    stopping = False

    def start(number: int) -> subprocess.Popen[bytes]:
        nonlocal stopping
        started.append(number)
        stopping = True
        return cast("subprocess.Popen[bytes]", EndedProcess(-9))

    async with asyncio.timeout(60):
        await keep_running(start, 1, lambda: stopping, lambda: 0.0)
    assert started == [1]
    assert not caplog.text  # No replacement is announced, or waited for.


async def test_process_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_cluster, "FIRST_S", 0.001)
    tries: list[int] = []

    def start(number: int) -> subprocess.Popen[bytes]:
        tries.append(number)
        if len(tries) == 1:
            raise OSError("no memory")
        return cast("subprocess.Popen[bytes]", EndedProcess(0))

    async with asyncio.timeout(60):
        await keep_running(start, 1, lambda: False, lambda: 0.0)
    assert tries == [1, 1]
