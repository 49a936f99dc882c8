"""Checksums of dataset files: what a file must hash to, and the refusal when it does not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from niss.errors import DataError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Digest:
    """The published checksum of a file.

    MD5 appears where it is all that the authors of a dataset publish. It still binds us to their file:
    forging another file with the same MD5 as one already fixed is out of reach, collisions or not.
    """

    algorithm: Literal["md5", "sha256"]
    hexdigest: str

    def of_bytes(self, raw: bytes) -> str:
        """The checksum of `raw` under this algorithm."""
        return hashlib.new(self.algorithm, raw, usedforsecurity=False).hexdigest()

    def of_file(self, path: Path) -> str:
        """The checksum of a file under this algorithm, read in pieces."""
        running = hashlib.new(self.algorithm, usedforsecurity=False)
        with path.open("rb") as file:
            while piece := file.read(_CHUNK):
                running.update(piece)
        return running.hexdigest()


def sha256(raw: bytes) -> str:
    """The SHA-256 of `raw` in hexadecimal."""
    return hashlib.sha256(raw).hexdigest()


def mismatch(path: Path, expected: Digest, found: str, *, fix: str) -> DataError:
    """The error for a file that is there but is not the published one."""
    return DataError(
        f"{path} is damaged or is another file: its {expected.algorithm} should be "
        f"{expected.hexdigest} and is {found}",
        hint=fix,
    )
