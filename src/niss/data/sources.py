"""Datasets by name: load one, list them all, fetch one for later.

A dataset is read from files whose checksums are those of its catalog entry, verified on the very bytes
that are then decoded, so a `Dataset` is always exactly the published one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from niss.data import mini, store
from niss.data.catalog import CATALOG, DatasetSpec, EmbeddedLayout, spec_named
from niss.data.download import Progress
from niss.data.formats import Images, Labels, decode
from niss.errors import DataError


@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled image dataset in memory.

    name            as in the catalog
    train_images    uint8 of shape [N, C, H, W]; likewise `test_images`
    train_labels    int64 in 0 .. classes-1, one for each image; likewise `test_labels`
    classes         how many labels there are
    mean, std       per channel, of pixels scaled to [0, 1]; for normalising
    checksums       SHA-256 of each file it was read from, by name: recorded in the manifest of a run

    All of it is checked when it is made, so that later code need not.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    checksums: Mapping[str, str]

    def __post_init__(self) -> None:
        for part, images, labels in (
            ("train", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            if images.ndim != 4 or images.dtype != np.uint8:
                raise DataError(f"{self.name}: {part} images must be uint8 of shape [N, C, H, W]")
            if labels.shape != images.shape[:1] or labels.dtype != np.int64:
                raise DataError(f"{self.name}: {part} labels must be int64, one for each image")
            if labels.size and not 0 <= labels.min() <= labels.max() < self.classes:
                raise DataError(f"{self.name}: {part} labels must lie in 0 .. {self.classes - 1}")
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(f"{self.name}: training and test images differ in shape")
        if not len(self.mean) == len(self.std) == self.image_shape[0]:
            raise DataError(f"{self.name}: mean and std need one number for each of the channels")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


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
    name: str, *, root: Path | None = None, download: bool = True, progress: Progress | None = None
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
    return Dataset(spec.name, *arrays, spec.classes, spec.mean, spec.std, checksums)


def fetch_spec(spec: DatasetSpec, *, root: Path | None = None, progress: Progress | None = None) -> Path:
    """`fetch_dataset` for a catalog entry, which may be one that is not in the catalog."""
    if isinstance(spec.layout, EmbeddedLayout):
        mini.read_mini()
        return mini.mini_path()
    return store.fetch(spec, root, progress).folder
