"""How `niss` ends: its exit codes, errors with a hint, packages that are not installed, and crashes.

A crash is two lines: what happened, and the file that holds the whole traceback, redacted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from niss.errors import ConfigError, NissError
from niss.files import write_new


class MissingPackageError(ConfigError):
    """An optional package that a command needs is not installed."""


_FAILED = (
    "`niss verify` found a claim that does not hold, a deployment did not finish, or niss itself crashed."
)
_RANKS = "One of several processes of a run died; the others ended, and the run can be resumed."
# Every code with which `niss` can end, what it is called, and when it is used; docs/reference/exit-codes.md is this
# table, and a test compares the two.
EXIT_CODES = (
    (0, "done", "The command did what it was asked to."),
    (1, "failed", _FAILED),
    (2, "bad settings", "A setting, argument or command that cannot be used; nothing was started."),
    (3, "data", "A dataset is missing, damaged or cannot be fetched."),
    (4, "privacy", "The work would break, overspend or overstate a privacy guarantee."),
    (5, "run folder", "A run folder cannot be written, resumed or read."),
    (6, "protocol", "This side or the other side did something the protocol forbids."),
    (7, "ranks", _RANKS),
    (
        8,
        "paused",
        "Something that is away keeps a run from going on; it is saved, and goes on when started again.",
    ),
    (130, "interrupted", "Ctrl-C; the last line says what was kept and how to go on."),
)
CRASHED = 1
INTERRUPTED = 130

_PACKAGES = {
    "torch": ("trains models", "'niss[train]'"),
    "matplotlib": ("draws figures", "matplotlib"),
    "flwr": ("runs Flower", "'niss[flower]'"),
    "fastapi": ("serves HTTP", "'niss[tracker,ui]'"),
    "uvicorn": ("serves HTTP", "'niss[tracker,ui]'"),
    "redis": ("stores data in Redis", "'niss[tracker]'"),
}
"""Optional packages: what a command that needs one does, and what pip should install."""


def print_error(error: NissError) -> None:
    """Print an intended error, as a person should read it."""
    typer.echo("error: " + error.message.replace("\n", "\n       "), err=True)
    if error.hint is not None:
        typer.echo(f"hint: {error.hint}", err=True)


@contextmanager
def optional_packages() -> Iterator[None]:
    """Where an optional package is missing, raise a `MissingPackageError` that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        purpose, requirement = _PACKAGES[package]
        raise MissingPackageError(
            f"this command {purpose} and needs {package}", hint=f"pip install {requirement}"
        ) from None


def report_crash(error: BaseException, arguments: Sequence[str], *, debug: bool) -> None:
    """Say on stderr what happened and where the traceback is; shows it there too if `debug`.

    A log that cannot be written never hides the crash: then the traceback is shown.
    """
    import traceback

    from niss.redaction import redact, safe_traceback

    trace = safe_traceback(error)
    summary = redact("".join(traceback.format_exception_only(error))).strip().splitlines()[0]
    try:
        path = _write_log(trace, arguments)
        where = f"hint: the traceback is in {path}; please report it."
        where += "" if debug else " `niss --debug ...` shows it here"
    except (OSError, RuntimeError) as fault:
        debug = True
        where = f"hint: the traceback is above; it could not be written to a file: {fault}"
    if debug:
        typer.echo(trace, err=True, nl=False)
    typer.echo(f"error: niss crashed: {summary}\n{where}", err=True)


def _write_log(trace: str, arguments: Sequence[str]) -> Path:
    """A new file that only its owner can read, in `$XDG_STATE_HOME/niss`, by default `~/.local/state/niss`.

    It holds what was run with which versions, and the traceback.
    """
    import platform
    import shlex
    from datetime import UTC, datetime

    from niss.redaction import redact
    from niss.version import __version__

    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The specification has relative paths ignored.
    folder = (state if state.is_absolute() else Path.home() / ".local" / "state") / "niss"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = datetime.now(UTC)
    path = folder / f"crash-{now:%Y%m%dT%H%M%S}-{os.getpid()}.log"
    head = (
        f"niss {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{now:%Y-%m-%dT%H:%M:%SZ}\nniss {redact(shlex.join(arguments))}\n\n"
    )
    write_new(path, (head + trace).encode(errors="backslashreplace"))
    return path
