"""Every code with which `niss` can end; docs/reference/exit-codes.md is this table, and a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExitCode:
    """A code, what it is called in a list, and when it is used."""

    code: int
    name: str
    meaning: str


EXIT_CODES = (
    ExitCode(0, "done", "The command did what it was asked to."),
    ExitCode(
        1,
        "failed",
        "`niss verify` found a claim that does not hold, a deployment did not finish, or niss itself crashed.",
    ),
    ExitCode(2, "bad settings", "A setting, argument or command that cannot be used; nothing was started."),
    ExitCode(3, "data", "A dataset is missing, damaged or cannot be fetched."),
    ExitCode(4, "privacy", "The work would break, overspend or overstate a privacy guarantee."),
    ExitCode(5, "run folder", "A run folder cannot be written, resumed or read."),
    ExitCode(6, "protocol", "This side or the other side did something the protocol forbids."),
    ExitCode(130, "interrupted", "Ctrl-C; the last line says what was kept and how to go on."),
)
CRASHED = 1
INTERRUPTED = 130


def codes_in_short() -> str:
    """All codes in one line, for the help."""
    return ", ".join(f"{one.code} {one.name}" for one in EXIT_CODES)
