"""Which tests run on which version of Spark: `make sparks` runs them on each."""

from __future__ import annotations

from typing import Any

import pytest

from aioflow.spark.versions import Feature, installed_version

__all__ = ["since"]


def since(feature: Feature) -> Any:
    """Leaves a test out on versions that lack `feature`. `test_versions` tests the refusal."""
    return pytest.mark.skipif(
        installed_version() < feature.first,
        reason=f"{feature.what} is refused before Spark {'.'.join(map(str, feature.first))}",
    )
