"""From the verified bytes of a dataset's files to its arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from niss.data.catalog import CifarLayout, DatasetSpec, EmbeddedLayout, IdxLayout
from niss.data.formats import gunzip_exactly, idx_size, parse_idx, parse_records, read_tar_members
from niss.errors import DataError

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class Arrays(NamedTuple):
    """Images as uint8 [N, C, H, W] and labels as int64, for training and test."""

    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels


def decode(spec: DatasetSpec, contents: Mapping[str, bytes]) -> Arrays:
    """The arrays in the files of one of the spec's file sets, given by name; all sizes must be the spec's."""
    match spec.layout:
        case IdxLayout():
            return _from_idx(spec, spec.layout, contents)
        case CifarLayout():
            return _from_records(spec, spec.layout, contents)
        case EmbeddedLayout():
            raise TypeError(f"{spec.name} is embedded and has no files to decode")


def _from_idx(spec: DatasetSpec, layout: IdxLayout, contents: Mapping[str, bytes]) -> Arrays:
    def array(name: str, shape: tuple[int, ...]) -> Images:
        return parse_idx(gunzip_exactly(contents[name], idx_size(shape), name=name), shape, name=name)

    def images(name: str, count: int) -> Images:
        return array(name, (count, *spec.image_shape[1:])).reshape(count, *spec.image_shape)

    return Arrays(
        train_images=images(layout.train_images, spec.train_size),
        train_labels=array(layout.train_labels, (spec.train_size,)).astype(np.int64),
        test_images=images(layout.test_images, spec.test_size),
        test_labels=array(layout.test_labels, (spec.test_size,)).astype(np.int64),
    )


def _from_records(spec: DatasetSpec, layout: CifarLayout, contents: Mapping[str, bytes]) -> Arrays:
    counts = {name: spec.train_size // len(layout.train) for name in layout.train}
    counts |= {name: spec.test_size // len(layout.test) for name in layout.test}
    if layout.archive in contents:
        contents = _unpacked(spec, layout, contents[layout.archive], counts)

    def joined(names: tuple[str, ...]) -> tuple[Images, Labels]:
        images, labels = zip(
            *(
                parse_records(
                    contents[name],
                    counts[name],
                    label_bytes=layout.label_bytes,
                    image_shape=spec.image_shape,
                    name=name,
                )
                for name in names
            ),
            strict=True,
        )
        return np.concatenate(images), np.concatenate(labels)

    return Arrays(*joined(layout.train), *joined(layout.test))


def _unpacked(
    spec: DatasetSpec, layout: CifarLayout, archive: bytes, counts: Mapping[str, int]
) -> dict[str, bytes]:
    record = layout.label_bytes + math.prod(spec.image_shape)
    sizes = {f"{layout.folder_in_archive}/{name}": count * record for name, count in counts.items()}
    members = read_tar_members(archive, sizes, name=layout.archive)
    files = {name: members[f"{layout.folder_in_archive}/{name}"] for name in counts}
    for name, digest in layout.digests.items():
        found = digest.of_bytes(files[name])
        if found != digest.hexdigest:
            raise DataError(
                f"{name} in {layout.archive} is not the published file: its {digest.algorithm} should be "
                f"{digest.hexdigest} and is {found}",
                hint=f"delete {layout.archive} and run `niss data fetch {spec.name}`",
            )
    return files
