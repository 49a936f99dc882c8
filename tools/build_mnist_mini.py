"""Rebuild the embedded `mnist-mini` from the official MNIST files and print its SHA-256.

Usage: python tools/build_mnist_mini.py DIR_WITH_OFFICIAL_FILES [--out FILE]

The four files are verified before they are cut; the cut is a pure function of them (see niss/data/mini.py).
The bytes also depend on the zlib in use, so the SHA-256 of the plain arrays is printed as well: it must
agree even where another zlib compresses differently.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from niss.data.catalog import MNIST, MNIST_MINI, sha256
from niss.data.formats import decode
from niss.data.mini import cut_mini, mini_path, pack_npz
from niss.data.sources import Found, read_verified


def main() -> None:
    parser = argparse.ArgumentParser(description="Rebuild the embedded mnist-mini.")
    parser.add_argument("folder", type=Path, help="the folder with the four official MNIST files")
    parser.add_argument("--out", type=Path, default=mini_path(), help="default: its place in the package")
    arguments = parser.parse_args()

    contents, _ = read_verified(Found(MNIST, arguments.folder, MNIST.file_sets[-1]))
    arrays = cut_mini(decode(MNIST, contents))
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
