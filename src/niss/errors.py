"""The errors niss raises on purpose, each with a hint that says what to do.

Every error a user can meet is a `NissError`. The command line prints its message and its hint and
exits with `exit_code`; anything else is a defect of ours and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class NissError(Exception):
    """Base of all intended errors: a message, and a hint that says how to go on."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ConfigError(NissError, ValueError):
    """A setting or argument that cannot be used; `field` names it as the user wrote it."""

    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message if field is None else f"{field}: {message}", hint=hint)
        self.field = field


def meant(value: object, names: Iterable[str]) -> str | None:
    """A hint at the name that was meant; None where none is near."""
    import difflib

    close = difflib.get_close_matches(str(value).lower(), names, n=1)
    return f"did you mean {close[0]!r}?" if close else None


def all_faults(faults: Sequence[ConfigError]) -> ConfigError:
    """One error that names every one of `faults`, a line each; `field` is that of the first."""
    if len(faults) == 1:
        return faults[0]
    lines = [one.message if one.hint is None else f"{one.message} ({one.hint})" for one in faults]
    together = ConfigError("\n".join(lines), hint=f"{len(faults)} settings cannot be used as they are")
    together.field = faults[0].field
    return together


class DataError(NissError):
    """A dataset that is missing, damaged or cannot be fetched."""

    exit_code = 3


class PrivacyError(NissError):
    """Something that would break, overspend or overstate a privacy guarantee."""

    exit_code = 4


class RunFolderError(NissError):
    """A run folder that cannot be written, resumed or read."""

    exit_code = 5


class ProtocolError(NissError):
    """A step the protocol forbids."""

    exit_code = 6


class LocalProtocolError(ProtocolError):
    """This side was about to do something the protocol forbids."""


class RemoteProtocolError(ProtocolError):
    """The other side did something the protocol forbids."""


class PausedError(NissError):
    """A run that something outside of it keeps from going on; it is saved, and goes on when it is started again."""

    exit_code = 8


class RanksError(NissError):
    """One of the processes that train a run together is gone, or does something else than the others."""

    exit_code = 7
