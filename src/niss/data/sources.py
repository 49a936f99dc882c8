"""Datasets by name: load one, list them all, fetch one for later.

A dataset is read from files whose checksums are those of its catalog entry, verified on the very bytes
that are then decoded, so a `Dataset` is always exactly the published one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from niss.data import mini, store
from niss.data.catalog import CATALOG, DatasetSpec, EmbeddedLayout, find_spec, spec_named
from niss.data.dataset import Dataset
from niss.data.download import Progress
from niss.data.formats import decode
from niss.errors import DataError


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
    name: str,
    *,
    root: Path | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> Dataset:
    """The dataset of that name, verified, and downloaded first where need be and `download` allows it.

    name       of the catalog; `list_datasets` has them all
    root       a folder that holds `<name>/<file>`; by default `$NISS_DATA` is searched, then the user cache
    download   whether to fetch missing files, to `root` if given, otherwise to the user cache
    progress   called with file name, bytes so far and their final number if known

    `mnist-mini` is part of the package and always at hand. Raises `ConfigError` for an unknown name and `DataError`
    for files that are missing, damaged or cannot be fetched, with what to put where.
    """
    return load_spec(spec_named(name), root=root, download=download, progress=progress)


def fetch_dataset(name: str, *, root: Path | None = None, progress: Progress | None = None) -> Path:
    """Make the dataset available offline and verify it; returns the folder of its files.

    Arguments and errors are those of `load_dataset`. What is already there is only verified. For the embedded
    `mnist-mini` there is nothing to fetch, and the path is that of its file.
    """
    return fetch_spec(spec_named(name), root=root, progress=progress)


def clients_of(name: str) -> int | None:
    """To how many clients the samples of a dataset belong; None where to nobody, and for an unknown name."""
    spec = find_spec(name)
    return None if spec is None else spec.clients


def list_datasets() -> list[DatasetInfo]:
    """All datasets, and whether and where the files of each one are on this machine. Reads none of them."""
    return [DatasetInfo(**vars(spec), location=_location(spec)) for spec in CATALOG]


def _location(spec: DatasetSpec) -> Path | None:
    if isinstance(spec.layout, EmbeddedLayout):
        return mini.mini_path()
    local = store.find(spec, store.search_roots(None))
    return None if local is None else local.folder


def load_spec(
    spec: DatasetSpec, *, root: Path | None = None, download: bool = True, progress: Progress | None = None
) -> Dataset:
    """`load_dataset` for a catalog entry, which may be one that is not in the catalog."""
    if isinstance(spec.layout, EmbeddedLayout):
        arrays, checksum = mini.read_mini()
        checksums = {spec.layout.file: checksum}
    else:
        roots = store.search_roots(root)
        local = store.find(spec, roots)
        if local is None:
            if not download:
                raise store.not_here(spec, roots)
            local = store.fetch(spec, root, progress)
        contents, checksums = store.read_verified(local)
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


def fetch_spec(spec: DatasetSpec, *, root: Path | None = None, progress: Progress | None = None) -> Path:
    """`fetch_dataset` for a catalog entry, which may be one that is not in the catalog."""
    if isinstance(spec.layout, EmbeddedLayout):
        mini.read_mini()
        return mini.mini_path()
    return store.fetch(spec, root, progress).folder
