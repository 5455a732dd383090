"""The last log records of the engine in this process, kept in memory while a monitor may read them.
No file is ever read for them.
"""

from __future__ import annotations

import logging
import traceback
from collections import deque
from typing import Any

from aioflow.inspection.redaction import redacted

__all__ = ["RECORDS_MAX", "LogTail"]

RECORDS_MAX = 1_000
MESSAGE_CHARACTERS_MAX = 4_000
LOGGER = "aioflow"


class LogTail(logging.Handler):
    """Attached between `start` and `stop`.

    It changes no level: records that the program does not log are missing here too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[dict[str, Any]] = deque(maxlen=RECORDS_MAX)
        self._next = 1

    def start(self) -> None:
        logging.getLogger(LOGGER).addHandler(self)

    def stop(self) -> None:
        logging.getLogger(LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self._alone(record):
            # Warnings of a program without handlers go to stderr, but logging counts this handler
            # as one.
            last = logging.lastResort
            if last is not None and record.levelno >= last.level:
                last.handle(record)
        try:
            message = record.getMessage()
            stack = (
                "".join(traceback.format_exception(record.exc_info[1]))
                if record.exc_info and record.exc_info[1]
                else ""
            )
        # As in logging: a record that cannot be formatted must not break the code that logs it.
        except Exception:  # noqa: BLE001
            self.handleError(record)
            return
        self._records.append(
            {
                "number": self._next,
                "time": int(record.created * 1000),
                "level": record.levelname,
                "logger": record.name,
                "message": redacted(message, MESSAGE_CHARACTERS_MAX),
                "stack": redacted(stack, MESSAGE_CHARACTERS_MAX),
            }
        )
        self._next += 1

    def _alone(self, record: logging.LogRecord) -> bool:
        """Whether no other handler gets `record`; of several tails the first answers for all."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        tails = []
        while logger is not None:
            for handler in logger.handlers:
                if not isinstance(handler, LogTail):
                    return False
                tails.append(handler)
            logger = logger.parent if logger.propagate else None
        return tails[:1] == [self]

    def after(self, number: int, level: int, most: int) -> list[dict[str, Any]]:
        """The newest `most` records after `number`, oldest first."""
        found = [
            one
            for one in list(self._records)
            if one["number"] > number and logging.getLevelName(one["level"]) >= level
        ]
        return found[-most:] if most else []
