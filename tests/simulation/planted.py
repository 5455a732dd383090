"""Bugs that the simulated world must find: a sweep that cannot find them proves nothing.

    python -m tests.simulation.planted "a checkpoint is taken before the last barrier" --max 5000

Plants one bug in this process, as its module is imported, and runs seeds until one finds it. Most
are among those of `tests.ablations`, where a test of the very module finds them; here it is a whole
service that goes wrong.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.ablations.mutants import MUTANTS
from tests.ablations.runner import ROOT, Mutant

__all__ = ["FOUND", "LIVENESS", "SAFETY", "WORLD_MUTANTS", "main", "mutant_named"]

SEEDS_MAX = 5000
NOT_FOUND = 2

WORLD_MUTANTS: list[Mutant] = [
    Mutant(
        "calls that are under way are not in the checkpoint",
        "aioflow/operators/async_io.py",
        "get_list_state(IN_FLIGHT).update(in_flight)",
        "get_list_state(IN_FLIGHT).update([])",
        (),
    ),
    Mutant(
        "a finished subtask counts with what was the newest checkpoint then",
        "aioflow/checkpoint/coordinator.py",
        "        self._finished[self._uids[attempt.vertex_id], attempt.subtask_index] = None\n",
        "        stale = (self._uids[attempt.vertex_id], attempt.subtask_index)\n"
        "        self._finished[stale] = None\n"
        "        last = self.latest and self.latest.subtasks.get(stale)\n"
        "        fresh = self._finished_state\n"
        "        self._finished_state = lambda s: replace(last, finished=True) if last and s == "
        "stale else fresh(s)\n",
        (),
    ),
    Mutant(
        "a task does not wait for the final checkpoint",
        "aioflow/task/checkpointing.py",
        "            self._first_after_end is not None\n",
        ("            True\n            or self._first_after_end is not None\n"),
        (),
    ),
    Mutant(
        "a sink keeps nothing of what it prepared in the checkpoint",
        "aioflow/operators/sink.py",
        (
            "        state.get_list_state(COMMITTABLES).update(\n"
            "            [[id_, one] for id_, prepared in self._prepared.items() for one in "
            "prepared]\n"
            "        )\n"
        ),
        "        state.get_list_state(COMMITTABLES).update([])\n",
        (),
    ),
    Mutant(
        "a commit whose reply is lost is given up",
        "aioflow/operators/sink.py",
        "                if tries == retry.attempts:\n                    raise\n",
        "                if tries:\n                    return\n",
        (),
    ),
    Mutant(
        "the oldest checkpoint in the store is the newest",
        "aioflow/checkpoint/store.py",
        (
            "        numbers = sorted(\n"
            '            {*savepoints, *await self._numbers("checkpoints")}.difference(left), '
            "reverse=True\n"
            "        )\n"
        ),
        "        numbers = sorted({*savepoints, *await "
        'self._numbers("checkpoints")}.difference(left))\n',
        (),
    ),
    Mutant(
        "savepoints are passed over when a job begins",
        "aioflow/checkpoint/store.py",
        (
            "        numbers = sorted(\n"
            '            {*savepoints, *await self._numbers("checkpoints")}.difference(left), '
            "reverse=True\n"
            "        )\n"
        ),
        '        numbers = sorted(await self._numbers("checkpoints"), reverse=True)\n',
        (),
    ),
    Mutant(
        "what was on its way when a connection broke is not sent again",
        "aioflow/protocol/producer.py",
        "        outlet.unsent.extendleft(reversed(outlet.kept))\n",
        "",
        (),
    ),
    Mutant(
        "a buffer that is free again counts twice",
        "aioflow/protocol/credit.py",
        "        self._exclusive_ready += 1\n",
        "        self._exclusive_ready += 2\n",
        (),
    ),
    Mutant(
        "a final checkpoint that failed is not tried again",
        "aioflow/checkpoint/request_decider.py",
        "            self._final, self._final_at_s = _Final.AHEAD, now.s + FINAL_RETRY_S\n",
        "            self._final_at_s = now.s + FINAL_RETRY_S\n",
        (),
    ),
    Mutant(
        "a restart waits for ever",
        "aioflow/cluster/job_master.py",
        "        await asyncio.sleep(delay_s)\n        if self._begins_with is not None:\n",
        "        await asyncio.sleep(delay_s * 1e6)\n        if self._begins_with is not None:\n",
        (),
    ),
    Mutant(
        "a task does not hear that it is cancelled",
        "aioflow/cluster/task_executor.py",
        "        if execution is not None:\n            execution.cancel()\n",
        "        return\n",
        (),
    ),
    Mutant(
        "a mailbox that has mail drops control mail",
        "aioflow/mailbox/processor.py",
        "                self.mailbox.put(mail)\n            else:\n                "
        "put_threadsafe(self.mailbox, self.loop, mail)\n",
        "                if not self.mailbox.has_mail:\n                    "
        "self.mailbox.put(mail)\n",
        (),
    ),
    Mutant(
        "a lease that is given back stays held",
        "aioflow/cluster/job_checkpoints.py",
        "            await self._lease.release()\n",
        "            pass\n",
        (),
    ),
    Mutant(
        "a checkpoint after the first is never due",
        "aioflow/checkpoint/request_decider.py",
        "            self._periodic_at_s = now.s + self._options.interval_ms / 1000\n\n    def "
        "completed",
        "            self._periodic_at_s = now.s + 1e6\n\n    def completed",
        (),
    ),
    Mutant(
        "who waits for a savepoint does not hear that it is complete",
        "aioflow/cluster/job_checkpoints.py",
        "            waiting.set_result(checkpoint)\n",
        "            pass\n",
        (),
    ),
    Mutant(
        "list state loses what does not divide evenly when the parallelism changes",
        "aioflow/state/operator_state.py",
        "                size = base + 1 if i < extra else base\n",
        "                size = base\n",
        (),
    ),
    Mutant(
        "splits that are dealt out to another parallelism begin at their beginning",
        "aioflow/checkpoint/assignment.py",
        "                dealt[number % parallelism].append(split)\n",
        "                dealt[number % parallelism].append(SplitState(split.id, None, "
        "split.payload, split.watermark, split.finished))\n",
        (),
    ),
    Mutant(
        "timers of the clock are not restored",
        "aioflow/state/timers.py",
        "        self._event, self._processing = event, processing\n",
        "        self._event = event\n",
        (),
    ),
    Mutant(
        "what is being committed is missing in the next checkpoint",
        "aioflow/operators/sink.py",
        "            [[id_, one] for id_, prepared in self._prepared.items() for one in "
        "prepared]\n",
        (
            "            [\n"
            "                [id_, one]\n"
            "                for id_, prepared in self._prepared.items()\n"
            "                if id_ > self._confirmed\n"
            "                for one in prepared\n"
            "            ]\n"
        ),
        (),
    ),
    Mutant(
        "event time is that of the fastest channel",
        "aioflow/operators/valve.py",
        "        lowest = min(self._held)\n",
        "        lowest = max(held for held in self._held if held < MAX_WATERMARK) if "
        "min(self._held) < MAX_WATERMARK else MAX_WATERMARK\n",
        (),
    ),
    Mutant(
        "a sink that has committed is taken to be at it",
        "aioflow/operators/sink.py",
        "            self._committing = False\n            self._show_state()\n",
        "            self._show_state()\n",
        (),
    ),
    Mutant(
        "channels are not requested again on a new connection",
        "aioflow/protocol/consumer.py",
        "        for inlet in self._inlets.values():\n            self._ask(inlet)\n",
        "",
        (),
    ),
]
"""Bugs that no single module can show."""

SAFETY: dict[str, int] = {
    "a buffer that is free again counts twice": 0,
    "a channel whose barrier was overtaken is not kept": 43,
    "a checkpoint is acknowledged before it is written": 0,
    "a checkpoint is taken before the last barrier": 140,
    "a commit whose reply is lost is given up": 2,
    "a completed checkpoint commits its own and not those before it": 1,
    "a deleted timer fires": 1,
    "a file that a subsumed checkpoint shares is deleted with it": 2,
    "a finished subtask counts with what was the newest checkpoint then": 209,
    "a finished subtask is forgotten by later checkpoints": 52,
    "a frame of foreign key groups is restored": 50,
    "a job that has finished writes everything again": 0,
    "a key that is gone is not in the increment": 31,
    "a restart begins with empty state": 4,
    "a second job does not wait to see whether the first one lives": 79,
    "a sink commits before the checkpoint is complete": 0,
    "a sink keeps nothing of what it prepared in the checkpoint": 7,
    "a source that was stopped has come to its end": 9,
    "a split that is found again is handed out again": 12,
    "a split that was found later is not in the checkpoint": 12,
    "a split that was read to its end is forgotten by the second checkpoint": 114,
    "a subtask misses the key groups at the end of its range": 1,
    "a task does not wait for the final checkpoint": 0,
    "a task ends without waiting for its last checkpoint": 0,
    "a timer is not in the checkpoint": 1,
    "a timer sees the key of the record before": 0,
    "a timer that has fired is in the checkpoint": 54,
    "a watermark overtakes what is in flight": 2,
    "a window that is gone is not in the increment": 16,
    "an event overtakes the records before it": 0,
    "calls that are under way are not in the checkpoint": 1,
    "committables that are not confirmed are left out of the next checkpoint": 9,
    "data in flight is not dealt out by key": 91,
    "event time is that of the fastest channel": 0,
    "event time of a split restarts after a restore": 65,
    "list state loses what does not divide evenly when the parallelism changes": 67,
    "restored committables are not committed": 1,
    "savepoints are passed over when a job begins": 5,
    "splits that are dealt out to another parallelism begin at their beginning": 29,
    "stopping without drain finishes all the same": 17,
    "tasks are told before the metadata is durable": 0,
    "the oldest checkpoint in the store is the newest": 5,
    "the position of a source is read behind the next poll": 6,
    "timers are not deduplicated": 0,
    "timers that fire while their file is written are not in it": 4,
    "timers of the clock are not restored": 1,
    "what a barrier overtakes in the output is kept twice": 17,
    "what a barrier overtakes in the output is not kept": 17,
    "what a barrier overtook is not kept": 43,
    "what a snapshot still needs is shared with the job that changes it": 13,
    "what is being committed is missing in the next checkpoint": 14,
    "what waits in the chain is not kept": 7,
    "what was on its way when a connection broke is not sent again": 28,
}
"""Bugs that lose, repeat or change records: name, and the seed that found it when this was
written, sweeping from 0.
"""

LIVENESS: dict[str, int] = {
    "a channel that ended is waited for": 0,
    "a checkpoint after the first is never due": 1,
    "a final checkpoint that failed is not tried again": 8,
    "a lease that is given back stays held": 0,
    "a mailbox that has mail drops control mail": 0,
    "a restart waits for ever": 3,
    "a sink that has committed is taken to be at it": 0,
    "a task does not hear that it is cancelled": 2,
    "a worker whose start has failed is not started again": 605,
    "channels are not requested again on a new connection": 28,
    "code that swallows its cancellation is waited for without an end": 575,
    "code that was closed and goes on is waited for": 1255,
    "channels stay blocked when their checkpoint is aborted": 58,
    "who waits for a savepoint does not hear that it is complete": 4,
}
"""Bugs that make a job, or who waits for it, wait for ever, or that leave something behind:
likewise.
"""

FOUND = SAFETY | LIVENESS


def mutant_named(name: str) -> Mutant:
    """Returns the planted bug with this name."""
    return next(mutant for mutant in (*WORLD_MUTANTS, *MUTANTS) if mutant.name == name)


class _Planter(importlib.machinery.SourceFileLoader):
    """Loads a module with a bug in it, and leaves no trace of it on disk."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if path != self.path:
            return data
        return self._mutant.planted(data.decode()).encode()

    # Not from the cache, and not into it.
    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return self.source_to_code(self.get_data(self.path), self.path)


class _Finder(importlib.machinery.PathFinder):
    planted: Mutant

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if (
            spec is not None
            and spec.origin is not None
            and Path(spec.origin) == ROOT / cls.planted.file
        ):
            spec.loader = _Planter(fullname, spec.origin, cls.planted)
        return spec


def plant(mutant: Mutant) -> None:
    """From now on the module is imported with its bug. None of the package may be loaded yet."""
    loaded = [
        name for name in sys.modules if name.partition(".")[0] == "aioflow" and name != "aioflow"
    ]
    assert not any(mutant.file == name.replace(".", "/") + ".py" for name in loaded), (
        f"{mutant.file} is loaded already"
    )
    _Finder.planted = mutant
    sys.meta_path.insert(0, _Finder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.planted",
        description="Plant a bug, and sweep until it is found.",
    )
    parser.add_argument("bug", help="its name")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--max", type=int, default=SEEDS_MAX)
    parser.add_argument("--place", help="only seeds that choose this place for their tasks")
    given = parser.parse_args(argv)
    plant(mutant_named(given.bug))
    from tests.simulation.sweep import sweep_one  # Imports the engine, with the bug.
    from tests.simulation.world import Settings

    for seed in range(given.first, given.first + given.max):
        if given.place not in (None, Settings.drawn(seed).place):
            continue
        _, outcome, error = sweep_one(seed)
        if outcome is None:
            print(f"found at seed {seed}: {error}")
            return 0
    print(f"not found within {given.max} seeds")
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main())
