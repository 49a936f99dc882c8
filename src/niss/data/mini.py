"""`mnist-mini`: how it is cut out of MNIST, packed into the package, and read back.

The rule: a class gets its share of the images in proportion to its count in the official set, by the
largest-remainder method; within a class the images are drawn uniformly without replacement by a
`SimStream` of seed 0; the drawn images stay in their official order.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from niss.data.catalog import MINI_LAYOUT, MNIST_MINI, sha256
from niss.data.dataset import Arrays
from niss.data.partition import largest_remainder, random_order
from niss.errors import DataError
from niss.randomness import SimStream

_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_REINSTALL = "reinstall niss: this file is part of the package"


def stratified_cut(labels: npt.NDArray[Any], size: int, stream: SimStream) -> npt.NDArray[np.int64]:
    """Ascending indices of `size` items whose class counts follow those of `labels` within one item.

    labels   one class number for each item
    size     how many items are drawn
    stream   fixes which items of a class are drawn
    """
    classes, counts = np.unique(labels, return_counts=True)
    shares = largest_remainder(size, counts.astype(np.float64))
    drawn = []
    for label, share in zip(classes, shares, strict=True):
        members = np.flatnonzero(labels == label)
        drawn.append(members[random_order(len(members), stream.child(int(label)))[:share]])
    return np.sort(np.concatenate(drawn)).astype(np.int64)


def cut_mini(mnist: Arrays) -> dict[str, npt.NDArray[np.uint8]]:
    """The four arrays that are shipped, cut out of those of MNIST; the single channel is left out."""
    stream = SimStream(seed=0).child("mnist-mini")
    train = stratified_cut(mnist.train_labels, MNIST_MINI.train_size, stream.child("train"))
    test = stratified_cut(mnist.test_labels, MNIST_MINI.test_size, stream.child("test"))
    return {
        "train_images": mnist.train_inputs[train, 0].astype(np.uint8),
        "train_labels": mnist.train_labels[train].astype(np.uint8),
        "test_images": mnist.test_inputs[test, 0].astype(np.uint8),
        "test_labels": mnist.test_labels[test].astype(np.uint8),
    }


def pack_npz(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """An npz file with no trace of when or where it was made: same arrays and zlib, same bytes.

    `arrays` by name, in the order in which they are written.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=_ZIP_EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # else the operating system's number, which differs on Windows
            archive.writestr(entry, content.getvalue(), compresslevel=9)
    return packed.getvalue()


def _resource() -> Traversable:
    return files("niss.data") / "files" / MINI_LAYOUT.file


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
