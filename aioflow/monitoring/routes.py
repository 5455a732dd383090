"""Collects the routes that handlers declare. The router, the OpenAPI document and the tests use the
list.

Invariant: a fixed path stands before those with a parameter in the same place.
"""

from __future__ import annotations

from aioflow.monitoring import (
    data_views,
    events,
    rest_checkpoints,
    rest_cluster,
    rest_jobs,
    rest_metrics,
    rest_vertices,
)
from aioflow.monitoring.answers import ROUTES_OF, Route

__all__ = ["ROUTES"]

ROUTES: tuple[Route, ...] = tuple(
    sorted(
        (
            route
            for module in (
                data_views,
                events,
                rest_checkpoints,
                rest_cluster,
                rest_jobs,
                rest_metrics,
                rest_vertices,
            )
            for handler in vars(module).values()
            for route in getattr(handler, ROUTES_OF, ())
            if handler.__module__ == module.__name__
        ),
        key=lambda route: [part.startswith("{") for part in route.path.split("/")],
    )
)
