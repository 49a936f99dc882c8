"""Processes that are all taken down again, with whatever they start in turn.

Flower's processes start others in sessions of their own, which no process group holds together. Each process is
therefore started with a mark in its environment, which all its descendants inherit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from niss.errors import NissError

_MARK = "NISS_PROCESS"


@dataclass
class Started:
    """A process, its name for people, and where its output goes."""

    name: str
    mark: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def require_running(self) -> None:
        """Raise if it ended by itself, with its last words."""
        if not self.running:
            raise NissError(
                f"{self.name} ended with status {self.process.returncode}\n{self.last_words()}",
                hint=f"its output is in {self.log}",
            )

    def last_words(self, lines: int = 15) -> str:
        """The end of what it said."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


class Processes:
    """Starts processes and ends all of them, and their children, when the block is left for whatever reason.

    On systems without /proc the marks cannot be read; there the process groups must do.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs, self._environment = logs, dict(environment)
        self.started: list[Started] = []

    def start(self, name: str, command: Sequence[str | Path], *, cwd: Path | None = None) -> Started:
        log, mark = self._logs / f"{name}.log", uuid4().hex
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment | {_MARK: mark},
                cwd=cwd,
                start_new_session=True,
            )
        one = Started(name, mark, process, log)
        self.started.append(one)
        return one

    def stop(self, one: Started, *, grace: float = 10.0) -> None:
        """End one process and its children: first asked, then made to."""
        _signal(one, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(grace)
        self.kill(one)

    def kill(self, one: Started) -> None:
        """End one process and its children at once, as a power failure would."""
        _signal(one, signal.SIGKILL)
        one.process.wait()
        _signal(one, signal.SIGKILL)  # What was born in between.
        if one in self.started:
            self.started.remove(one)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ours = list(self.started)
        # A second Ctrl-C would leave processes behind.
        with _ignored(signal.SIGINT):
            for one in reversed(ours):
                _signal(one, signal.SIGTERM)
            end = time.monotonic() + 10.0
            for one in ours:
                with suppress(subprocess.TimeoutExpired):
                    one.process.wait(max(0.0, end - time.monotonic()))
            for one in ours:
                self.kill(one)


class _ignored:
    """A signal that is ignored for a while; only the main thread can say so."""

    def __init__(self, number: signal.Signals) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._before = None
        with suppress(ValueError):
            self._before = signal.signal(self._number, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(self._number, self._before)


def _signal(one: Started, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(one.process.pid, number)
    for descendant in marked(one.mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(descendant, number)


def marked(mark: str) -> list[int]:
    """Living processes that were started with this mark, directly or not."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found
