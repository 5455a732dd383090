"""What all tests of connectors share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are away at the start of a job are not waited for."""
    monkeypatch.setattr("aioflow.io.backoff.START_PATIENCE_S", 0.0)
