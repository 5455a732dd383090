"""Connects Spark to a service: one Spark session that is called in threads, fast transfer of rows,
and flows that run as Spark jobs.

    from aioflow.spark import SparkBridge
    async with SparkBridge("local[4]") as spark:
        flights = await spark.sql("SELECT * FROM flights WHERE delay > 15")
        print(await spark.call(flights.count))

Importing this package loads neither PySpark nor Java.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioflow.spark.bridge.session import SparkBridge
    from aioflow.spark.failures import SparkError

__all__ = ["SparkBridge", "SparkError"]

_MODULES = {"SparkBridge": "bridge.session", "SparkError": "failures"}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
