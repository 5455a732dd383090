"""conftest.py catches each kind of leak, lets a clean test pass, and sets asyncio's debug mode."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

LEAKING = """
import asyncio
import os
import threading
import pytest

STOP = threading.Event()


async def test_clean_task():
    await asyncio.create_task(asyncio.sleep(0))


async def test_cancelled_task_ends_within_the_grace():
    asyncio.create_task(asyncio.sleep(60)).cancel()


async def test_task():
    globals()["task"] = asyncio.create_task(asyncio.sleep(60), name="forgotten-task")


def test_thread():
    threading.Thread(target=STOP.wait, name="forgotten-thread").start()


def test_release_thread():
    STOP.set()


def test_descriptor():
    os.pipe()


async def test_unretrieved_error():
    async def broken():
        raise ValueError("forgotten-error")

    task = asyncio.create_task(broken())
    await asyncio.sleep(0)
    del task


@pytest.mark.expects_asyncio_errors
async def test_error_that_is_expected():
    asyncio.get_running_loop().call_exception_handler({"message": "on purpose"})
"""


def test_each_kind_of_leak_fails_the_test_that_leaks(pytester: pytest.Pytester) -> None:
    shutil.copy(Path(__file__).parent / "conftest.py", pytester.path / "conftest.py")
    pytester.makepyprojecttoml(
        '[tool.pytest.ini_options]\nasyncio_mode = "auto"\nasyncio_default_fixture_loop_scope = '
        '"function"\n'
        'markers = ["expects_asyncio_errors", "hashseed", "integration", "simulation", '
        '"examples"]\n'
    )
    pytester.makepyfile(test_inner=LEAKING)

    result = pytester.runpytest_subprocess(
        "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:cov"
    )

    # A leak is found at teardown: the test's own verdict stays, the error is added.
    result.assert_outcomes(passed=8, errors=4)
    result.stdout.fnmatch_lines_random(
        [
            "*tasks left pending: *forgotten-task*",
            "*left behind: thread forgotten-thread*",
            "*left behind: descriptor * -> pipe:*; descriptor * -> pipe:*",
            "*left behind: asyncio logged: Task exception was never retrieved*",
        ]
    )


async def test_the_loops_of_tests_are_in_debug_mode_when_the_environment_asks_for_it() -> None:
    usual = asyncio.new_event_loop()
    usual.close()
    assert asyncio.get_running_loop().get_debug() is usual.get_debug()
