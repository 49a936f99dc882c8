"""For all tests: temporary folders in memory, and the command line imported without its libraries' warnings."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from pathlib import Path

import hypothesis
import pytest

with warnings.catch_warnings():
    # Some releases of typer use names that click has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer.testing  # noqa: F401

    import niss.cli  # noqa: F401

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("niss", deadline=None)
hypothesis.settings.load_profile("niss")

_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 4 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    # Ledgers, keys and states are synced with every write, and tests wait for the disk more than for anything else.
    # What is written and in which order is the same in memory; that it is synced, tests of `niss.files` watch.
    if config.option.basetemp is None and _has_room(_MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))
    # A shell lets what it starts in the background ignore Ctrl-C, and so would every command that a test interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _has_room(folder: Path) -> bool:
    """Whether tests can use it: programs may be run from it, and a whole session fits into it."""
    if not folder.is_dir() or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > _ENOUGH_BYTES
