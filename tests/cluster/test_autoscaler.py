"""How many workers a job should have, by tables of samples."""

from __future__ import annotations

from typing import Any

import pytest

import aioflow as af
from aioflow.cluster.autoscaler import SAMPLES, Load, LoadWindow, load_of

OPTIONS = af.Autoscaler(1, 8)


def after_a_window(workers: int, busy: float, behind: int = 0) -> int | None:
    window = LoadWindow(OPTIONS)
    answers = [window.observe(workers, Load(busy, n < behind)) for n in range(SAMPLES)]
    assert answers[:-1] == [None] * (SAMPLES - 1), "it waits for a whole window"
    return answers[-1]


@pytest.mark.parametrize(
    ("workers", "busy", "behind", "wanted"),
    [
        (1, 0.5, 0, None),
        (1, 0.9, 0, 2),
        (2, 1.0, 0, 3),
        (4, 1.0, 0, 6),
        (4, 7.0, 0, 6),
        (8, 1.0, 10, None),
        (4, 0.3, 0, 2),
        (4, 0.3, 1, None),
        (4, 0.3, 10, 5),
        (2, 0.0, 0, 1),
        (1, 0.0, 0, None),
    ],
)
def test_workers_follow_the_load(
    workers: int, busy: float, behind: int, wanted: int | None
) -> None:
    assert after_a_window(workers, busy, behind) == wanted


def test_after_a_change_another_window_has_to_pass() -> None:
    window = LoadWindow(OPTIONS)
    answers = [window.observe(1, Load(1.0, False)) for _ in range(2 * SAMPLES)]
    assert [n for n, answer in enumerate(answers) if answer] == [SAMPLES - 1, 2 * SAMPLES - 1]


def test_a_job_that_needs_its_workers_again_keeps_them_for_longer_each_time() -> None:
    """One worker waits for slow calls, so it is not busy, and yet it is too few."""
    window, workers, changes = LoadWindow(OPTIONS), 1, list[int]()
    for n in range(40 * SAMPLES):
        wanted = window.observe(workers, Load(0.1, is_behind=workers == 1))
        if wanted is not None:
            workers = wanted
            changes.append((n + 1) // SAMPLES)
    assert changes == [1, 2, 3, 5, 6, 10, 11, 19, 20, 36, 37]


def test_a_job_is_patient_no_more_if_fewer_workers_were_enough_for_long() -> None:
    window, workers, changes = LoadWindow(OPTIONS), 2, list[int]()
    for n in range(40 * SAMPLES):
        lots_to_do = n // SAMPLES in (1, 20)
        wanted = window.observe(workers, Load(0.1, is_behind=lots_to_do and workers == 1))
        if wanted is not None:
            workers = wanted
            changes.append((n + 1) // SAMPLES)
    assert changes == [1, 2, 4, 20, 21]


def test_the_load_is_that_of_all_tasks_or_of_the_busiest() -> None:
    flow = af.Flow("load", parallelism=2)
    numbers = flow.source(range(10)).rebalance()
    numbers.map(str, name="a").disable_chaining().map(len, name="b").disable_chaining()
    graph = flow.job_graph()
    metrics = {
        "a (1/2).busyTimeMsPerSecond": 800.0,
        "a (2/2).busyTimeMsPerSecond": 600.0,
        "b (1/2).busyTimeMsPerSecond": 300.0,
        "b (2/2).busyTimeMsPerSecond": 300.0,
    }
    assert load_of(graph, metrics, 1).busy == pytest.approx(2.0)
    assert load_of(graph, metrics, 4).busy == pytest.approx(0.7)
    source = graph.vertices[0].metrics_name(0)
    metrics[f"{source}.backPressuredTimeMsPerSecond"] = 900.0
    assert load_of(graph, metrics, 4).is_behind


@pytest.mark.parametrize(
    "given",
    [{"min": 0, "max": 1}, {"min": 2, "max": 1}, {"min": 1, "max": 2, "target": 0.0},
     {"min": 1, "max": True}, {"min": 1, "max": 2, "window": "0s"}],
)  # fmt: skip
def test_an_autoscaler_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Autoscaler"):
        af.Autoscaler(**given)


async def test_an_autoscaler_needs_checkpoints() -> None:
    flow = af.Flow("none")
    flow.source([1]).sink(af.io.blackhole())
    with pytest.raises(ValueError, match="checkpoints="):
        await flow.execute(workers=af.Autoscaler(1, 2))
