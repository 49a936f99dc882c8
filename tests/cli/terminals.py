"""Commands in processes of their own: plain ones, and some in a terminal, for tests of what a terminal shows."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pty
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

Ended = subprocess.CompletedProcess[str]
NISS = Path(sys.executable).with_name("niss")
COLOUR = re.compile(r"\x1b\[[0-9;]*?(?:\b3[0-8]|\b4[0-8]|\b9[0-7]|\b10[0-7])(?:;[0-9;]*)?m")
"""A sequence that sets a colour; bold and its like are none."""
MOVES = re.compile(r"\x1b\[(?:[0-9;]*[A-HJKfsu]|\?25[lh])")
"""A sequence that moves the cursor, hides it or erases."""


def plain_environment(**changes: str) -> dict[str, str]:
    """This environment without what decides on colours, and with `changes`."""
    deciding = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "PY_COLORS", "GITHUB_ACTIONS", "CI")
    kept = {name: value for name, value in os.environ.items() if name not in deciding}
    return kept | {"TERM": "xterm-256color"} | changes


# Importing these takes longer than what the commands do. Nothing in them looks for a terminal.
_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(["matplotlib.figure", "pydantic", "scipy.stats", "torch", "torch._dynamo"])


class _Stream:
    """A file descriptor, which has another number once it has been handed to a process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[], int], tuple[()]]:
        return DupFd(self.number).detach, ()


def _be_niss(
    arguments: Sequence[str], cwd: Path, environment: dict[str, str], streams: Sequence[int]
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = [str(NISS), *arguments]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    runpy.run_path(str(NISS), run_name="__main__")


def start(arguments: Sequence[str], cwd: Path, environment: dict[str, str], *streams: int) -> BaseProcess:
    """`niss ARGUMENTS` with these as stdin, stdout and stderr, in a process that has libraries imported already."""
    handed = [_Stream(stream) for stream in streams]
    process = _WARM.Process(target=_be_niss, args=(arguments, cwd, plain_environment(**environment), handed))
    process.start()
    return process


def in_terminal(*arguments: str, cwd: Path, **environment: str) -> str:
    """Everything that `niss ARGUMENTS` writes to its terminal, control sequences included."""
    ours, theirs = pty.openpty()
    process = start(arguments, cwd, environment, theirs, theirs, theirs)
    os.close(theirs)
    shown = b""
    # Reading ends with an error once the other side is closed.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    process.join(timeout=60)
    return shown.decode()


def in_pipe(*arguments: str, cwd: Path, **environment: str) -> Ended:
    """`niss ARGUMENTS` with both outputs in pipes."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    with Path(os.devnull).open() as nothing:
        process = start(arguments, cwd, environment, nothing.fileno(), to_out, to_err)
    os.close(to_out)
    os.close(to_err)
    with os.fdopen(out) as stdout, os.fdopen(err) as stderr, ThreadPoolExecutor(1) as other:
        said = other.submit(stderr.read)
        shown = stdout.read()
    process.join()
    return subprocess.CompletedProcess(arguments, process.exitcode or 0, shown, said.result())


def run_python(code: str, *arguments: str, cwd: Path | None = None, **environment: str) -> Ended:
    """`python -c CODE ARGUMENTS`, with these variables besides those of this process."""
    command, changed = [sys.executable, "-c", code, *arguments], {**os.environ, **environment}
    options: dict[str, Any] = {
        "cwd": cwd,
        "env": changed,
        "capture_output": True,
        "text": True,
        "timeout": 300,
    }
    return subprocess.run(command, check=False, **options)
