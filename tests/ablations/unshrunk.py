"""A pytest plugin for runs with a planted bug: it does not shrink, since the first counterexample
suffices.
"""

from __future__ import annotations

import hypothesis
import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Runs after the profile of conftest.py, before any test module is read."""
    hypothesis.settings.register_profile(
        "ablations",
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("ablations")
