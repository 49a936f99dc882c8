"""Rebuild the embedded `mnist-mini` from the official MNIST files and print its SHA-256.

Usage: python tools/build_mnist_mini.py DIR_WITH_OFFICIAL_FILES [--out FILE]

The four files are verified before they are cut. The rule: a class gets its share of the images in proportion to its
count in the official set, by the largest-remainder method; within a class the images are drawn uniformly without
replacement by a `SimStream` of seed 0; the drawn images stay in their official order.
The bytes also depend on the zlib in use, so the SHA-256 of the plain arrays is printed as well: it must
agree even where another zlib compresses differently.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from niss.data import PACKAGED, Dataset, read_verified
from niss.data.catalog import MNIST, MNIST_MINI, sha256
from niss.data.partition import largest_remainder, random_order
from niss.randomness import SimStream

PLACE = PACKAGED / MNIST_MINI.file_sets[0][0].name
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


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


def cut_mini(mnist: Dataset) -> dict[str, npt.NDArray[np.uint8]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild the embedded mnist-mini.")
    parser.add_argument("folder", type=Path, help="the folder with the four official MNIST files")
    parser.add_argument("--out", type=Path, default=PLACE, help="default: its place in the package")
    arguments = parser.parse_args()

    arrays = cut_mini(MNIST.decode(read_verified(MNIST, arguments.folder, MNIST.file_sets[-1])))
    packed = pack_npz(arrays)
    arguments.out.write_bytes(packed)

    plain = hashlib.sha256()
    for name, array in arrays.items():
        plain.update(name.encode() + array.tobytes())
    print(f"{MNIST_MINI.name}: {len(packed)} bytes written to {arguments.out}")
    print(f"sha256 of the file:   {sha256(packed)}")
    print(f"sha256 of the arrays: {plain.hexdigest()}")


if __name__ == "__main__":
    main()
