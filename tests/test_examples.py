"""Each example runs as a program of its own, and prints what it says that it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
TIMEOUT_S = 200
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "flight_delays.py")
"""`flight_delays.py` is the demonstration, which has tests of its own."""


def run(name: str) -> list[str]:
    """The lines that the example prints.

    Fails if it ends with an error, or asyncio's debug mode finds one.
    """
    environment = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_every_example_has_a_docstring_a_main_and_fewer_than_180_lines() -> None:
    for path in PROGRAMS:
        text = path.read_text()
        assert text.startswith('"""'), path.name
        assert '\nif __name__ == "__main__":\n' in text, path.name
        assert text.count("\n") < 180, path.name


def test_no_example_imports_what_is_not_public() -> None:
    for path in PROGRAMS:
        assert not re.search(
            r"^\s*(from|import) aioflow\.(?!testing|io)", path.read_text(), re.MULTILINE
        ), path.name


def test_wordcount_agrees_with_a_counter() -> None:
    text = (EXAMPLES / "data" / "genesis.txt").read_text(encoding="utf-8").lower()
    counted = Counter(re.findall(r"[a-z]+(?:’[a-z]+)*", text))
    best = sorted(((n, word) for word, n in counted.items()), reverse=True)[:10]
    assert run("wordcount.py") == [f"{n:5} {word}" for n, word in best]


def test_sessions_are_cut_where_half_an_hour_passed_and_the_late_click_is_not_lost() -> None:
    assert run("sessions.py") == [
        "ann from minute   0 to   6: / /search /docs",
        "ann from minute  50 to  55: / /docs",
        "bob from minute   2 to  49: /pricing /signup /welcome",
        "cid from minute 180 to 180: /",
        "too late: bob /lost",
    ]


def test_dedup_lets_each_payment_pass_once_until_it_is_forgotten() -> None:
    assert run("dedup.py") == [
        "kept:    p1=20 p2=35 p3=5 p1=20",
        "dropped: p1=20 p2=35 p2=35",
    ]


def test_exactly_once_has_every_row_once_although_the_job_failed() -> None:
    assert run("exactly_once.py") == [
        "FINISHED after 1 restart",
        "in the database: ada=100 bob=100 cid=100",
        "in the files:    ada=100 bob=100 cid=100",
        "each count of ada's exactly once: True",
    ]


def test_fraud_alerts_come_for_a_large_payment_within_a_minute_of_a_small_one() -> None:
    assert run("fraud_alerts.py") == [
        "4711: 800.00 only 20 s after a trial payment",
        "9999: 600.00 only 60 s after a trial payment",
    ]


def test_joins_pair_by_window_by_interval_and_in_groups() -> None:
    assert run("joins.py") == [
        "within one window of ten seconds:",
        "  o1 paid 500 of 500",
        "within ten seconds after the order:",
        "  o1 paid 500 of 500 after 2 s",
        "  o2 paid 400 of 900 after 3 s",
        "  o2 paid 500 of 900 after 6 s",
        "not balanced in the first minute:",
        "  o4 owes 70, got 0",
        "  o9 owes 0, got 10",
    ]


def test_rules_are_those_in_force_when_a_payment_was_made_whichever_stream_is_read_first() -> None:
    assert run("rules.py") == [
        "3 s: ann spent 1100 in FR, allowed 1000",
        "6 s: bob spent 600 in FR, allowed 500",
        "9 s: ann spent 50 in US, allowed 40",
    ]


def test_enrichment_asks_again_gives_up_on_what_is_unknown_and_bounds_its_requests() -> None:
    assert run("enrichment.py") == [
        "Apple: 820",
        "Microsoft: 820",
        "Nvidia: 820",
        "????: 40 failed with LookupError",
        "at most 16 requests at once: True",
    ]


def test_batch_inference_calls_the_model_for_many_at_a_time_and_keeps_the_order() -> None:
    assert run("batch_inference.py") == [
        "300 reviews in 5 batches of at most 64",
        "bad: 120",
        "neither: 120",
        "good: 60",
    ]


def test_back_pressure_makes_the_source_follow_the_sink() -> None:
    # A machine that others use as well may give too little to be free: then the picture of the next
    # run counts.
    for _ in range(8):
        shares = {}
        for line in run("back_pressure.py"):
            name, given, stored = re.fullmatch(
                r"(\w+) +source +(\d+)%   sink +(\d+)%", line
            ).groups()  # type: ignore[union-attr]
            shares[name] = (int(given), int(stored))
        assert list(shares) == ["free", "slowed", "released"]
        assert shares["slowed"][1] <= 36
        if (
            min(shares["free"][0], shares["released"][0]) > 1.5 * shares["slowed"][0]
            and shares["slowed"][0] <= shares["slowed"][1] + 10
        ):
            return
    raise AssertionError(f"the source does not follow the sink: {shares}")
