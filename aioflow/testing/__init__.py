"""Test tools for users and for the project: a harness for one operator, simulation of whole flows
by seed, a test that kills and restarts a flow, and pytest fixtures.

Names are loaded when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflow.task.mutation import ValueMutated
    from aioflow.testing.crashing import CrashedRun, crash_and_restore
    from aioflow.testing.fault_proxy import FaultProxy
    from aioflow.testing.harness import HarnessSnapshot, ManualClock, OperatorHarness, Timer
    from aioflow.testing.simulated import SimulatedRun, run_simulated
    from aioflow.testing.simulation.faults import Faults
    from aioflow.testing.simulation.host import SimulatedHost
    from aioflow.testing.simulation.process import SimDeadlock, SimFenceBroken, SimLivelock
    from aioflow.testing.simulation.run import SimResult, simulate
    from aioflow.testing.simulation.transport import NetworkOptions

__all__ = [
    "CrashedRun",
    "FaultProxy",
    "Faults",
    "HarnessSnapshot",
    "ManualClock",
    "NetworkOptions",
    "OperatorHarness",
    "SimDeadlock",
    "SimFenceBroken",
    "SimLivelock",
    "SimResult",
    "SimulatedHost",
    "SimulatedRun",
    "Timer",
    "ValueMutated",
    "crash_and_restore",
    "run_simulated",
    "simulate",
]

_MODULES = {
    "crash_and_restore": "aioflow.testing.crashing",
    "CrashedRun": "aioflow.testing.crashing",
    "OperatorHarness": "aioflow.testing.harness",
    "HarnessSnapshot": "aioflow.testing.harness",
    "ManualClock": "aioflow.testing.harness",
    "Timer": "aioflow.testing.harness",
    "ValueMutated": "aioflow.task.mutation",
    "run_simulated": "aioflow.testing.simulated",
    "SimulatedRun": "aioflow.testing.simulated",
    "FaultProxy": "aioflow.testing.fault_proxy",
    "simulate": "aioflow.testing.simulation.run",
    "SimResult": "aioflow.testing.simulation.run",
    "SimulatedHost": "aioflow.testing.simulation.host",
    "Faults": "aioflow.testing.simulation.faults",
    "NetworkOptions": "aioflow.testing.simulation.transport",
    "SimDeadlock": "aioflow.testing.simulation.process",
    "SimFenceBroken": "aioflow.testing.simulation.process",
    "SimLivelock": "aioflow.testing.simulation.process",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
