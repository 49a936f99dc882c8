"""Datasets by name: load one, list them all, fetch one for later; and where their files lie on this machine.

A dataset is read from files whose checksums are those of its catalog entry, verified on the very bytes
that are then decoded, so a `Dataset` is always exactly the published one.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import numpy as np

from niss.data.catalog import (
    CATALOG,
    MINI_LAYOUT,
    DatasetSpec,
    EmbeddedLayout,
    SourceFile,
    sha256,
    spec_named,
)
from niss.data.dataset import Arrays, Dataset
from niss.data.download import DownloadError, Progress, bring
from niss.data.formats import decode
from niss.errors import DataError

_REINSTALL = "reinstall niss: this file is part of the package"


@dataclass(frozen=True)
class DatasetInfo(DatasetSpec):
    """A line of the list of datasets: its catalog entry, and where its files are on this machine.

    location   the folder of its files, or the embedded file; None where they are not all there

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
    if isinstance(spec.layout, EmbeddedLayout):
        arrays, checksum = read_mini()
        checksums = {spec.layout.file: checksum}
    else:
        roots = search_roots(root)
        local = find(spec, roots)
        if local is None:
            if not download:
                raise _not_here(spec, roots)
            local = _fetch_files(spec, root, progress)
        contents, checksums = read_verified(local)
        arrays = decode(spec, contents)
    dataset = Dataset(
        spec.name,
        *arrays[:4],
        classes=spec.classes,
        mean=spec.mean,
        std=spec.std,
        checksums=checksums,
        vocabulary=spec.vocabulary,
        owners=arrays.owners,
    )
    _check_counts(spec, dataset)
    return dataset


def fetch_dataset(
    name: str | DatasetSpec, *, root: Path | None = None, progress: Progress | None = None
) -> Path:
    """Make the dataset available offline and verify it; returns the folder of its files.

    Arguments and errors are those of `load_dataset`. What is already there is only verified. For the embedded
    `mnist-mini` there is nothing to fetch, and the path is that of its file.
    """
    spec = spec_named(name) if isinstance(name, str) else name
    if isinstance(spec.layout, EmbeddedLayout):
        read_mini()
        return mini_path()
    return _fetch_files(spec, root, progress).folder


def list_datasets() -> list[DatasetInfo]:
    """All datasets, and whether and where the files of each one are on this machine. Reads none of them."""
    return [DatasetInfo(**vars(spec), location=_location(spec)) for spec in CATALOG]


def _location(spec: DatasetSpec) -> Path | None:
    if isinstance(spec.layout, EmbeddedLayout):
        return mini_path()
    local = find(spec, search_roots(None))
    return None if local is None else local.folder


def _check_counts(spec: DatasetSpec, dataset: Dataset) -> None:
    """What came out of the files is what the catalog says; settings were checked against that."""
    found = (len(dataset.train_labels), len(dataset.test_labels), dataset.clients)
    known = (spec.train_size, spec.test_size, spec.clients)
    if found != known:
        raise DataError(
            f"{spec.name} should have {known[0]} training samples, {known[1]} test samples and {known[2]} clients; "
            f"its files hold {found[0]}, {found[1]} and {found[2]}",
            hint=f"delete them, then run `niss data get {spec.name}`",
        )


def _resource() -> Traversable:
    return resources.files("niss.data") / "files" / MINI_LAYOUT.file


def mini_path() -> Path:
    """Where the embedded file lies."""
    return Path(str(_resource()))


def read_mini() -> tuple[Arrays, str]:
    """The embedded arrays and the SHA-256 of the file, which has been checked against the catalog.

    Raises `DataError` where the file is missing or damaged, with the hint to install the package anew.
    """
    resource = _resource()
    try:
        raw = resource.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {resource}: {error.strerror}", hint=_REINSTALL) from error
    checksum = sha256(raw)
    MINI_LAYOUT.digest.check(resource, checksum, fix=_REINSTALL)
    with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
        return Arrays(
            train_inputs=arrays["train_images"][:, np.newaxis],
            train_labels=arrays["train_labels"].astype(np.int64),
            test_inputs=arrays["test_images"][:, np.newaxis],
            test_labels=arrays["test_labels"].astype(np.int64),
        ), checksum


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


def _fetch_files(spec: DatasetSpec, root: Path | None, progress: Progress | None = None) -> Found:
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
            bring(file, path, progress)
        except DownloadError as error:
            raise DataError(error.message, hint=_how_to_provide(spec, local.folder)) from error
    return local


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


def _not_here(spec: DatasetSpec, roots: Sequence[Path]) -> DataError:
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
