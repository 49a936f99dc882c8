"""Reading the files of TensorFlow Federated's datasets without TensorFlow: SQLite and, as it was before 2021, HDF5.

An SQLite file has a table `client_metadata` (client_id, split_name, num_examples) and a table `examples` (client_id,
split_name, serialized_example_proto), each row a `tf.train.Example` (tensorflow_federated/python/simulation/datasets,
`sql_client_data.py`). In HDF5, training and test have a file each, with a dataset `examples/CLIENT/FEATURE` for every
feature of a client, one row an example (`hdf5_client_data.py` there, until 2021). A `tf.train.Example` is a map from
names to lists of bytes, floats or whole numbers (tensorflow/core/example/example.proto and feature.proto); protobuf's
wire format is that of protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from niss.errors import DataError

Part = Literal["train", "test"]
Features = Mapping[str, list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]]

_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_SQLITE_MAGIC = b"SQLite format 3\0"
_GET_AGAIN = "get the file again, and decompress it if its name ends in .lzma or .bz2"


class SqliteClients:
    """The clients of an SQLite file."""

    def __init__(self, path: Path) -> None:
        self.files: tuple[Path, ...] = (path,)
        self._path = path
        with self._errors():
            self._connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            self._clients: dict[str, list[str]] = {"train": [], "test": []}
            # A file of one part calls it as its maker liked.
            rows = self._connection.execute(
                "SELECT DISTINCT split_name, client_id FROM client_metadata"
            ).fetchall()
        for split, client in rows:
            self._clients.setdefault(str(split), []).append(str(client))
        self._splits = {"train": "train", "test": "test"}
        if not self._clients["train"] and len(self._clients) == 3:
            (self._splits["train"],) = set(self._clients) - {"train", "test"}

    def clients(self, part: Part) -> list[str]:
        """The names of the clients that have examples in this part, sorted."""
        return sorted(set(self._clients[self._splits[part]]))

    def examples(self, part: Part, client: str) -> list[Features]:
        """The examples of a client in this part."""
        query = "SELECT serialized_example_proto FROM examples WHERE client_id = ? AND split_name = ?"
        with self._errors():
            rows = self._connection.execute(query, (client, self._splits[part])).fetchall()
        return [parse_example(bytes(row[0]), name=str(self._path)) for row in rows]

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, TypeError) as error:
            raise DataError(
                f"{self._path} is no dataset of TensorFlow Federated: {error}", hint=_GET_AGAIN
            ) from error


class Hdf5Clients:
    """The clients of one HDF5 file, or of one for training and one for the test."""

    def __init__(self, train: Path, test: Path | None) -> None:
        try:
            import h5py
        except ModuleNotFoundError:
            raise DataError(
                f"{train} is an HDF5 file and needs h5py", hint="pip install 'niss[hdf5]'"
            ) from None
        self.files: tuple[Path, ...] = (train,) if test is None else (train, test)
        self._groups: dict[str, Any] = {"test": {}}
        for part, path in (("train", train), ("test", test)):
            if path is None:
                continue
            try:
                self._groups[part] = h5py.File(path, "r")["examples"]
            except (OSError, KeyError) as error:
                raise DataError(
                    f"{path} is no dataset of TensorFlow Federated: {error}", hint=_GET_AGAIN
                ) from error

    def clients(self, part: Part) -> list[str]:
        """The names of the clients that have examples in this part, sorted."""
        return sorted(self._groups[part])

    def examples(self, part: Part, client: str) -> list[Features]:
        """The examples of a client in this part."""
        if client not in self._groups[part]:
            return []
        columns = {name: column[()] for name, column in self._groups[part][client].items()}
        counts = {len(column) for column in columns.values()}
        if len(counts) != 1:
            raise DataError(f"{self.files[0]}: the features of {client} differ in length", hint=_GET_AGAIN)
        return [
            {name: _feature(column[place]) for name, column in columns.items()}
            for place in range(counts.pop())
        ]

    def close(self) -> None:
        """Let go of the files."""
        for group in filter(None, self._groups.values()):
            group.file.close()


def _feature(value: Any) -> list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]:
    """One value of an HDF5 dataset as `parse_example` would give it."""
    if isinstance(value, bytes | str):
        return [value.encode() if isinstance(value, str) else value]
    array = np.asarray(value).reshape(-1)
    return array.astype(np.float32) if array.dtype.kind == "f" else array.astype(np.int64)


def open_tff(path: Path) -> SqliteClients | Hdf5Clients:
    """The clients in a file, whichever of the two formats it has; `DataError` for anything else.

    Of HDF5 it is the training file, and the test file lies beside it: `..._train.h5` and `..._test.h5`.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(16)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}", hint="give the path of a file"
        ) from error
    if magic == _SQLITE_MAGIC:
        return SqliteClients(path)
    if magic.startswith(_HDF5_MAGIC):
        test = path.with_name(path.name.replace("train", "test"))
        return Hdf5Clients(path, test if test != path and test.is_file() else None)
    raise DataError(f"{path} is neither SQLite nor HDF5", hint=_GET_AGAIN)


_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


def parse_example(raw: bytes, *, name: str) -> Features:
    """The features of a serialised `tf.train.Example`; `DataError`, which calls the file `name`, for anything else."""
    try:
        features: dict[str, list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]] = {}
        for _, block in _messages(raw, 1):
            for _, entry in _messages(block, 1):
                parts = dict(_fields(entry))
                features[_bytes(parts[1]).decode("utf-8")] = _values(_bytes(parts.get(2, b"")))
        return features
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise DataError(
            f"{name} holds something that is no tf.train.Example: {error}", hint=_GET_AGAIN
        ) from error


def _values(feature: bytes) -> list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64]:
    """The one list of a Feature: bytes, floats or whole numbers; the last one counts, as in protobuf."""
    found: list[bytes] | npt.NDArray[np.float32] | npt.NDArray[np.int64] = []
    for number, content in _fields(feature):
        values = [value for place, value in _fields(_bytes(content)) if place == 1]
        if number == 1:
            found = [_bytes(value) for value in values]
        elif number == 2:  # packed, or one by one
            found = np.frombuffer(b"".join(_bytes(value) for value in values), dtype="<f4").astype(np.float32)
        elif number == 3:
            whole = [
                one for value in values for one in ([value] if isinstance(value, int) else _varints(value))
            ]
            found = np.array(whole, dtype=np.uint64).astype(np.int64)
    return found


def _messages(raw: bytes, wanted: int) -> Iterator[tuple[int, bytes]]:
    return ((number, _bytes(value)) for number, value in _fields(raw) if number == wanted)


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes should be")
    return value


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: their numbers with a whole number, or with bytes."""
    place = 0
    while place < len(raw):
        key, place = _varint(raw, place)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, place = _varint(raw, place)
            yield number, value
            continue
        if wire == _LENGTH:
            length, place = _varint(raw, place)
        elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if wire == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"a field of the unknown type {wire}")
        if length > len(raw) - place:
            raise ValueError("a field that is longer than the message")
        yield number, raw[place : place + length]
        place += length


def _varints(raw: bytes) -> Iterator[int]:
    place = 0
    while place < len(raw):
        value, place = _varint(raw, place)
        yield value


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    """A whole number in groups of seven bits, the lowest first, and the place after it."""
    value = 0
    for shift in range(0, 64, 7):
        byte = raw[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, place
    raise ValueError("a number of more than 64 bits")
