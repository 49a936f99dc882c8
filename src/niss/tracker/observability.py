"""What the tracker tells about itself: counters for Prometheus, and a log of one JSON object a line on stderr.

The metrics name no client. The log says what happened, never a key, a signature, a nonce or a link.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from niss.redaction import redact, safe_traceback
from niss.tracker.store import Counts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """What this process counted since it started: requests by route and status, and histograms of seconds by route.

    Of several processes on one store, each counts its own requests, while the gauges (clients, prekeys, runs) come
    from the store and are the same in all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer; `route` is the pattern of the path, never the path itself, so that labels stay few."""
        place = next((at for at, bound in enumerate(_BOUNDS) if seconds <= bound), len(_BOUNDS))
        with self._lock:
            self._requests[method, route, status] += 1
            self._buckets.setdefault(route, [0] * (len(_BOUNDS) + 1))[place] += 1
            self._sums[route] = self._sums.get(route, 0.0) + seconds

    def text(self, counts: Counts) -> str:
        """Everything in the text format of Prometheus, version 0.0.4; `counts` are the gauges, from the store."""
        with self._lock:
            requests, sums = dict(self._requests), dict(self._sums)
            buckets = {route: list(numbers) for route, numbers in self._buckets.items()}
        answered = [
            ({"method": method, "route": route, "status": str(status)}, count)
            for (method, route, status), count in sorted(requests.items())
        ]
        text = family("niss_tracker_requests_total", "counter", "Requests answered.", answered)
        name = "niss_tracker_request_seconds"
        lines = [f"# HELP {name} Time to answer.", f"# TYPE {name} histogram"]
        for route, numbers in sorted(buckets.items()):
            below = 0
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), numbers, strict=True):
                below += count
                lines.append(f'{name}_bucket{{route="{_label(route)}",le="{bound}"}} {below}')
            lines.append(f'{name}_sum{{route="{_label(route)}"}} {sums[route]:.6f}')
            lines.append(f'{name}_count{{route="{_label(route)}"}} {below}')
        text += "".join(f"{line}\n" for line in lines)
        for gauge, meaning, value in (
            ("clients_registered", "Clients registered, live or not.", counts.registered),
            ("clients_live", "Clients that can be seated.", counts.live),
            ("prekeys", "One-time keys in stock.", counts.prekeys),
            ("runs", "Runs begun.", counts.runs),
        ):
            text += family(f"niss_tracker_{gauge}", "gauge", meaning, [({}, value)])
        return text


def family(name: str, kind: str, meaning: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> str:
    """One metric in the text format of Prometheus: its name, `gauge` or `counter`, what it means, and its samples."""
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{label}="{_label(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_LOGGER = "niss.tracker"


class _JsonLines(logging.Formatter):
    """A log record as one JSON object; facts and messages pass `redact`, tracebacks show no values of variables."""

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
    """Send the tracker's log and uvicorn's own to stderr, from that level on ("debug", "info", ...)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    for name in (_LOGGER, "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())


def log(
    event: str, *, level: int = logging.INFO, error: BaseException | None = None, **facts: object
) -> None:
    """Log an event with its facts.

    event   what happened, always in the same words, so that it can be searched for
    error   its traceback is logged, without the values of variables
    facts   entries of the JSON object; strings pass `redact`
    """
    logging.getLogger(_LOGGER).log(level, event, extra={"facts": facts}, exc_info=error)
