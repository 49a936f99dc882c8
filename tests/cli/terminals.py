"""Commands in a terminal of their own, for tests of what a terminal shows."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

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


def in_terminal(*arguments: str, cwd: Path, **environment: str) -> str:
    """Everything that `niss ARGUMENTS` writes to its terminal, control sequences included."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [str(NISS), *arguments],
        cwd=cwd,
        env=plain_environment(**environment),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    # Reading ends with an error once the other side is closed.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    process.wait(timeout=60)
    return shown.decode()


def in_pipe(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`niss ARGUMENTS` with both outputs in pipes."""
    return subprocess.run(
        [str(NISS), *arguments],
        cwd=cwd,
        env=plain_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
