"""Writes log records as JSON, one object per line, for systems that collect logs.

The commands set the format up in their own process. Processes that they start read the format from
the environment, because these processes log before they receive any configuration.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from aioflow.core.scope import current_scope
from aioflow.inspection.redaction import redacted

__all__ = ["JSON", "LOG_FORMATS", "LOG_FORMAT_ENV", "TEXT", "JsonFormatter", "configure_logging"]

TEXT, JSON = "text", "json"

LOG_FORMATS = (TEXT, JSON)

LOG_FORMAT_ENV = "AIOFLOW_INHERITED_LOG_FORMAT"
"""Environment variable by which a command gives the format to the processes that it starts.

This is not the setting `AIOFLOW_LOG_FORMAT`, which the workers of `flow.run` must not obey.
"""

_PLACES = ("job", "job_id", "operator", "subtask")


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line with a JSON object.

    The object has `time` (RFC 3339, UTC), `level`, `logger` and `message`. Records logged by code
    of a flow also have `job` (its name), `operator` and `subtask`, as `af.current_scope()` returns
    them. `extra=` of the log call may set these three keys, and `job_id`. `exception` and `stack`
    hold tracebacks as one string. Likely secrets are hidden in all texts.

    The arguments `fmt`, `datefmt`, `style`, `validate` and `defaults` of `logging.Formatter` are
    accepted because `logging.config` passes some of them, but they have no effect.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns `record` as a JSON object without line breaks."""
        fields = {
            "time": _rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(_message(record)),
            **_place(record),
        }
        exception = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        if exception:
            fields["exception"] = redacted(exception)
        if record.stack_info:
            fields["stack"] = redacted(self.formatStack(record.stack_info))
        return json.dumps(fields)


def _message(record: logging.LogRecord) -> str:
    """Returns the message of `record`, even if its arguments do not match its format string, so
    that the line is not lost.
    """
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001  # Of the arguments' own code.
        text = record.msg if isinstance(record.msg, str) else type(record.msg).__name__
        return f"{text} (its arguments cannot be shown: {type(error).__name__})"


def _rfc3339(seconds: float) -> str:
    at = datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _place(record: logging.LogRecord) -> dict[str, str]:
    """Returns the job, operator and subtask that logged the record. Attributes of the record take
    precedence over those of the current scope.
    """
    scope = current_scope()
    found = {
        name: getattr(scope, name, None) if (own := getattr(record, name, None)) is None else own
        for name in _PLACES
    }
    return {name: redacted(str(value)) for name, value in found.items() if value is not None}


def configure_logging(log_format: str | None = None) -> None:
    """Logs records of level INFO and above to stderr, in this process and in the processes that it
    starts later.

    Without `log_format`, the environment variable `LOG_FORMAT_ENV` gives the format. If the program
    has set log handlers, they stay, and no other handler is added.
    """
    chosen = log_format or os.environ.get(LOG_FORMAT_ENV, TEXT)
    os.environ[LOG_FORMAT_ENV] = chosen
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if chosen == JSON
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
