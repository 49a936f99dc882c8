"""Everything niss asks of the file system: whole writes, locks, private files, JSON, and the folder of a run.

Nothing else in the package opens a temporary file, renames, locks or syncs. The primitives raise OSError, so that each
room can say what the failure means there; the functions that speak of run folders raise `RunFolderError`.

A run folder holds

    manifest.json           settings, versions, seeds, data checksums; written first
    metrics.jsonl           one line a round, flushed; the same bytes on every repetition
    ledger.jsonl            what each round cost each participant; a hash chain, flushed before the round is summed
    timing.jsonl            seconds a round (kept apart: never the same twice)
    diagnostics.jsonl       what only a simulator sees of a round, from bare updates (kept apart: no claim covers it)
    checkpoint.safetensors  weights and ledger after the last whole round, replaced atomically
    model.safetensors       the final model, by parameter name
    privacy.json            the statement
    result.json             the summary line of the run; written last, so its presence means "finished"

A comparison holds a manifest, one such folder per method, and `summary.json`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from niss.errors import PrivacyError, RunFolderError

try:
    import fcntl
except ImportError:  # Not POSIX: there a second process is not kept out.
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
LIMITS = "limits.json"
TIMING = "timing.jsonl"
DIAGNOSTICS = "diagnostics.jsonl"
CHECKPOINT = "checkpoint.safetensors"
MODEL = "model.safetensors"
PRIVACY = "privacy.json"
RESULT = "result.json"
SUMMARY = "summary.json"
REPORT = "report.html"

JsonObject = dict[str, Any]

# What niss writes is a few levels deep. Deeper files are damaged, or made to exhaust whoever walks through them.
_DEEPEST = 64

PRIVATE, SHARED = 0o600, 0o644
"""Modes of a file: for its owner alone, or for everyone to read."""

_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_AS_IT_IS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS | _AS_IT_IS


def write_atomically(
    path: Path, content: bytes, *, mode: int = PRIVATE, temporary: Path | None = None
) -> None:
    """Replace `path` so that a crash leaves either the old file or the whole new one, never a part.

    The bytes are on disk before the name points to them, and the name is on disk when this returns. `temporary` is
    the file written first, a new name by default; with a fixed name whatever a crash left there is removed, so that
    secrets erased since do not stay on disk.
    """
    if temporary is None:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
    else:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, _NEW, PRIVATE)
    try:
        _write_and_close(descriptor, content)
        if mode != PRIVATE:
            temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_output(path: Path, content: bytes) -> Path:
    """Write what a user asked for, a page, a picture or a table, whole and readable for everyone.

    Makes the folders that are missing. Returns `path`; raises `RunFolderError` where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, mode=SHARED)
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error}", hint="choose another place") from None
    return path


def write_new(path: Path, content: bytes, *, mode: int = PRIVATE) -> None:
    """Write a file that must not exist yet, whole and durable; nothing is left of one that failed."""
    descriptor = os.open(path, _NEW, mode)
    try:
        _write_and_close(descriptor, content)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_and_close(descriptor: int, content: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_durably(path: Path, content: bytes) -> None:
    """Add to the end of a file; on disk before this returns."""
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, as fsync makes the bytes of a file."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(descriptor: int, *, wait: bool) -> None:
    """Keep every other process out of an open file until it is closed; a lock dies with its process.

    Without `wait`, raises BlockingIOError where another process holds it.
    """
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, waiting for whoever has it. Some network disks lock no folders; there it does nothing."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            lock_file(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def read_private(path: Path, *, follow_links: bool = False) -> bytes:
    """The content of a file that only its owner may read; `PrivacyError` where group or others have any right.

    The mode is asked of the open file, so that nobody can swap it between the look and the reading. A symbolic link
    is an OSError unless `follow_links`.
    """
    flags = os.O_RDONLY | _AS_IT_IS | (0 if follow_links else _NO_LINKS)
    with os.fdopen(os.open(path, flags), "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name == "posix" and mode & 0o077:
            raise PrivacyError(
                f"{path} can be read by others (mode {mode:04o}), so its secrets may be known already",
                hint=f"chmod 600 {path}, and make a new identity if others use this machine",
            )
        return file.read()


def to_json(value: Any) -> Any:
    """`value` as JSON can hold it: null for infinity and NaN, since JSON has neither, and keys as text.

    Arrays and scalars of numpy become lists and numbers, paths become text.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    return str(value) if isinstance(value, PurePath) else value


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = PRIVATE) -> None:
    """Replace a JSON file atomically; see `to_json` for numbers that JSON cannot hold."""
    text = json.dumps(to_json(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, (text + "\n").encode(), mode=mode)


def json_line(value: Mapping[str, Any]) -> bytes:
    """One line of a .jsonl file."""
    return (json.dumps(to_json(value), ensure_ascii=False, allow_nan=False) + "\n").encode()


def parse_json(text: str) -> Any:
    """The value in a text of JSON; raises ValueError for anything else, and for one that is nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    suspicious = text.count("[") + text.count("{") > _DEEPEST
    level = [value] if suspicious and isinstance(value, dict | list) else []
    for _ in range(_DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def read_json(path: Path) -> JsonObject:
    """The JSON object in a file, or an error that names the file."""
    try:
        value = parse_json(path.read_bytes().decode("utf-8", errors="replace"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} does not exist", hint="give the folder of an earlier run") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"cannot read {path}: {error}", hint="the file is damaged; restore it from a copy or run again"
        ) from None
    if not isinstance(value, dict):
        raise RunFolderError(
            f"{path} does not hold a JSON object", hint="was it written by niss? If not, give another folder"
        )
    return value


def find_json(path: Path) -> JsonObject | None:
    """The JSON object in a file, None where there is no such file."""
    return read_json(path) if path.exists() else None


def read_json_lines(path: Path) -> tuple[list[JsonObject], bool]:
    """The objects of a .jsonl file (none where there is no file), and whether the last line is incomplete.

    A crash while writing can cut the last line short; damage anywhere else is an error.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    objects: list[JsonObject] = []
    for number, line in lines:
        try:
            value = parse_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            objects.append(value)
        elif number == lines[-1][0]:
            return objects, True
        else:
            raise RunFolderError(
                f"{path}, line {number}, is damaged",
                hint="a crash can only cut off the last line; restore the file from a copy or run again",
            )
    return objects, False


def prepare_run_folder(path: Path, *, overwrite: bool) -> None:
    """Make `path` an empty folder; an earlier run in it is removed only when told to, and nothing else ever is."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file", hint="give another folder")
    if path.exists() and any(path.iterdir()):
        if not (path / MANIFEST).exists():
            raise RunFolderError(f"{path} is not empty and does not hold a run", hint="give another folder")
        if not overwrite:
            raise RunFolderError(
                f"{path} already holds a run",
                hint=f"continue it with niss.resume({str(path)!r}), or replace it with overwrite=True",
            )
        shutil.rmtree(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"cannot create {path}: {error.strerror}", hint="give another folder") from None
