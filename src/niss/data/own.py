"""Federated datasets in files that the user has: those of LEAF and of TensorFlow Federated.

Pictures (FEMNIST), plays (Shakespeare: the next character) and posts (StackOverflow: the next word) are recognised by
what is in the files. Which part of a client's samples is for the test is as in the files, or its last fifth.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from niss.data.catalog import Digest
from niss.data.dataset import Arrays, Dataset, Inputs, Labels
from niss.data.leaf import Part, open_leaf
from niss.data.partition import random_order
from niss.data.sequences import held_out, next_tokens, owners_of
from niss.data.tff import open_tff
from niss.errors import DataError
from niss.randomness import SimStream

CHARACTERS = ("\n", *map(chr, range(32, 127)))
"""The vocabulary of plays in files of your own; any other character reads as a space."""

CHARACTERS_PER_SAMPLE = 80
WORDS_PER_SAMPLE = 20
WORDS = 10_000
UNKNOWN, END = "<unk>", "<eos>"

PREFIXES = ("leaf:", "tff:")
_DIGITS, _DIGITS_AND_LETTERS = 10, 62
_KNOWN = "FEMNIST and Shakespeare of LEAF, and those and StackOverflow of TensorFlow Federated can be read"
# Larger files are not hashed: that would take longer than reading a few of their clients.
_MOST_HASHED = 1 << 32


class _Clients(Protocol):
    """Where the examples come from."""

    @property
    def files(self) -> tuple[Path, ...]: ...

    def clients(self, part: Part) -> list[str]: ...

    def examples(self, part: Part, client: str) -> Sequence[Any]: ...

    def close(self) -> None: ...


class _Samples(NamedTuple):
    """Inputs and labels, as in a `Dataset`."""

    inputs: Inputs
    labels: Labels


class _Reader(Protocol):
    """How examples of one sort become samples.

    collect   all examples of a client, as they are needed later
    count     how many samples they make
    learn     what a `Dataset` has to know beyond the samples, from all that is for training
    samples   the samples themselves, after that
    """

    def collect(self, examples: Sequence[Any]) -> Any: ...

    def count(self, collected: Any) -> int: ...

    def learn(self, collected: Sequence[Any]) -> dict[str, Any]: ...

    def samples(self, collected: Any) -> _Samples: ...


def read_leaf(path: str | Path, *, clients: int | None = None) -> Dataset:
    """FEMNIST or Shakespeare as LEAF writes them.

    path      the folder with `train` and `test`, a folder of JSON files, or one of them
    clients   read no more than so many users, drawn once and for all; None: all of them

    Of Shakespeare a sample of LEAF is 80 characters and the one that follows them; the labels here are what follows
    each of the 80. Raises `DataError` for files that cannot be read or that hold something else.

    >>> dataset = niss.data.read_leaf("leaf/data/femnist/data")
    """
    return read_own(f"leaf:{path}", clients)


def read_tff(path: str | Path, *, clients: int | None = None) -> Dataset:
    """Federated EMNIST, Shakespeare or StackOverflow of TensorFlow Federated, without TensorFlow.

    path      the SQLite file, decompressed, or the training file in HDF5 (extra `hdf5`), the test file beside it
    clients   read no more than so many clients, drawn once and for all; None: all of them

    Plays are cut into samples of 80 characters, posts into samples of 20 words: the 10,000 most frequent ones of the
    clients that are read. Raises `DataError` for files that cannot be read or that hold something else.

    >>> dataset = niss.data.read_tff("stackoverflow.sqlite", clients=1000)
    """
    return read_own(f"tff:{path}", clients)


def is_own(name: str) -> bool:
    """Whether a name of a dataset says where its files are: `leaf:PATH` or `tff:PATH`."""
    return name.startswith(PREFIXES)


def read_own(name: str, clients: int | None = None) -> Dataset:
    """The dataset of such a name; see `read_leaf` and `read_tff`."""
    dataset = _read(*_place(name), clients)
    _read.cache_clear()
    return dataset


def count_own(name: str) -> int | None:
    """How many clients the files of such a name have. They are read for it, and kept until `read_own` asks for them."""
    return _read(*_place(name), None).clients


def _place(name: str) -> tuple[str, Path]:
    kind, _, text = name.partition(":")
    path = Path(text).expanduser()
    if not path.exists():
        raise DataError(f"there is no {path}", hint=f"give the path of files you have, as {kind}:PATH")
    return kind, path.resolve()


@lru_cache(maxsize=1)
def _read(kind: str, path: Path, clients: int | None) -> Dataset:
    source: _Clients = open_leaf(path) if kind == "leaf" else open_tff(path)
    with contextlib.closing(source):
        try:
            arrays, details = _everything(source, clients)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise DataError(
                f"{path} holds no examples as they are known here: {error}", hint=_KNOWN
            ) from error
    digest, folder = Digest("sha256", ""), path if path.is_dir() else path.parent
    small = [file for file in source.files if file.stat().st_size <= _MOST_HASHED]
    hashes = {file.relative_to(folder).as_posix(): digest.of_file(file) for file in small}
    return Dataset(f"{kind}:{path.name}", *arrays[:4], owners=arrays.owners, checksums=hashes, **details)


def _everything(source: _Clients, clients: int | None) -> tuple[Arrays, dict[str, Any]]:
    """The samples of the clients, and what a `Dataset` has to know beyond them."""
    names = source.clients("train")
    if not names:
        raise ValueError("there are no clients to train on")
    reader = _reader_of(source.examples("train", names[0])[0])
    # Without a part for the test, a client has to spare a sample for it.
    hold_out = not source.clients("test")
    chosen = _choose(source, reader, names, clients, fewest=2 if hold_out else 1)
    details = reader.learn([train for train, _ in chosen])
    return _arrays(reader, chosen, hold_out=hold_out), details


def _choose(
    source: _Clients, reader: _Reader, names: Sequence[str], clients: int | None, *, fewest: int
) -> list[tuple[Any, Any]]:
    """What is for training and for the test of each client that makes `fewest` samples, in the order of their names."""
    order = (
        np.arange(len(names)) if clients is None else random_order(len(names), SimStream(0).child("clients"))
    )
    chosen: dict[str, tuple[Any, Any]] = {}
    for client in (names[place] for place in order.tolist()):
        if len(chosen) == clients:
            break
        train, test = reader.collect(source.examples("train", client)), source.examples("test", client)
        if reader.count(train) >= fewest:
            chosen[client] = (train, reader.collect(test) if test else None)
    if not chosen:
        raise ValueError("no client has enough for a sample")
    return [chosen[client] for client in sorted(chosen)]


def _arrays(reader: _Reader, chosen: Sequence[tuple[Any, Any]], *, hold_out: bool) -> Arrays:
    """The samples of all clients; with `hold_out` the last of each are for the test."""
    train: list[_Samples] = []
    test: list[_Samples] = []
    for own_train, own_test in chosen:
        inputs, labels = reader.samples(own_train)
        end = len(labels) - (held_out(len(labels)) if hold_out else 0)
        train.append(_Samples(inputs[:end], labels[:end]))
        test.append(_Samples(inputs[end:], labels[end:]) if own_test is None else reader.samples(own_test))
    owners = owners_of([len(one.labels) for one in train])
    return Arrays(*_joined(train), *_joined(test), owners)


def _joined(parts: Sequence[_Samples]) -> _Samples:
    return _Samples(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _reader_of(example: Any) -> _Reader:
    """The reader for examples like this one."""
    if isinstance(example, tuple):
        return _Pairs() if isinstance(example[0], str) else _Pictures()
    if {"pixels", "label"} <= example.keys():
        return _Pictures()
    if "snippets" in example:
        return _Plays()
    if "tokens" in example:
        return _Posts()
    raise ValueError("their features are " + ", ".join(sorted(example)))


class _Pictures:
    """Square grey pictures, as numbers from 0 to 1 row by row, and their classes: FEMNIST, 10 digits or all 62."""

    def collect(self, examples: Sequence[Any]) -> _Samples:
        pairs = [one if isinstance(one, tuple) else (one["pixels"], one["label"][0]) for one in examples]
        pixels = np.array([pair[0] for pair in pairs], dtype=np.float64).reshape(len(pairs), -1)
        side = math.isqrt(pixels.shape[1])
        if not ((pixels >= 0) & (pixels <= 1)).all():
            raise ValueError("pixels must lie between 0 and 1")
        pictures = np.rint(255 * pixels).astype(np.uint8).reshape(len(pairs), 1, side, side)
        return _Samples(pictures, np.array([int(pair[1]) for pair in pairs], dtype=np.int64))

    def count(self, collected: _Samples) -> int:
        return len(collected.labels)

    def learn(self, collected: Sequence[_Samples]) -> dict[str, Any]:
        histogram = sum(np.bincount(one.inputs.reshape(-1), minlength=256) for one in collected)
        levels = np.arange(256) / 255
        mean = float(np.average(levels, weights=histogram))
        spread = math.sqrt(float(np.average((levels - mean) ** 2, weights=histogram)))
        digits = max(int(one.labels.max()) for one in collected) < _DIGITS
        return {
            "classes": _DIGITS if digits else _DIGITS_AND_LETTERS,
            "mean": (mean,),
            "std": (spread or 1.0,),
        }

    def samples(self, collected: _Samples) -> _Samples:
        return collected


class _Pairs:
    """LEAF's plays: texts of one length, each with the character that follows."""

    def collect(self, examples: Sequence[Any]) -> _Samples:
        texts = [_characters(before + after) for before, after in examples]
        table = np.array(texts, dtype=np.int64).reshape(len(texts), -1)
        return _Samples(table[:, :-1], table[:, 1:])

    def count(self, collected: _Samples) -> int:
        return len(collected.labels)

    def learn(self, collected: Sequence[_Samples]) -> dict[str, Any]:  # noqa: ARG002 (nothing to learn)
        return {"classes": len(CHARACTERS), "vocabulary": CHARACTERS}

    def samples(self, collected: _Samples) -> _Samples:
        return collected


class _Plays:
    """Plays of TensorFlow Federated: whole speeches, put end to end with a new line between them."""

    def collect(self, examples: Sequence[Any]) -> Labels:
        return _characters("\n".join(_text(one["snippets"]) for one in examples))

    def count(self, collected: Labels) -> int:
        return max(0, len(collected) - 1) // CHARACTERS_PER_SAMPLE

    def learn(self, collected: Sequence[Labels]) -> dict[str, Any]:  # noqa: ARG002 (nothing to learn)
        return {"classes": len(CHARACTERS), "vocabulary": CHARACTERS}

    def samples(self, collected: Labels) -> _Samples:
        return _Samples(*next_tokens(collected, CHARACTERS_PER_SAMPLE))


class _Posts:
    """Posts of StackOverflow: sentences of words, put end to end with a mark after each."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def collect(self, examples: Sequence[Any]) -> list[str]:
        return [word for one in examples for word in (*_text(one["tokens"]).split(), END)]

    def count(self, collected: list[str]) -> int:
        return max(0, len(collected) - 1) // WORDS_PER_SAMPLE

    def learn(self, collected: Sequence[list[str]]) -> dict[str, Any]:
        counts = Counter(word for words in collected for word in words)
        del counts[END]
        frequent = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 2]
        vocabulary = (UNKNOWN, END, *(word for word in frequent if word != UNKNOWN))
        self._places = {word: place for place, word in enumerate(vocabulary)}
        return {"classes": len(vocabulary), "vocabulary": vocabulary}

    def samples(self, collected: list[str]) -> _Samples:
        unknown = self._places[UNKNOWN]
        numbers = np.array([self._places.get(word, unknown) for word in collected], dtype=np.int64)
        return _Samples(*next_tokens(numbers, WORDS_PER_SAMPLE))


def _text(values: Sequence[bytes]) -> str:
    return values[0].decode("utf-8", errors="replace")


_PLACES = {character: place for place, character in enumerate(CHARACTERS)}


def _characters(text: str) -> Labels:
    """The characters as their places in the vocabulary, as many as there are."""
    return np.array([_PLACES.get(character, _PLACES[" "]) for character in text], dtype=np.int64)
