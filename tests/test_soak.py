"""The soak: its slopes tell growth from noise, and a short one with kills has exact output."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.soak import BOUNDS, Bound, Slope, report, slope_of, slopes_of, soak

HOUR = 3600


def measured(
    slope_per_h: float, *, seconds: int = HOUR, lives: int = 1, noise: float = 1.0, saw: float = 0.0
) -> Slope:
    """Returns values around 100 that rise by this much an hour within each life, with a saw of a
    minute on them.
    """
    rng = np.random.default_rng(3)
    points = []
    for second in range(seconds):
        life = second * lives // seconds
        since = second - life * seconds // lives
        value = (
            100
            + 20 * life
            + slope_per_h * since / HOUR
            + saw * (second % 60) / 60
            + rng.normal(0, noise)
        )
        points.append((float(second), life, value))
    return slope_of(points, np.random.default_rng(7))


@pytest.mark.parametrize("slope", [-20.0, 0.0, 3.0, 20.0])
def test_the_slope_is_found_within_three_errors(slope: float) -> None:
    for found in (measured(slope), measured(slope, lives=6), measured(slope, saw=10.0)):
        assert abs(found.slope - slope) <= 3 * found.error + 0.2


def test_level_at_the_start_of_each_life_is_no_slope() -> None:
    assert not measured(0.0, lives=6).rises(Bound(1.0))


def test_a_rise_above_the_bound_is_distinguished_from_one_below_and_from_noise() -> None:
    assert measured(20.0).rises(Bound(5.0))
    assert not measured(20.0).rises(Bound(5.0, part=0.2))
    assert not measured(20.0, noise=200.0, seconds=600).rises(Bound(5.0))


def test_outliers_do_not_make_a_slope() -> None:
    points = [(float(second), 0, 1_000.0 if second > 3_500 else 5.0) for second in range(HOUR)]
    assert slope_of(points, np.random.default_rng(7)).slope == 0


def test_too_few_points_say_nothing() -> None:
    assert not slope_of([(0.0, 0, 1.0), (10.0, 0, 100.0)], np.random.default_rng(7)).rises(
        Bound(0.0)
    )
    assert not slope_of([], np.random.default_rng(7)).rises(Bound(0.0))


def samples(seconds: int, **slopes_per_s: float) -> list[dict[str, float]]:
    """Returns samples of one life with a kill each minute, which makes the first ten seconds
    slow.
    """
    found = []
    for second in range(seconds):
        sample = {"at": float(second), "life": 1, "worker": 17, "since_kill": float(second % 60)}
        for name in BOUNDS:
            slow = 1_000.0 if BOUNDS[name].quiet and second % 60 < 10 else 0.0
            sample[name] = 100.0 + slow + (second % 7) / 7 + slopes_per_s.get(name, 0.0) * second
        found.append(sample)
    return found


@pytest.mark.parametrize("name", BOUNDS)
def test_each_series_that_grows_is_named_and_no_other(name: str, tmp_path: Path) -> None:
    rows = samples(1_200, **{name: 0.05})
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    verdict = report(tmp_path, 19, ["2 missing"])
    assert verdict["rising"] == [name]
    assert verdict["mistakes"] == ["2 missing"]
    assert json.loads((tmp_path / "slopes.json").read_text())["series"][name]["rises"]
    for series in BOUNDS:
        ElementTree.parse(tmp_path / f"{series}.svg")


def test_seconds_of_recovery_do_not_count_for_latency() -> None:
    found = slopes_of(samples(600))
    assert found["p99_ms"].median < 102
    assert found["fds"].points == 54  # Without the first minute.
    assert found["rss_mb"].points == 30  # Without the first five.


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("workers", [0, 2])
async def test_a_short_soak_with_kills_has_exact_output_and_samples_of_everything(
    workers: int, tmp_path: Path
) -> None:
    kills, wrong = await soak(
        tmp_path, seconds=20, workers=workers, kill_every_s=8, rate=300, seed=7
    )
    assert kills >= 1
    assert wrong == []
    verdict = report(tmp_path, kills, wrong, warm_up_s=3)
    assert verdict["checkpoints"] > 1
    assert verdict["rising"] == []
    seen = {name for name, row in verdict["series"].items() if row["median"] > 0}
    assert seen >= {name for name in BOUNDS if workers or not name.startswith("worker_")} - {
        "p50_ms",
        "p99_ms",
        "checkpoint_ms",
    }
