"""pytest fixtures for flows and their parts. pytest finds this plugin by itself once aioflow is
installed.

    sim_loop        an event loop in virtual time, network included
    flow_harness    makes OperatorHarness objects, and closes them after the test
    fault_proxy     makes TCP proxies that misbehave on demand

pytest imports this plugin at its start, in every project that has aioflow installed. So the plugin
imports nothing but pytest until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from aioflow.testing.fault_proxy import FaultProxy
    from aioflow.testing.harness import OperatorHarness
    from aioflow.testing.simulation.loop import SimLoop

__all__ = ["fault_proxy", "flow_harness", "sim_loop"]


@pytest.fixture
def sim_loop(request: pytest.FixtureRequest) -> Iterator[SimLoop]:
    """A simulated loop with a network: `sim_loop.run_until_complete(...)` runs a coroutine in
    virtual time.

    The seed is 0, or comes from indirect parametrization: `@pytest.mark.parametrize("sim_loop",
    range(9), indirect=True)`.
    """
    from aioflow.testing.simulation.host import Simulation
    from aioflow.testing.simulation.loop import SimLoop

    loop = SimLoop(getattr(request, "param", 0))
    Simulation(loop)
    yield loop
    loop.finish()


@pytest.fixture
def flow_harness() -> Iterator[Callable[..., OperatorHarness]]:
    """`flow_harness(stream_or_fn, key=None, clock=None)` makes an OperatorHarness that is closed
    when the test is over.
    """
    from aioflow.testing.harness import OperatorHarness

    made: list[OperatorHarness] = []

    def make(stream_or_fn: Any, key: Any = None, clock: Any = None) -> OperatorHarness:
        made.append(OperatorHarness(stream_or_fn, key, clock))
        return made[-1]

    yield make
    for harness in reversed(made):
        harness.close()


@pytest.fixture
def fault_proxy() -> Callable[..., FaultProxy]:
    """`async with fault_proxy(port) as proxy:` forwards clients that connect to `proxy.port` to a
    server at `port`.
    """
    from aioflow.core.system_host import SystemHost
    from aioflow.testing.fault_proxy import FaultProxy

    def make(port: int, target_host: str = "127.0.0.1") -> FaultProxy:
        return FaultProxy(SystemHost(), target_host, port)

    return make
