"""A pytest plugin for runs with a planted bug: the first counterexample will do, nobody reads
the smallest.
"""

from __future__ import annotations

import hypothesis
import pytest


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """After the profile of conftest.py, before any test module is read."""
    hypothesis.settings.register_profile(
        "ablations",
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("ablations")
