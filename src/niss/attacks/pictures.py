"""The pictures an attack tries to recover: from a dataset, or from a file.

`dataset:index` names a training picture (`mnist-mini:0` is always at hand); anything else is the path of a
picture file, which is cut to a square, brought to 32 x 32 and given in colour.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from niss.data import Dataset, list_datasets, load_dataset
from niss.errors import ConfigError
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

DEFAULT_PICTURE = "mnist-mini:0"
FILE_SIDE = 32
FILE_CLASSES = 100


@dataclass(frozen=True)
class Pictures:
    """Private pictures [N, C, H, W] with pixels in [0, 1], their labels, and how the model's input is scaled."""

    name: str
    pixels: FloatArray
    labels: NDArray[np.int64]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        channels, height, width = self.pixels.shape[1:]
        return channels, height, width

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels as the model reads them."""
        return (pixels - _per_channel(self.mean, pixels)) / _per_channel(self.std, pixels)

    def inputs(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.normalise(torch.from_numpy(self.pixels)).to(dtype)

    def raw(self) -> Pictures:
        """The same pictures for a model that reads pixels as they are."""
        channels = self.shape[0]
        return Pictures(
            self.name, self.pixels, self.labels, self.classes, (0.0,) * channels, (1.0,) * channels
        )


def load_pictures(spec: str, *, count: int = 1, label: int | None = None) -> Pictures:
    """`count` pictures from `dataset:index` on, or the one in a file, whose label is `label` (default 0)."""
    if count < 1:
        raise ConfigError(f"must be at least 1, not {count}", field="--batch")
    name, separator, index = spec.rpartition(":")
    if separator and not Path(spec).exists():
        if name not in {info.name for info in list_datasets()}:
            raise ConfigError(
                f"{spec!r} is neither a file nor DATASET:INDEX",
                field="--image",
                hint="for example mnist-mini:0, or the path of a PNG; `niss data list` shows the datasets",
            )
        if label is not None:
            raise ConfigError(
                "the label of a dataset's picture is known", field="--label", hint="leave it out"
            )
        return _from_dataset(load_dataset(name, download=False), index, count)
    if count != 1:
        raise ConfigError("a file holds one picture", field="--batch", hint="use DATASET:INDEX for more")
    return _from_file(Path(spec), 0 if label is None else label)


def other_pictures(of: Pictures, count: int, stream: SimStream) -> list[Pictures]:
    """What other clients hold: as many pictures each, of the same dataset; for a file, pictures of noise."""
    generator = stream.generator()
    dataset_name = of.name.rpartition(":")[0]
    each = len(of.pixels)
    if dataset_name in {info.name for info in list_datasets()}:
        dataset = load_dataset(dataset_name, download=False)
        chosen = generator.choice(len(dataset.train_labels), size=(count, each), replace=False)
        return [_at(dataset, indices, of.name) for indices in chosen]
    return [
        Pictures(
            of.name,
            generator.random(of.pixels.shape),
            generator.integers(of.classes, size=each),
            of.classes,
            of.mean,
            of.std,
        )
        for _ in range(count)
    ]


def _from_dataset(dataset: Dataset, index: str, count: int) -> Pictures:
    size = len(dataset.train_labels)
    first = int(index) if index.isdigit() else -1
    if not 0 <= first <= size - count:
        raise ConfigError(
            f"{dataset.name} has the training pictures 0 to {size - 1}, not {index!r} and {count - 1} more",
            field="--image",
            hint=f"for example {dataset.name}:0",
        )
    return _at(dataset, np.arange(first, first + count), f"{dataset.name}:{first}")


def _at(dataset: Dataset, indices: NDArray[np.int64], name: str) -> Pictures:
    return Pictures(
        name,
        dataset.train_images[indices].astype(np.float64) / 255.0,
        dataset.train_labels[indices],
        dataset.classes,
        dataset.mean,
        dataset.std,
    )


def _from_file(path: Path, label: int) -> Pictures:
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise ConfigError(
            f"there is no file {str(path)!r}", field="--image", hint="give the path of a PNG, or mnist-mini:0"
        )
    if not 0 <= label < FILE_CLASSES:
        raise ConfigError(f"must lie in 0 .. {FILE_CLASSES - 1}, not {label}", field="--label")
    try:
        with Image.open(path) as opened:
            colour = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(
            f"{path} is no picture that can be read: {error}", field="--image", hint="use a PNG"
        ) from None
    side = min(colour.size)
    left, top = (colour.width - side) // 2, (colour.height - side) // 2
    square = colour.crop((left, top, left + side, top + side)).resize((FILE_SIDE, FILE_SIDE))
    pixels = np.asarray(square, dtype=np.float64).transpose(2, 0, 1)[None] / 255.0
    return Pictures(path.name, pixels, np.array([label]), FILE_CLASSES, (0.5,) * 3, (0.25,) * 3)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(-1, 1, 1)
