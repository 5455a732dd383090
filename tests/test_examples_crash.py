"""Examples with state survive a kill: what their streams give is the same."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from aioflow.testing import crash_and_restore

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("example", "stream"),
    [("dedup", "once"), ("fraud_alerts", "alerts"), ("sessions", "visits"), ("joins", "in_time")],
)
def test_example_gives_the_same_after_a_kill(
    example: str, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(example)
    run = crash_and_restore(getattr(module, stream), here=2, every="10ms")
    assert len(run.rows) == len(run.expected) >= 2
