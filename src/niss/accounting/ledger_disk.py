"""What a ledger file asks of the operating system: an exclusive lock, and folders that remember their files."""

from __future__ import annotations

import io
import os
from pathlib import Path

from niss.errors import PrivacyError

try:
    import fcntl
except ImportError:  # Not POSIX: a second process is not kept out there.
    fcntl = None  # type: ignore[assignment]


def lock(file: io.FileIO, path: Path) -> None:
    """Keep every other process out until the file is closed; a lock dies with its process."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise PrivacyError(
            f"{path} is in use by another process", hint="let it finish; a ledger is charged by one at a time"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make a new file's name durable, as fsync made its bytes."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unreadable(path: Path, error: OSError) -> PrivacyError:
    return PrivacyError(
        f"cannot read the ledger {path}: {error.strerror}",
        hint="give the path of a ledger.jsonl; without its ledger a client cannot tell what it spent",
    )
