"""Datasets by name, and how they are dealt out to clients.

`load_dataset` reads one from files whose checksums are those of its catalog entry, verified on the very bytes that are
then decoded, so a `Dataset` is always exactly the published one. `partition` splits its labels among clients,
`partition_by_owner` gives the samples to the clients they come from.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from niss.data.catalog import CATALOG, DatasetSpec, SourceFile, spec_named
from niss.data.dataset import Dataset
from niss.data.download import DownloadError, Progress, download_file
from niss.data.partition import partition, partition_by_owner
from niss.errors import DataError

__all__ = [
    "Dataset",
    "DatasetInfo",
    "fetch_dataset",
    "list_datasets",
    "load_dataset",
    "partition",
    "partition_by_owner",
]

PACKAGED = Path(__file__).parent / "files"
"""Where the files of embedded datasets lie."""


@dataclass(frozen=True)
class DatasetInfo(DatasetSpec):
    """A line of the list of datasets: its catalog entry, and where its files are on this machine.

    location   the folder of its files; None where they are not all there

    Nothing is read or hashed for the list: that the files exist does not mean that they are right.
    """

    location: Path | None = None

    @property
    def available(self) -> bool:
        """Whether all of its files exist."""
        return self.location is not None


def load_dataset(
    name: str | DatasetSpec,
    *,
    root: Path | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """The dataset of that name, verified, and downloaded first where need be and `download` allows it.

    name       of the catalog, where `list_datasets` has them all; or an entry, which need not be in the catalog
    root       a folder that holds `<name>/<file>`; by default `$NISS_DATA` is searched, then the user cache
    download   whether to fetch missing files, to `root` if given, otherwise to the user cache
    progress   called with file name, bytes so far and their final number if known

    `mnist-mini` is part of the package and always at hand. Raises `ConfigError` for an unknown name and `DataError`
    for files that are missing, damaged or cannot be fetched, with what to put where.
    """
    spec = spec_named(name) if isinstance(name, str) else name
    folder, files = _provide(spec, root, download=download, progress=progress)
    return spec.decode(read_verified(spec, folder, files))


def fetch_dataset(
    name: str | DatasetSpec, *, root: Path | None = None, progress: Progress | None = None
) -> Path:
    """Make the dataset available offline and verify it; returns the folder of its files.

    Arguments and errors are those of `load_dataset`. What is already there is only verified.
    """
    spec = spec_named(name) if isinstance(name, str) else name
    folder, files = _provide(spec, root, download=True, progress=progress)
    read_verified(spec, folder, files)
    return folder


def list_datasets() -> list[DatasetInfo]:
    """All datasets, and whether and where the files of each one are on this machine. Reads none of them."""
    found = [(spec, find(spec, None)) for spec in CATALOG]
    return [DatasetInfo(**vars(spec), location=None if here is None else here[0]) for spec, here in found]


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


def search_folders(spec: DatasetSpec, root: Path | None) -> list[Path]:
    """Where the files of a dataset may lie, in order: below `root` alone if given, else `$NISS_DATA` and the cache."""
    named = os.environ.get("NISS_DATA", "") if root is None else str(root)
    roots = ([Path(named).expanduser()] if named else []) + ([user_cache()] if root is None else [])
    return [each / spec.name for each in roots]


def find(spec: DatasetSpec, root: Path | None) -> tuple[Path, tuple[SourceFile, ...]] | None:
    """The first folder with one of the dataset's file sets, by existence alone; None where none is complete."""
    if spec.embedded:
        return PACKAGED, spec.file_sets[0]
    for folder in search_folders(spec, root):
        for files in spec.file_sets:
            if all((folder / file.name).is_file() for file in files):
                return folder, files
    return None


def _provide(
    spec: DatasetSpec, root: Path | None, *, download: bool, progress: Progress | None
) -> tuple[Path, Sequence[SourceFile]]:
    """The folder of a complete set of files, not yet verified; missing ones are downloaded to the last folder."""
    found = find(spec, root)
    if found is not None:
        return found
    folders, files = search_folders(spec, root), spec.file_sets[-1]
    choices = [", ".join(file.name for file in files) for files in spec.file_sets]
    how_to_provide = (
        f"run `niss data get {spec.name}` where there is a network, or put these files into {folders[-1]}: "
        f"{'; or these: '.join(choices)}. Any other folder that holds {spec.name}/<file> will do if "
        "NISS_DATA names it"
    )
    if not download:
        raise DataError(
            f"the files of {spec.name} are not on this machine; looked in {', '.join(map(str, folders))}",
            hint=how_to_provide,
        )
    for file in files:
        path = folders[-1] / file.name
        if not path.is_file():
            try:
                download_file(file, path, progress)
            except DownloadError as error:
                raise DataError(error.message, hint=how_to_provide) from error
    return folders[-1], files


def read_verified(spec: DatasetSpec, folder: Path, files: Sequence[SourceFile]) -> dict[str, bytes]:
    """The contents of the files by name; the very bytes that were verified.

    Raises `DataError` for a file that cannot be read, or whose checksum is not the published one.
    """
    contents: dict[str, bytes] = {}
    for file in files:
        path = folder / file.name
        fix = f"delete {path}, then run `niss data get {spec.name}` to fetch it again"
        if spec.embedded:
            fix = "reinstall niss: this file is part of the package"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}", hint=fix) from error
        file.digest.check(path, raw, fix=fix)
        contents[file.name] = raw
    return contents
