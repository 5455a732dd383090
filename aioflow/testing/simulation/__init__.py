"""Deterministic simulation: whole clusters in one process, in virtual time, with the faults of real
machines.

    def test_counts_survive_a_kill():
        async def main(host):
            host.sim.spawn("server", serve)
            ...
        assert simulate(main, seed=7).errors == []

One seed gives one history. The engine's code is the same as on a real machine, because it uses only
asyncio and a `Host`.
"""

from aioflow.testing.simulation.disk import SimDisk
from aioflow.testing.simulation.faults import Faults, inject
from aioflow.testing.simulation.host import SimulatedHost, SimulatedProcess, Simulation
from aioflow.testing.simulation.loop import SimLoop
from aioflow.testing.simulation.network import SimNetwork
from aioflow.testing.simulation.process import SimDeadlock, SimFenceBroken, SimLivelock
from aioflow.testing.simulation.run import SimResult, simulate
from aioflow.testing.simulation.transport import NetworkOptions

__all__ = [
    "Faults",
    "NetworkOptions",
    "SimDeadlock",
    "SimDisk",
    "SimFenceBroken",
    "SimLivelock",
    "SimLoop",
    "SimNetwork",
    "SimResult",
    "SimulatedHost",
    "SimulatedProcess",
    "Simulation",
    "inject",
    "simulate",
]
