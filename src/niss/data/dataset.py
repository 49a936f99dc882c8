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
