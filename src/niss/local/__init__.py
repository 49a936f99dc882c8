"""A whole federation on one machine: processes that are all taken down again, with whatever they start in turn.

`deployment` makes keys and configurations and starts, as such processes, what several machines would run (`niss up`).

Flower's processes start others in sessions of their own, so no process group holds them all. Each process is therefore
started with a random mark in its environment (`NISS_PROCESS`). Its descendants inherit the mark, and /proc shows it.
All of them share a second mark (`NISS_OWNER`), by which a watchdog finds them should this process be killed (`watch`).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from uuid import uuid4

from niss.errors import NissError

_MARK = "NISS_PROCESS"
OWNER = "NISS_OWNER"
"""Names the environment variable that all processes of one `Processes` have in common."""
_GRACE_SECONDS = 10.0
_PAUSE_SECONDS = 0.1
_WATCH = "import sys; from niss.local import watch; watch(*sys.argv[1:])"


@dataclass
class Started:
    """A process that was started.

    name     what people call it
    mark     value of `NISS_PROCESS` in its environment and in that of its descendants
    process  the process itself, which leads a session of its own
    log      file that its output goes to
    """

    name: str
    mark: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        """Whether the process itself has not ended; its descendants may outlive it."""
        return self.process.poll() is None

    def require_running(self) -> None:
        """Raise `NissError` with the end of its output if the process has ended."""
        if not self.running:
            raise NissError(
                f"{self.name} ended with status {self.process.returncode}\n{self.last_output()}",
                hint=f"its output is in {self.log}",
            )

    def last_output(self, lines: int = 15) -> str:
        """The last lines of the log; empty where there is none."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, to its group and to every marked descendant."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
        for descendant in marked(self.mark):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(descendant, number)


class Processes:
    """Starts processes; leaving the `with` block, for whatever reason, ends all of them and their children.

    All are asked first (SIGTERM), the last one started before the others, and after ten seconds made to (SIGKILL). On
    systems without /proc the marks cannot be read, and only the process groups are ended. If this process is killed
    inside the block, a watchdog kills them all.
    """

    def __init__(
        self, logs: Path | None, environment: Mapping[str, str], *, scratch: Path | None = None
    ) -> None:
        """`logs` is an existing folder for `NAME.log` files, `environment` what every process is started with.

        Without `logs` they write where this process does. `scratch` is a folder for the watchdog to remove, should this
        process be killed.
        """
        self._owner = uuid4().hex
        self._logs, self._environment = logs, {**environment, OWNER: self._owner}
        self._scratch = scratch
        self._watchdog: subprocess.Popen[bytes] | None = None
        self.started: list[Started] = []

    def start(
        self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> Started:
        """Start a process with nothing on its standard input, whose output is appended to `NAME.log`.

        environment  what it alone is started with
        """
        log = Path(os.devnull) if self._logs is None else self._logs / f"{name}.log"
        mark = uuid4().hex
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=None if self._logs is None else output,
                stderr=None if self._logs is None else subprocess.STDOUT,
                env={**self._environment, **(environment or {}), _MARK: mark},
                start_new_session=True,
            )
        one = Started(name, mark, process, log)
        self.started.append(one)
        return one

    def stop(self, *processes: Started, grace: float = _GRACE_SECONDS) -> None:
        """End processes and their children: SIGTERM to all, then SIGKILL to what is left after `grace` seconds."""
        for one in reversed(processes):
            one.send_signal(signal.SIGTERM)
        end = time.monotonic() + grace
        for one in processes:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.0, end - time.monotonic()))
        for one in processes:
            self.kill(one)

    def kill(self, one: Started) -> None:
        """End one process and its children at once, as a power failure would."""
        one.send_signal(signal.SIGKILL)
        one.process.wait()
        one.send_signal(signal.SIGKILL)  # For children that were started in between.
        if one in self.started:
            self.started.remove(one)

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", _WATCH, self._owner]
        self._watchdog = subprocess.Popen(
            command if self._scratch is None else [*command, str(self._scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_error: object) -> None:
        with _ignored(signal.SIGINT):  # A second Ctrl-C would leave processes behind.
            self.stop(*self.started)
            if self._watchdog is not None:
                self._watchdog.kill()
                self._watchdog.communicate()
                self._watchdog = None


@contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal for a while; outside the main thread, where Python allows no handlers, nothing changes."""
    before = None
    with suppress(ValueError):
        before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(number, before)


def marked(mark: str, variable: str = _MARK) -> list[int]:
    """The ids of living processes that were started with this mark, directly or not."""
    entry = f"{variable}={mark}".encode()
    processes = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if entry in environment.read_bytes().split(b"\0"):
                processes.append(int(environment.parent.name))
    return processes


def watch(mark: str, folder: str | None = None) -> None:
    """The watchdog: takes everything down when its owner cannot, and outlives it by as long as that takes.

    It waits for the end of its standard input, a pipe whose other end its owner alone holds: when the owner ends, even
    by kill -9, the system closes it. Then everything with its mark is killed, and `folder`, which holds private keys,
    is removed. An owner that takes everything down itself leaves nothing to do.
    """
    while sys.stdin.buffer.read(1):
        pass
    # Processes that are being killed can start others, so look until there are none.
    while processes := marked(mark, OWNER):
        for process in processes:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
