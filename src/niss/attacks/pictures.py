"""The pictures an attack tries to recover, and how much of them it did.

`dataset:index` names a training picture (`mnist-mini:0` is always at hand); anything else is the path of a
picture file, which is cut to a square, brought to 32 x 32 and given in colour.

All scores look at pictures cut to the range [0, 1]: whoever attacks knows that pixels lie there, and a wild
value far outside would only make an attack look worse than it is. A picture that says nothing still has a
score, so `blind_guess` gives the PSNR of an even grey, the line below which nothing was learned.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.signal import convolve2d
from torch import Tensor

from niss.attacks.experiment import check_at_least
from niss.attacks.observation import FloatArray
from niss.data import Dataset, list_datasets, load_dataset
from niss.errors import ConfigError
from niss.randomness import SimStream

FILE_SIDE = 32
FILE_CLASSES = 100
# Of the structural similarity: the window and its spread in pixels, and its two constants.
_WINDOW, _SPREAD = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


@dataclass(frozen=True)
class Pictures:
    """Private pictures and their labels.

    name        as the user gave it, or the name of the file
    pixels      [N, C, H, W], in [0, 1]
    labels      one class per picture
    classes     how many classes there are
    mean, std   per channel: the model reads (pixels - mean) / std
    """

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
        """The pictures as the model reads them."""
        return self.normalise(torch.from_numpy(self.pixels)).to(dtype)

    def raw(self) -> Pictures:
        """The same pictures for a model that reads pixels as they are."""
        channels = self.shape[0]
        return replace(self, mean=(0.0,) * channels, std=(1.0,) * channels)


def load_pictures(spec: str, *, count: int = 1, label: int | None = None) -> Pictures:
    """`count` pictures from `dataset:index` on, or the one in a file, whose label is `label` (default 0).

    Raises `ConfigError` for a `spec` that names neither, for pictures a dataset does not have, and for a file that
    is no readable picture.
    """
    check_at_least(1, count, "--batch")
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
                "a picture of a dataset has its own label", field="--label", hint="leave it out"
            )
        return _from_dataset(load_dataset(name, download=False), index, count)
    if count != 1:
        raise ConfigError(
            "a file contains only one picture", field="--batch", hint="use DATASET:INDEX for more"
        )
    return _from_file(Path(spec), 0 if label is None else label)


def other_pictures(of: Pictures, count: int, stream: SimStream) -> list[Pictures]:
    """What other clients hold.

    of       the victim's pictures: the others have as many each, of the same dataset; for a file, pictures of noise
    count    how many clients
    stream   where the choice comes from
    """
    generator = stream.generator()
    dataset_name = of.name.rpartition(":")[0]
    each = len(of.pixels)
    if dataset_name in {info.name for info in list_datasets()}:
        dataset = load_dataset(dataset_name, download=False)
        chosen = generator.choice(len(dataset.train_labels), size=(count, each), replace=False)
        return [_at(dataset, indices, of.name) for indices in chosen]
    return [
        replace(
            of,
            pixels=generator.random(of.pixels.shape),
            labels=generator.integers(of.classes, size=each),
        )
        for _ in range(count)
    ]


def _from_dataset(dataset: Dataset, index: str, count: int) -> Pictures:
    size = len(dataset.train_labels)
    first = int(index) if index.isdigit() else -1
    if not 0 <= first <= size - count:
        raise ConfigError(
            f"{dataset.name} has the training pictures 0 to {size - 1}; cannot take {count} from {index!r} on",
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
            f"the file {str(path)!r} does not exist",
            field="--image",
            hint="give the path of a PNG, or mnist-mini:0",
        )
    if not 0 <= label < FILE_CLASSES:
        raise ConfigError(f"must be from 0 to {FILE_CLASSES - 1}, not {label}", field="--label")
    try:
        with Image.open(path) as opened:
            colour = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(
            f"cannot read {path} as a picture: {error}", field="--image", hint="use a PNG"
        ) from None
    side = min(colour.size)
    left, top = (colour.width - side) // 2, (colour.height - side) // 2
    square = colour.crop((left, top, left + side, top + side)).resize((FILE_SIDE, FILE_SIDE))
    pixels = np.asarray(square, dtype=np.float64).transpose(2, 0, 1)[None] / 255.0
    return Pictures(path.name, pixels, np.array([label]), FILE_CLASSES, (0.5,) * 3, (0.25,) * 3)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).reshape(-1, 1, 1)


@dataclass(frozen=True)
class PictureScores:
    """How near recovered pictures come to the originals.

    mse    mean squared error of a pixel in [0, 1]
    psnr   peak signal-to-noise ratio in dB, -10 log10(mse); infinite for a perfect copy
    ssim   structural similarity (Wang et al., 2004), 1 for a perfect copy
    """

    mse: float
    psnr: float
    ssim: float

    def to_json(self) -> dict[str, float]:
        """The scores by name, as rows of a table hold them."""
        return asdict(self)


def score_pictures(recovered: FloatArray, original: FloatArray) -> PictureScores:
    """Scores of pictures [N, C, H, W] against the originals: of the mean error, and the mean SSIM.

    A gradient does not say in which order its pictures came, so the order that fits best is taken.
    """
    if recovered.shape != original.shape or original.ndim != 4:
        raise ConfigError(f"shape {recovered.shape} beside {original.shape}", field="recovered")
    cut = np.clip(np.nan_to_num(recovered, nan=0.5), 0.0, 1.0)
    ordered = cut[best_order(cut, original)]
    mse = float(np.mean((ordered - original) ** 2))
    similar = [structural_similarity(one, other) for one, other in zip(ordered, original, strict=True)]
    return PictureScores(mse, peak_ratio(mse), float(np.mean(similar)))


def best_order(recovered: FloatArray, original: FloatArray) -> NDArray[np.int64]:
    """Which recovered picture belongs to which original, by the least total squared error."""
    flat, wanted = recovered.reshape(len(recovered), -1), original.reshape(len(original), -1)
    costs = np.array([[float(np.mean((one - other) ** 2)) for other in flat] for one in wanted])
    return np.asarray(linear_sum_assignment(costs)[1], dtype=np.int64)


def peak_ratio(mse: float) -> float:
    """PSNR in dB for pixels in [0, 1]: -10 log10(mse)."""
    return math.inf if mse == 0.0 else -10.0 * math.log10(mse)


def blind_guess(original: FloatArray) -> float:
    """The PSNR in dB of the even grey that fits best: what is reached without any knowledge of the picture.

    -10 log10 of the variance of the pixels.
    """
    return peak_ratio(float(np.mean((original - original.mean()) ** 2)))


def structural_similarity(one: FloatArray, other: FloatArray) -> float:
    """SSIM of two pictures [C, H, W] in [0, 1] (Wang et al., 2004): 11 x 11 Gaussian window, mean over channels.

    ((2 m1 m2 + c1)(2 s12 + c2)) / ((m1^2 + m2^2 + c1)(s1^2 + s2^2 + c2)), c1 = 0.01^2, c2 = 0.03^2.
    """
    window = _gaussian_window(min(_WINDOW, *one.shape[1:]))
    values = [_similarity_map(a, b, window) for a, b in zip(one, other, strict=True)]
    return float(np.mean(values))


def _similarity_map(one: FloatArray, other: FloatArray, window: FloatArray) -> FloatArray:
    def local(values: FloatArray) -> FloatArray:
        return np.asarray(convolve2d(values, window, mode="valid"))

    mean_one, mean_other = local(one), local(other)
    spread_one = local(one * one) - mean_one**2
    spread_other = local(other * other) - mean_other**2
    common = local(one * other) - mean_one * mean_other
    above = (2.0 * mean_one * mean_other + _C1) * (2.0 * common + _C2)
    below = (mean_one**2 + mean_other**2 + _C1) * (spread_one + spread_other + _C2)
    return np.asarray(above / below)


def _gaussian_window(width: int) -> FloatArray:
    places = np.arange(width) - (width - 1) / 2.0
    line = np.exp(-0.5 * (places / _SPREAD) ** 2)
    window: FloatArray = np.outer(line, line)
    return np.asarray(window / window.sum())
