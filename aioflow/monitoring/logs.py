"""Answers calls for the last log records of a process."""

from __future__ import annotations

import logging
from typing import Any

from aioflow.inspection.log_tail import RECORDS_MAX
from aioflow.monitoring.calls import Answer, BadRequest, Call
from aioflow.monitoring.rest_cluster import find_worker

__all__ = ["tail", "worker_log"]

SHOWN = 200


async def tail(call: Call) -> Any:
    """Answers GET /aioflow/logs?after=&level=&limit= with the last log records."""
    numbers = {}
    for name, otherwise in (("after", 0), ("limit", SHOWN)):
        text = call.query.get(name, str(otherwise))
        if not (text.isascii() and text.isdecimal()) or len(text) > 12:
            raise BadRequest(f"{name} is {text[:40]!r}, expected a number")
        numbers[name] = int(text)
    level = logging.getLevelNamesMapping().get(call.query.get("level", "DEBUG").upper())
    if level is None:
        raise BadRequest(f"level is {call.query['level'][:40]!r}, expected one like WARNING")
    records = await call.monitor.ask(
        call.process, "logs", numbers["after"], level, min(numbers["limit"], RECORDS_MAX)
    )
    return {"records": records}


async def worker_log(call: Call) -> Any:
    """Answers GET /taskmanagers/:taskmanagerid/log with the records kept in memory, as text."""
    records = await call.monitor.ask(find_worker(call).id, "logs", 0, logging.NOTSET, RECORDS_MAX)
    lines = [
        f"{one['time']} {one['level']} {one['logger']}: {one['message']}\n{one['stack']}"
        for one in records
    ]
    return Answer("".join(lines), content_type="text/plain")
