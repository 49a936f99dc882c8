"""A dataset in memory: labelled samples of one of two kinds, and whose each training sample is, where that is known.

- images: uint8 of shape [N, C, H, W]
- tokens: texts as numbers, int64 of shape [N, T]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from niss.errors import DataError

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Inputs = npt.NDArray[np.uint8] | npt.NDArray[np.int64]
Kind = Literal["images", "tokens"]
# Inputs and labels for training and for the test, and the owners of the training samples, as in a `Dataset`.
Arrays = tuple[Inputs, Labels, Inputs, Labels, Labels | None]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled dataset in memory.

    name            as in the catalog
    train_inputs    samples of one `kind`, see above; likewise `test_inputs`
    train_labels    int64 in 0 .. classes-1, one for each sample, or for tokens one for each place: the token that
                    follows, in the shape of the inputs; likewise `test_labels`
    classes         how many labels there are
    mean, std       of images: per channel, of pixels scaled to [0, 1]; for normalising
    checksums       SHA-256 of each file it was read from, by name: recorded in the manifest of a run
    vocabulary      of tokens: what each number stands for, a character or a word
    owners          for each training sample the number of the client it belongs to, counted from 0 without a gap; None
                    where the samples belong to nobody in particular

    All of it is checked when it is made, so that later code need not.
    """

    name: str
    train_inputs: Inputs
    train_labels: Labels
    test_inputs: Inputs
    test_labels: Labels
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    vocabulary: tuple[str, ...] = ()
    owners: Labels | None = None

    def __post_init__(self) -> None:
        for part, inputs, labels in (
            ("train", self.train_inputs, self.train_labels),
            ("test", self.test_inputs, self.test_labels),
        ):
            self._check_inputs(part, inputs)
            self._check_labels(part, inputs, labels)
        if self.train_inputs.shape[1:] != self.test_inputs.shape[1:]:
            raise DataError(f"{self.name}: training and test {self.kind} differ in shape")
        if self.train_labels.ndim != self.test_labels.ndim:
            raise DataError(f"{self.name}: training and test labels differ in shape")
        if self.kind == "images":
            channels = self.shape[0]
            if not len(self.mean) == len(self.std) == channels or min(self.std, default=1.0) <= 0.0:
                raise DataError(
                    f"{self.name}: mean and std need one number for each of the channels, std above 0"
                )
        if self.owners is not None:
            self._check_owners(self.owners)

    def _check_inputs(self, part: str, inputs: Inputs) -> None:
        if self.kind == "images":
            if inputs.ndim != 4 or inputs.dtype != np.uint8:
                raise DataError(f"{self.name}: {part} images must be uint8 of shape [N, C, H, W]")
            return
        if inputs.ndim != 2 or inputs.dtype != np.int64:
            raise DataError(f"{self.name}: {part} tokens must be int64 of shape [N, T]")
        if inputs.size and not 0 <= inputs.min() <= inputs.max() < len(self.vocabulary):
            raise DataError(f"{self.name}: {part} tokens must lie in 0 .. {len(self.vocabulary) - 1}")

    def _check_labels(self, part: str, inputs: Inputs, labels: Labels) -> None:
        allowed = [inputs.shape[:1]] + ([inputs.shape] if self.kind == "tokens" else [])
        if labels.shape not in allowed or labels.dtype != np.int64:
            each = "sample or place" if self.kind == "tokens" else "image"
            raise DataError(f"{self.name}: {part} labels must be int64, one for each {each}")
        if labels.size and not 0 <= labels.min() <= labels.max() < self.classes:
            raise DataError(f"{self.name}: {part} labels must lie in 0 .. {self.classes - 1}")

    def _check_owners(self, owners: Labels) -> None:
        if owners.shape != self.train_labels.shape[:1] or owners.dtype != np.int64:
            raise DataError(f"{self.name}: owners must be int64, one for each training sample")
        if owners.size and (owners.min() < 0 or not np.bincount(owners).all()):
            raise DataError(f"{self.name}: owners must count from 0, and each own a training sample")

    @property
    def kind(self) -> Kind:
        """Of which kind the samples are."""
        return "tokens" if self.vocabulary else "images"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.train_inputs.shape[1:]

    @property
    def clients(self) -> int | None:
        """To how many clients the training samples belong; None where they belong to nobody."""
        return None if self.owners is None else int(self.owners.max(initial=-1)) + 1

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width; `DataError` where the samples are no images."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @property
    def train_images(self) -> Images:
        """The training inputs of an image dataset; `DataError` for any other."""
        return self._images(self.train_inputs)

    @property
    def test_images(self) -> Images:
        """The test inputs of an image dataset; `DataError` for any other."""
        return self._images(self.test_inputs)

    def _images(self, inputs: Inputs) -> Images:
        if self.kind != "images":
            raise DataError(f"the samples of {self.name} are {self.kind}, not images", hint="use mnist-mini")
        return inputs.astype(np.uint8, copy=False)
