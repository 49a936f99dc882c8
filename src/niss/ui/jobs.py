"""Runs that the pages start: one at a time, as a process of its own, `python -m niss run ...`, without a shell.

A job ends on its own, when it is cancelled, or with the server; every whole round is kept, and it can be resumed. What
it writes is a run folder like any other: the pages follow it from there.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from niss.errors import ConfigError
from niss.files import MANIFEST
from niss.redaction import redact

COMMAND = (sys.executable, "-m", "niss", "--quiet", "run")
# A server in the background of a script ignores SIGINT, and so would its jobs, which are cancelled by it.
_HEEDING_INTERRUPTS = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Of what a job wrote to stderr, so much is shown: an error and its hint stand at the end.
_TAIL_BYTES = 4_000
# After an interrupt a run writes its last round down; a server that ends waits so long for it.
_PATIENCE_SECONDS = 10.0


class BusyError(ConfigError):
    """A job is running already."""


@dataclass
class Job:
    """One process and the run it works on.

    run       the name of the run's folder, below the folder of runs
    messages  what it has written to stderr
    """

    run: str
    process: subprocess.Popen[bytes]
    messages: IO[bytes]
    cancelled: bool = False

    def to_json(self) -> dict[str, Any]:
        """How it stands: `code` is None while it runs."""
        code = self.process.poll()
        return {
            "run": self.run,
            "running": code is None,
            "code": code,
            "cancelled": self.cancelled,
            "message": self._tail() if code not in (None, 0) and not self.cancelled else None,
        }

    def _tail(self) -> str:
        self.messages.seek(0, 2)
        self.messages.seek(max(0, self.messages.tell() - _TAIL_BYTES))
        text = redact(self.messages.read().decode(errors="replace"))
        lines = text.splitlines()
        first = max((number for number, line in enumerate(lines) if line.startswith("error:")), default=0)
        return "\n".join(lines[first:])


@dataclass
class Jobs:
    """The jobs of one server; `root` is the folder of runs."""

    root: Path
    _job: Job | None = None
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def start(self, name: str, arguments: Sequence[str]) -> Job:
        """Start `niss run ARGUMENTS` into a new folder of that name; raises `ConfigError` where it cannot be."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                "takes letters, digits, dots, dashes and underscores, 64 at most",
                field="name",
                hint="for example run-2",
            )
        with self._turn:
            self._require_free()
            if (self.root / name).exists():
                raise ConfigError(
                    f"there is a folder {name!r} already", field="name", hint="choose another name"
                )
            return self._launch(name, [*arguments, "--out", str(self.root / name)])

    def resume(self, name: str, folder: Path) -> Job:
        """Go on with the run in `folder`, which must be one of those that are listed."""
        if not (folder / MANIFEST).is_file():
            raise ConfigError("holds no run that could be resumed", field="run", hint="start a new one")
        with self._turn:
            self._require_free()
            return self._launch(name, ["--resume", str(folder)])

    def cancel(self, name: str) -> Job:
        """Interrupt the job that works on that run, as Ctrl-C does; its whole rounds are kept."""
        with self._turn:
            job = self._job
            if job is None or job.run != name or job.process.poll() is not None:
                raise ConfigError("is not being worked on by this page", field="run", hint="reload the page")
            job.cancelled = True
            with suppress(ProcessLookupError):
                job.process.send_signal(signal.SIGINT)
            return job

    def about(self, name: str) -> dict[str, Any] | None:
        """How the latest job on that run stands; None where there was none."""
        return self._job.to_json() if self._job is not None and self._job.run == name else None

    def busy(self) -> bool:
        """Whether a job is running."""
        return self._job is not None and self._job.process.poll() is None

    def close(self) -> None:
        """Interrupt a job that is still running, and wait until it has written its last round down."""
        job = self._job
        if job is None or job.process.poll() is not None:
            return
        job.process.send_signal(signal.SIGINT)
        try:
            job.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()

    def _require_free(self) -> None:
        if self.busy():
            assert self._job is not None
            raise BusyError(
                f"{self._job.run} is still running", field="run", hint="cancel it, or wait until it has ended"
            )

    def _launch(self, run: str, arguments: Sequence[str]) -> Job:
        messages = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the job)
        try:
            # A session of its own, so that Ctrl-C in the terminal of the server does not reach it twice.
            process = subprocess.Popen(
                [sys.executable, "-c", _HEEDING_INTERRUPTS, *COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                start_new_session=True,
            )
        except OSError as error:
            messages.close()
            raise ConfigError(f"cannot start a process: {error.strerror}", field="run") from None
        self._job = Job(run, process, messages)
        return self._job
