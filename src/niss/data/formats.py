"""From the verified bytes of a dataset's files to its arrays: gzipped IDX, CIFAR records, tar archives.

Every reader is told the exact shape or size it must find and refuses anything else, so a damaged or hostile file ends
in a `DataError` and never in more memory than the dataset itself needs. Nothing is ever unpickled, and no archive
member is ever written to disk.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from niss.data.dataset import Arrays, Images, Labels
from niss.data.plays import role_samples
from niss.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from niss.data.catalog import DatasetSpec

Contents = Mapping[str, bytes]
"""The verified bytes of the files of a dataset, by name."""

IDX_FILES = tuple(
    f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


class IdxLayout:
    """The MNIST family: images and labels in four gzipped IDX files."""

    def read(self, spec: DatasetSpec, contents: Contents) -> Arrays:
        """The arrays of the files; `DataError` for anything but the published format and the sizes of `spec`."""

        def array(name: str, shape: tuple[int, ...]) -> Images:
            return parse_idx(gunzip_exactly(contents[name], idx_size(shape), name=name), shape, name=name)

        def part(images: str, labels: str, count: int) -> tuple[Images, Labels]:
            pixels = array(images, (count, *spec.shape[1:])).reshape(count, *spec.shape)
            return pixels, array(labels, (count,)).astype(np.int64)

        images, labels, test_images, test_labels = IDX_FILES
        train, test = part(images, labels, spec.train_size), part(test_images, test_labels, spec.test_size)
        return *train, *test, None


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
        counts = {name: spec.train_size // len(self.train) for name in self.train}
        counts |= {name: spec.test_size // len(self.test) for name in self.test}
        if self.archive in contents:
            contents = self._unpacked(spec, contents[self.archive], counts)

        def joined(names: tuple[str, ...]) -> tuple[Images, Labels]:
            parts = [
                parse_records(contents[name], counts[name], self.label_bytes, spec.image_shape, name=name)
                for name in names
            ]
            return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

        return *joined(self.train), *joined(self.test), None

    def _unpacked(self, spec: DatasetSpec, archive: bytes, counts: Mapping[str, int]) -> dict[str, bytes]:
        record = self.label_bytes + math.prod(spec.shape)
        sizes = {name: count * record for name, count in counts.items()}
        files = read_tar(archive, self.folder_in_archive, sizes, name=self.archive)
        fix = f"delete {self.archive} and run `niss data get {spec.name}`"
        for file in (file for alternative in spec.file_sets for file in alternative if file.name in files):
            file.digest.check(f"{file.name} in {self.archive}", files[file.name], fix=fix)
        return files


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
        return role_samples(read_tar(contents[self.archive], self.folder, name=self.archive), spec.shape[0])


_IDX_UNSIGNED_BYTE = 0x08
# Room for the tar headers, the paddings and the few small text files beside the records.
_TAR_SLACK = 1 << 20
# An archive of which only a part is wanted may hold so much when decompressed.
_MOST_UNPACKED = 1 << 27


def gunzip_exactly(raw: bytes, size: int, *, name: str) -> bytes:
    """Decompress `raw`, which must hold exactly `size` bytes; stops as soon as there are more.

    A file that is cut off, is not gzip, or holds any other number of bytes is a `DataError` that calls it `name`.
    """
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            content = file.read(size + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} is not a whole gzip file: {error}") from error
    if len(content) != size:
        number = "more" if len(content) > size else f"only {len(content)}"
        raise DataError(f"{name} should hold {size} bytes when decompressed, and holds {number}")
    return content


def idx_size(shape: tuple[int, ...]) -> int:
    """The length in bytes of an IDX file of unsigned bytes of that shape."""
    return 4 + 4 * len(shape) + math.prod(shape)


def parse_idx(raw: bytes, shape: tuple[int, ...], *, name: str) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes, which must have exactly this shape and no byte more.

    IDX: two zero bytes, a type code, the number of dimensions, each dimension as a big-endian 32-bit number, the data.
    """
    header = 4 + 4 * len(shape)
    if len(raw) < header:
        raise DataError(f"{name} ends inside its header: {len(raw)} of {header} bytes")
    magic = raw[:4]
    expected = bytes((0, 0, _IDX_UNSIGNED_BYTE, len(shape)))
    if magic != expected:
        raise DataError(f"{name} begins with {magic.hex()}, not with the IDX magic {expected.hex()}")
    dimensions = struct.unpack(f">{len(shape)}I", raw[4:header])
    if dimensions != shape:
        raise DataError(f"{name} says its shape is {dimensions}, but it must be {shape}")
    if len(raw) != idx_size(shape):
        raise DataError(f"{name} has {len(raw)} bytes, but its shape {shape} needs {idx_size(shape)}")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape).copy()


def parse_records(
    raw: bytes, records: int, label_bytes: int, image_shape: tuple[int, int, int], *, name: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images and labels of a file of exactly `records` CIFAR records.

    A record is `label_bytes` labels, the last of which is used, then the pixels, channel by channel and row by row.
    `name` is the file's, for the message of the `DataError` where the length is another.
    """
    length = label_bytes + math.prod(image_shape)
    if len(raw) != records * length:
        raise DataError(f"{name} has {len(raw)} bytes, but {records} records need {records * length}")
    table = np.frombuffer(raw, dtype=np.uint8).reshape(records, length)
    images = table[:, label_bytes:].reshape(records, *image_shape).copy()
    return images, table[:, label_bytes - 1].astype(np.int64)


class _CappedReader(io.RawIOBase):
    """A reader that refuses to give out more than `limit` bytes in all."""

    def __init__(self, source: gzip.GzipFile, limit: int, name: str) -> None:
        super().__init__()
        self._source = source
        self._left = limit
        self._name = name

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self._source.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise DataError(f"{self._name} holds far more data than the dataset has")
        return count


def read_tar(
    raw: bytes, folder: str, sizes: Mapping[str, int] | None = None, *, name: str
) -> dict[str, bytes]:
    """The contents of the regular files that lie directly in a folder of a tar.gz, by their names in it.

    With `sizes` those named there, each of which must be there with exactly its size; without, all of them.

    Other members are passed over, but a name that climbs out of the archive, or a link or device, condemns the whole
    archive, as does a wanted file that comes twice, and more data than there should be.
    """
    limit = _MOST_UNPACKED if sizes is None else sum(sizes.values()) + _TAR_SLACK
    found: dict[str, bytes] = {}
    try:
        with (
            gzip.GzipFile(fileobj=io.BytesIO(raw)) as plain,
            tarfile.open(fileobj=io.BufferedReader(_CappedReader(plain, limit, name)), mode="r|") as archive,
        ):
            for member in archive:
                _refuse_unsafe(member, name)
                path = PurePosixPath(member.name)
                wanted = member.isreg() if sizes is None else path.name in sizes
                if not wanted or str(path.parent) != folder:
                    continue
                if path.name in found:
                    raise DataError(f"{name} holds {member.name} twice")
                size = member.size if sizes is None else sizes[path.name]
                file = archive.extractfile(member) if member.size == size else None
                if file is None:
                    raise DataError(
                        f"{member.name} in {name} should be a file of {size} bytes, and has {member.size}"
                    )
                found[path.name] = file.read(size)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{name} is not a whole tar.gz archive: {error}") from error
    short = [wanted for wanted, size in (sizes or {}).items() if len(found.get(wanted, b"")) != size]
    if short:
        raise DataError(f"{name} lacks {', '.join(f'{folder}/{wanted}' for wanted in short)}")
    return found


def _refuse_unsafe(member: tarfile.TarInfo, archive: str) -> None:
    """Refuse an archive with a member that points out of it, or that is neither file nor folder."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or "\\" in member.name:
        raise DataError(f"{archive} holds a member with the unsafe name {member.name!r}")
    if not (member.isreg() or member.isdir()):
        raise DataError(f"{archive} holds {member.name!r}, which is neither a file nor a folder")
