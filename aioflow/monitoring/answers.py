"""Bodies as they go out: JSON of plain values, and errors in Flink's shape."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from aiohttp import web

__all__ = ["error_response", "json_bytes", "json_response"]

_encoder = msgspec.json.Encoder()


def json_bytes(body: Any) -> bytes:
    """`body` as JSON. Text that is no UTF-8, as names of users may be, is escaped."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, separators=(",", ":")).encode("ascii")


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=json_bytes(body), status=status, content_type="application/json", charset="utf-8"
    )


def error_response(status: int, *messages: str) -> web.Response:
    """`{"errors": [...]}`, which every client of Flink's REST expects."""
    return json_response({"errors": list(messages)}, status)
