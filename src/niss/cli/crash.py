"""A crash in two lines: what happened, and the file that holds the whole traceback, redacted."""

from __future__ import annotations

import os
import platform
import shlex
import traceback
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import typer

from niss.redaction import redact, safe_traceback
from niss.version import __version__


def report_crash(error: BaseException, arguments: Sequence[str], *, debug: bool) -> None:
    """Say on stderr what happened and where the traceback is; shows it there too where `debug`.

    A log that cannot be written never hides the crash: then the traceback is shown.
    """
    trace = safe_traceback(error)
    summary = redact("".join(traceback.format_exception_only(error))).strip().splitlines()[0]
    try:
        path = _write_log(log_folder(os.environ), trace, arguments)
        where = f"hint: the traceback is in {path}; please report it."
        where += "" if debug else " `niss --debug ...` shows it here"
    except (OSError, RuntimeError) as fault:
        debug = True
        where = f"hint: the traceback stands above; it could not be written to a file: {fault}"
    if debug:
        typer.echo(trace, err=True, nl=False)
    typer.echo(f"error: niss crashed: {summary}", err=True)
    typer.echo(where, err=True)


def log_folder(environment: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/niss`, by default `~/.local/state/niss`."""
    state = Path(environment.get("XDG_STATE_HOME", ""))
    # The specification has relative paths ignored.
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "niss"


def _write_log(folder: Path, trace: str, arguments: Sequence[str]) -> Path:
    """A new file that only its owner can read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.now(UTC)
    path = folder / f"crash-{now:%Y%m%dT%H%M%S}-{os.getpid()}.log"
    head = (
        f"niss {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{now:%Y-%m-%dT%H:%M:%SZ}\nniss {redact(shlex.join(arguments))}\n\n"
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(head + trace)
    return path
