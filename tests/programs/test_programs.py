"""Drawn programs give what the model says, in every way that they are run.

`make hunt` draws more; those that found something stay here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import aioflow as af
from tests.programs.draw import ODD, draw
from tests.programs.hunt import shrunk
from tests.programs.kept import KEPT
from tests.programs.pieces import plain
from tests.programs.program import Program
from tests.programs.run import Difference, build_of, check
from tests.programs.sinks import WRITTEN, Written

GROUP = 10
SEEDS = range(0, 240, GROUP)
SLOW_SEEDS = range(240, 360, GROUP)


@pytest.mark.parametrize("first", SEEDS)
def test_programs_give_what_the_model_says(first: int) -> None:
    for seed in range(first, first + GROUP):
        program = draw(seed)
        for way in ("plainly", "simulated" if seed % 2 else "otherwise"):
            check(program, way)
        if program.columnar:
            check(program, "on_columns")


@pytest.mark.slow
@pytest.mark.parametrize("first", SLOW_SEEDS)
def test_programs_give_it_over_restarts_and_restores(first: int) -> None:
    for seed in range(first, first + GROUP):
        check(draw(seed), "restarted" if seed % 2 else "restored")


@pytest.mark.slow
@pytest.mark.parametrize(("place", "seeds"), [("one", 10), ("workers", 5), ("cluster", 3)])
def test_programs_give_it_on_machines_that_fail(place: str, seeds: int) -> None:
    kills = 0
    for seed in range(500, 500 + seeds):
        kills += check(draw(seed), f"in_world_of_{place}").kills
    assert kills


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 404))
def test_programs_give_it_over_worker_processes(seed: int) -> None:
    check(draw(seed), "over_workers")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers of a program in /proc")
@pytest.mark.parametrize("way", ["killed", "rescaled_workers", "died"])
@pytest.mark.parametrize("seed", range(400, 402))
def test_programs_give_it_while_processes_are_killed_or_change(seed: int, way: str) -> None:
    check(draw(seed), way)


@pytest.mark.parametrize("name", KEPT)
def test_a_program_that_found_something_does_not_differ_any_more(name: str) -> None:
    way, program = KEPT[name]
    check(program, way)


def differs(program: Program) -> bool:
    try:
        check(program, "plainly")
    except Difference:
        return True
    return False


def test_a_difference_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain model is wrong here: it counts one too many where there are keys."""
    from tests.programs import model

    def wrong(program: Program, step: object, stream: model.Stream) -> model.Stream:
        right = model.running(program, step, stream)  # type: ignore[arg-type]
        return model.replace(right, items=right.items + right.items[:1])

    monkeypatch.setitem(model.STEPS, "running", wrong)
    program = next(
        p
        for p in map(draw, range(1_000))
        if any(p.steps[i].kind == "running" for i in p.outputs)
        # The pairs of this key come from a step before, which cannot be left out.
        and all(step.args.get("key") != "first_key" for step in p.steps)
        and differs(p)
    )
    small = shrunk(program, "plainly")
    assert [step.kind for step in small.steps] == ["source", "running"]
    assert len(small.steps[0].args["rows"]) == 1
    build_of(small)  # It is a program.


@pytest.mark.parametrize("kind", WRITTEN)
async def test_output_of_a_connector_is_read_as_texts(kind: str, tmp_path: Path) -> None:
    flow = af.Flow("written")
    stream = flow.source([*ODD, 'a,"b"\n\r\u2028', "\t"])
    written = Written(str(tmp_path), kind, loose=False)
    written.add([0], [stream])
    await flow.execute()
    assert written.read([0]) == [list(map(plain, [*ODD, 'a,"b"\n\r\u2028', "\t"]))]


def test_values_that_look_alike_are_distinguished() -> None:
    alike = [1, True, 1.0, "1", b"1", (1,), [1], {1}, frozenset([1]), 0.0, -0.0]
    assert len({plain(value) for value in alike}) == len(alike)
    assert plain(float("nan")) == plain(float("nan"))
    assert plain(1, loose=True) == plain(True, loose=True) == plain(1.0, loose=True)
