"""One JSON object a line, on stderr: what happened, never a key, a signature, a nonce or a link."""

from __future__ import annotations

import json
import logging
import sys
import time

from niss.redaction import redact, safe_traceback

_LOGGER = "niss.tracker"


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "event": redact(record.getMessage()),
        }
        # A reason is what some library said, of an address with its password for example.
        for name, fact in getattr(record, "facts", {}).items():
            entry[name] = redact(fact) if isinstance(fact, str) else fact
        if record.exc_info is not None and record.exc_info[1] is not None:
            # What an exception says could hold a secret.
            entry["traceback"] = safe_traceback(record.exc_info[1]).splitlines()
        return json.dumps(entry, default=str)


def start_logging(level: str) -> None:
    """Send the tracker's log and uvicorn's own to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    for name in (_LOGGER, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())


def log(
    event: str, *, level: int = logging.INFO, error: BaseException | None = None, **facts: object
) -> None:
    """Log an event with its facts."""
    logging.getLogger(_LOGGER).log(level, event, extra={"facts": facts}, exc_info=error)
