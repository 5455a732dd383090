"""Whole services under seeds and faults: each element is committed exactly once, and everything in
the end.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.sweep import ROOT, main
from tests.simulation.workload import ENDLESS
from tests.simulation.world import (
    KINDS,
    LONG_ROUNDS,
    OF_PLACE,
    PLACES,
    RESCALE,
    Settings,
    rescaling,
    run_world,
)

SEEDS_A_TEST = 25
FIRST = range(0, 200, SEEDS_A_TEST)


@pytest.mark.parametrize("first", FIRST)
def test_everything_is_committed_exactly_once_after_any_fault(first: int) -> None:
    """R1, R2, R6, R8, R10, R11, R13, R14, R16, R18, R19, R20, R22, R32: 25 seeds a test, in one
    process, with workers and on clusters.
    """
    for seed in range(first, first + SEEDS_A_TEST):
        run_world(seed)


@pytest.mark.parametrize(("place", "seeds"), [("one", 25), ("workers", 6), ("cluster", 3)])
def test_a_job_that_is_rescaled_again_and_again_commits_everything_once(
    place: str, seeds: int
) -> None:
    """Also while checkpoints are taken, tasks fail, processes are killed and disks are slow."""
    done: Counter[str] = Counter()
    for seed in range(7000, 7000 + seeds):
        done += run_world(seed, settings=rescaling(seed, place)).faults
    assert done[RESCALE] >= seeds // 2


@pytest.mark.parametrize(("place", "seeds"), [("one", 12), ("workers", 3), ("cluster", 2)])
def test_functions_that_go_on_for_ever_are_ended_and_nothing_is_lost(
    place: str, seeds: int
) -> None:
    """They swallow their cancellation. In the service they are closed by force."""
    done: Counter[str] = Counter()
    chosen = (seed for seed in itertools.count() if ENDLESS in Settings.drawn(seed, place).kinds)
    for seed in itertools.islice(chosen, seeds):
        done += run_world(seed, place).faults
    assert done[ENDLESS] >= seeds // 3


def test_a_paused_holder_that_creates_an_old_number_again_harms_nothing() -> None:
    """Its metadata stands behind a higher number, and names state that was removed."""
    run_world(6064)


@pytest.mark.parametrize(("place", "seeds"), [("one", 40), ("workers", 32), ("cluster", 20)])
def test_every_kind_of_fault_strikes(place: str, seeds: int) -> None:
    done: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for seed in range(1000, 1000 + seeds):
        outcome = run_world(seed, place)
        done += outcome.faults
        met.update(outcome.faults.keys())
    assert {*(KINDS if place == "one" else ()), *OF_PLACE[place]} <= done.keys()
    assert max(met.values()) < seeds, "each seed lacks some kinds"


def test_seeds_choose_among_all_places_and_few_choose_a_long_world() -> None:
    drawn = [Settings.drawn(seed) for seed in range(2000)]
    assert {settings.place for settings in drawn} == PLACES.keys()
    assert 0 < sum(settings.long for settings in drawn) < 20


@pytest.mark.parametrize("place", ["one", "workers"])
def test_memory_of_a_service_does_not_grow_in_ten_minutes_of_faults(place: str) -> None:
    """R46: each calm completes checkpoints, and holds no more than
    the first.
    """
    seed = next(seed for seed in range(3000, 10_000) if Settings.drawn(seed, place).long)
    outcome = run_world(seed, place)
    assert outcome.virtual_s > 400
    assert outcome.checkpoints > 2 * LONG_ROUNDS


def test_the_same_seed_takes_the_same_way_in_another_process_with_another_hash_seed() -> None:
    """100 seeds, in two fresh processes: what pytest registers in its own travels with a job."""
    program = (
        "import json, sys; from tests.simulation.world import run_world; "
        "json.dump([[o.trace_crc, o.steps] for o in map(run_world, range(100))], sys.stdout)"
    )
    command = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "4711")
    ]
    ways = []
    for process in processes:
        with process:
            assert process.stdout is not None
            ways.append(json.load(process.stdout))
        assert process.returncode == 0
    assert ways[0] == ways[1]


def test_a_failure_is_printed_with_its_seed_and_commit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(seed: int, place: str | None) -> None:
        raise AssertionError("lost")

    monkeypatch.setattr("tests.simulation.sweep.run_world", fails)
    assert main(["--seeds", "7:8", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "seed 7 at commit" in said
    assert "AssertionError: lost" in said
    assert "--seeds 7:8" in said


def test_a_world_in_which_something_never_comes_back_is_a_failure_like_any_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end the sweep.

    Workers of a sweep are fresh processes: a loop in one of them would hold all that follow.
    """

    def lost_in_here(row: object) -> object:
        while True:
            pass

    monkeypatch.setattr("tests.simulation.world.CALLBACK_S", 0.3)
    monkeypatch.setattr("tests.simulation.workload.window_row", lost_in_here)
    assert main(["--seeds", "2:3", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "seed 2 at commit" in said
    assert "is not over after 0.3 s of processor time" in said
    assert "in lost_in_here" in said
    assert "1 failed" in said
