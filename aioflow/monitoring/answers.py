"""Encodes the bodies of answers: JSON of plain values, and errors in Flink's format."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from aiohttp import web

__all__ = ["error_response", "json_bytes", "json_response"]

_encoder = msgspec.json.Encoder()


def json_bytes(body: Any) -> bytes:
    """Returns `body` as JSON. Text that is not valid UTF-8, as users' names may be, is escaped."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode("ascii")


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=json_bytes(body), status=status, content_type="application/json", charset="utf-8"
    )


def error_response(status: int, *messages: str) -> web.Response:
    """Returns an answer `{"errors": [...]}`, which every client of Flink's REST API expects."""
    return json_response({"errors": list(messages)}, status)
