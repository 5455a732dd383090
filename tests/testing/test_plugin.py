"""The pytest plugin: found by its entry point, light, and its fixtures clean up."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

import aioflow as af


def test_flow_harness_makes_harnesses(flow_harness: Any) -> None:
    h = flow_harness(lambda x: x * 2, clock=5)
    h.push(3)
    assert h.take() == [6]
    assert h.now_ms == 5


def test_flow_harness_closes_what_it_made_after_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import aioflow as af
        log = []
        class F(af.MapFunction):
            def map(self, value): return value
            def close(self): log.append("closed")
        def test_first(flow_harness):
            flow_harness(F()).push(1)
            assert log == []
        def test_second():
            assert log == ["closed"]
        """
    )
    options = ("-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    pytester.runpytest_inprocess(*options).assert_outcomes(passed=2)


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    found = [
        entry for entry in entry_points(group="pytest11") if entry.value == "aioflow.testing.plugin"
    ]
    assert [entry.name for entry in found] == ["aioflow"]


def test_the_plugin_imports_nothing_of_the_runtime() -> None:
    """It is loaded in every pytest run of every project that has aioflow installed."""
    script = (
        "import sys, aioflow.testing.plugin; print(sorted(m for m in sys.modules if "
        "m.startswith('aioflow')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert loaded == "['aioflow', 'aioflow.testing', 'aioflow.testing.plugin']"


async def test_flow_harness_works_in_coroutines_too(flow_harness: Any) -> None:
    stream = af.Flow("f").source([1]).map(str)
    h = flow_harness(stream)
    h.push(1)
    assert h.take() == ["1"]
