"""The log: a JSON object on each line of the standard error, never with a text of a request."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LOGGERS = ("bertkit.serve", "uvicorn.error")


class JsonLines(logging.Formatter):
    """Time, level, event, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def write_log(*, requests: bool = True) -> None:
    """Let the server's loggers write to the standard error.

    Args:
        requests: whether every request gets a line; else only trouble does.
    """
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(JsonLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [out], False
        logger.setLevel(logging.INFO if requests else logging.WARNING)
