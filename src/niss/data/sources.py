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
from niss.data.formats import Arrays, Images, Labels, decode
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
class DatasetInfo:
    """A line of the list of datasets.

    `available` means that its files exist in `location`, not that they are right: nothing is read or hashed for the
    list.
    """

    name: str
    description: str
    image_shape: tuple[int, int, int]
    classes: int
    train_size: int
    test_size: int
    licence: str
    source: str
    available: bool
    location: Path | None


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

    What is already there is only verified. For the embedded `mnist-mini` there is nothing to fetch, and
    the path is that of its file.
    """
    return fetch_spec(spec_named(name), root=root, progress=progress)


def list_datasets() -> list[DatasetInfo]:
    """All datasets, and whether and where the files of each one are on this machine. Reads none of them."""
    return [_info(spec) for spec in CATALOG]


def load_spec(
    spec: DatasetSpec, *, root: Path | None = None, download: bool = True, progress: Progress | None = None
) -> Dataset:
    """`load_dataset` for a catalog entry, which may be one that is not in the catalog."""
    if isinstance(spec.layout, EmbeddedLayout):
        arrays, checksum = mini.read_mini()
        return _dataset(spec, arrays, {spec.layout.file: checksum})
    roots = store.search_roots(root)
    found = store.find(spec, roots)
    if found is None:
        if not download:
            raise store.not_here(spec, roots)
        found = store.fetch(spec, root, progress)
    contents, checksums = store.read_verified(found)
    return _dataset(spec, decode(spec, contents), checksums)


def fetch_spec(spec: DatasetSpec, *, root: Path | None = None, progress: Progress | None = None) -> Path:
    """`fetch_dataset` for a catalog entry, which may be one that is not in the catalog."""
    if isinstance(spec.layout, EmbeddedLayout):
        mini.read_mini()
        return mini.mini_path()
    return store.fetch(spec, root, progress).folder


def _info(spec: DatasetSpec) -> DatasetInfo:
    """What the list says of one dataset."""
    if isinstance(spec.layout, EmbeddedLayout):
        location: Path | None = mini.mini_path()
    else:
        found = store.find(spec, store.search_roots(None))
        location = None if found is None else found.folder
    return DatasetInfo(
        name=spec.name,
        description=spec.description,
        image_shape=spec.image_shape,
        classes=spec.classes,
        train_size=spec.train_size,
        test_size=spec.test_size,
        licence=spec.licence,
        source=spec.source,
        available=location is not None,
        location=location,
    )


def _dataset(spec: DatasetSpec, arrays: Arrays, checksums: Mapping[str, str]) -> Dataset:
    return Dataset(
        name=spec.name,
        train_images=arrays.train_images,
        train_labels=arrays.train_labels,
        test_images=arrays.test_images,
        test_labels=arrays.test_labels,
        classes=spec.classes,
        mean=spec.mean,
        std=spec.std,
        checksums=checksums,
    )
