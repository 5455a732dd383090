"""Collects the routes that handlers declare into a list. The router, the OpenAPI document and the
tests use it.

Invariant: a fixed path comes before the paths that have a parameter in the same segment. The
OpenAPI document is made from the list, so it describes every route that is served.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import aioflow
from aioflow.monitoring import (
    data_views,
    events,
    rest_checkpoints,
    rest_cluster,
    rest_jobs,
    rest_metrics,
    rest_probes,
    rest_vertices,
)
from aioflow.monitoring.answers import ROUTES_OF, Route
from aioflow.monitoring.schemas import BODIES, SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflow.monitoring.answers import Route

__all__ = ["ROUTES", "openapi_document"]

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
                rest_probes,
                rest_vertices,
            )
            for handler in vars(module).values()
            for route in getattr(handler, ROUTES_OF, ())
            if handler.__module__ == module.__name__
        ),
        key=lambda route: [part.startswith("{") for part in route.path.split("/")],
    )
)


PARAMETERS = {
    "jobid": ("id of a job", {"type": "string", "pattern": "^[0-9a-f]{32}$"}),
    "vertexid": ("id of a vertex", {"type": "string", "pattern": "^[0-9a-f]{32}$"}),
    "triggerid": ("id of a request", {"type": "string", "pattern": "^[0-9a-f]{32}$"}),
    "subtaskindex": ("number of a subtask, from 0", {"type": "integer", "minimum": 0}),
    "attempt": ("number of an attempt, from 0", {"type": "integer", "minimum": 0}),
    "checkpointid": ("number of a checkpoint", {"type": "integer", "minimum": 0}),
    "taskmanagerid": ("id of a process", {"type": "string"}),
    "operator": ("uid or name of an operator", {"type": "string"}),
    "name": ("name of a state", {"type": "string"}),
}

CONTENT_TYPES = {"Text": "text/plain", "Events": "text/event-stream"}

ERRORS = {
    "400": "The call makes no sense",
    "401": "The token is missing",
    "403": "Not allowed, or not from there",
    "404": "There is no such thing",
    "409": "Not in this state",
    "413": "The body is too large",
    "503": "Not now",
}


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Returns the OpenAPI document of `routes`. Its version is 3.0, which most tools can read."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "aioflow monitoring",
            "version": aioflow.__version__,
            "description": "Flink's REST API over aioflow. Every path is also there under /v1.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                name: _as_openapi(schema) for name, schema in (*SCHEMAS.items(), *BODIES.items())
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", route.path)
    parameters = [_parameter(name) for name in names]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in route.query
    ]
    content_type = CONTENT_TYPES.get(route.schema, "application/json")
    answers: dict[str, Any] = {
        str(route.status): {
            "description": route.summary,
            "content": {content_type: {"schema": {"$ref": f"#/components/schemas/{route.schema}"}}},
        }
    }
    for status, description in ERRORS.items():
        answers[status] = {
            "description": description,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Errors"}}},
        }
    operation: dict[str, Any] = {
        "summary": route.summary,
        "parameters": parameters,
        "responses": answers,
    }
    if route.body:
        operation["requestBody"] = {
            "required": False,
            "content": {
                "application/json": {"schema": {"$ref": f"#/components/schemas/{route.body}"}}
            },
        }
    # A reading call may need the token too, if other machines can call.
    operation["security"] = [{"token": []}] if route.method != "GET" else [{}, {"token": []}]
    if route.is_probe:
        operation["security"] = [{}]
        answers["503"] = {"description": "Not ready", "content": answers["200"]["content"]}
    return operation


def _parameter(name: str) -> dict[str, Any]:
    description, schema = PARAMETERS[name]
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": schema,
    }


def _as_openapi(schema: Any) -> Any:
    """Converts a JSON Schema to OpenAPI 3.0, which has `nullable` instead of the type "null"."""
    if isinstance(schema, list):
        return [_as_openapi(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    choices = schema.get("anyOf")
    if choices and {"type": "null"} in choices:
        (only,) = [one for one in choices if one != {"type": "null"}]
        return {"allOf": [_as_openapi(only)], "nullable": True}
    return {name: _as_openapi(value) for name, value in schema.items()}
