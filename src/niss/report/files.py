"""Reading the JSON files of a run folder, and writing files so that no half-written one is ever seen."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niss.errors import RunFolderError

JsonObject = dict[str, Any]


def read_json_object(path: Path) -> JsonObject | None:
    """The object in `path`, or None where there is no such file."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be read: {error}",
            hint="The file is damaged; restore it from a copy or run the experiment again.",
        ) from error
    if not isinstance(value, dict):
        raise RunFolderError(
            f"{path} holds no JSON object.", hint="Was the file written by niss? Run the experiment again."
        )
    return printable(value)  # type: ignore[no-any-return]


def read_json_lines(path: Path) -> tuple[list[JsonObject], bool]:
    """The objects in `path`, and whether the last line was cut off, as a crash while writing leaves it."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error}", hint="Check the file's rights.") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    objects: list[JsonObject] = []
    for number, line in lines:
        value = _parsed(line)
        if isinstance(value, dict):
            objects.append(printable(value))
        elif number == lines[-1][0]:
            return objects, True
        else:
            raise RunFolderError(
                f"{path}, line {number}, is damaged.",
                hint="Only the last line may be cut off by a crash; restore the file or run again.",
            )
    return objects, False


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def printable(value: Any) -> Any:
    """`value` without the characters that neither HTML nor SVG may carry."""
    if isinstance(value, str):
        kept = "".join(sign for sign in value if sign in "\n\t" or ord(sign) >= 0xA0 or sign.isprintable())
        return kept.encode("utf-8", errors="replace").decode("utf-8").translate({0xFFFE: None, 0xFFFF: None})
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value


def number_at(entry: Mapping[str, Any], key: str, where: Path) -> float | None:
    """A finite number, or None where it is absent, null or infinite (an infinite ε promises nothing)."""
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RunFolderError(
            f"{where}: {key} should be a number or null, not {value!r}.",
            hint="The file was changed by hand or written by another version of niss.",
        )
    return float(value) if math.isfinite(value) else None


def text_at(entry: Mapping[str, Any], key: str, where: Path) -> str | None:
    value = entry.get(key)
    if value is None or isinstance(value, str):
        return value
    raise RunFolderError(
        f"{where}: {key} should be a text or null, not {value!r}.",
        hint="The file was changed by hand or written by another version of niss.",
    )


def write_atomically(path: Path, content: bytes) -> Path:
    """Writes beside `path` and renames, so that a reader sees the old file or the whole new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error}", hint="Choose another place.") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        # mkstemp makes a file for its owner alone; a report is meant to be shared like any other file.
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunFolderError(f"{path} cannot be written: {error}", hint="Choose another place.") from error
    return path
