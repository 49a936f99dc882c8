"""Models of images, and what goes into them: images as tensors.

`mlp` is a multilayer perceptron, `cnn` the network of McMahan et al., "Communication-Efficient Learning of
Deep Networks from Decentralized Data" (2017), `resnet` a residual network without batch statistics. Every engine
trains any module; the first two, as `build_model` makes them, are trained by code written for them (`recognise`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning.local import FlatLayout

# Channels that are normalised together in `resnet`.
NORM_GROUP = 4
_NUMPY_DTYPES: dict[torch.dtype, type[np.floating]] = {torch.float32: np.float32, torch.float64: np.float64}


class Mlp(nn.Module):
    """Flatten, then linear layers of the `hidden` widths with ReLU between, then a linear output.

    `inputs` is the number of values in a sample; without `hidden` this is logistic regression.
    """

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        width = inputs
        for next_width in hidden:
            layers += [nn.Linear(width, next_width), nn.ReLU()]
            width = next_width
        layers.append(nn.Linear(width, classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, ...]."""
        logits: Tensor = self.layers(images)
        return logits


class Cnn(nn.Module):
    """Two 5x5 convolutions (32 and 64 channels, 'same' padding), each followed by a 2x2 max-pool and
    ReLU; a hidden layer of 512 with ReLU; a linear output. `image_shape` is (channels, height, width).

    1,663,370 parameters for 1x28x28 images and 10 classes, as McMahan et al. (2017) report.
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=5, padding=2),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * (height // 2 // 2) * (width // 2 // 2), 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, channels, height, width]."""
        logits: Tensor = self.layers(images)
        return logits


class ResidualBlock(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))) with 3x3 convolutions, the first of them with the stride.

    The shortcut is the identity, or a 1x1 convolution and a norm where the shape changes (He et al. 2016). Norms are
    GroupNorm (Wu and He 2018), 4 channels to a group: they mix no samples, so that each has a gradient of its own.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(width // NORM_GROUP, width),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(width // NORM_GROUP, width),
        )
        self.shortcut = (
            nn.Identity()
            if channels == width and stride == 1
            else nn.Sequential(
                nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False),
                nn.GroupNorm(width // NORM_GROUP, width),
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """[N, channels, H, W] to [N, width, H / stride, W / stride], rounded up."""
        return torch.relu(self.shortcut(images) + self.branch(images))


class ResNet(nn.Module):
    """A 3x3 convolution, three stages of residual blocks, the means over the quarters of the picture, a linear output.

    Stages have `width`, 2 `width` and 4 `width` channels, the second and third halve the sides; `blocks` in each. The
    CIFAR networks of He et al. (2016) with GroupNorm; they take the mean over the whole picture, with which the first
    hundred steps learn far less. Noise grows with the root of the parameters: 177,178 for 3x32x32 images, 10 classes,
    width 16 and 2 blocks (ResNet-14), 79,962 with 1 block (ResNet-8).
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int, *, width: int, blocks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(image_shape[0], width, kernel_size=3, padding=1, bias=False),
            nn.GroupNorm(width // NORM_GROUP, width),
            nn.ReLU(),
        ]
        channels = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(ResidualBlock(channels, width << stage, stride))
                channels = width << stage
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(4 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, channels, height, width]."""
        logits: Tensor = self.output(_quarters(self.layers(images)))
        return logits


def _quarters(images: Tensor) -> Tensor:
    """The mean of each channel in each quarter, [N, 4 channels]; an odd row or column belongs to the second half."""
    top, left = images.shape[2] // 2, images.shape[3] // 2
    halves = (images[:, :, :top], images[:, :, top:])
    quarters = (part for half in halves for part in (half[..., :left], half[..., left:]))
    return torch.cat([quarter.mean((2, 3)) for quarter in quarters], dim=1)


def recognise(
    module: nn.Module, layout: FlatLayout, inputs: Tensor, labels: Tensor
) -> type[Mlp] | type[Cnn] | None:
    """`Mlp` or `Cnn` where `module` is what `build_model` makes and the data fit it, else None.

    Then forward and backward are known, and an engine may compute them by its own code: no layer was replaced
    or subclassed, nothing is hooked or frozen, there are no buffers, and every label has its class. `inputs`
    and `labels` are the data of all clients.
    """
    linear = [part for part in module.modules() if type(part) is nn.Linear]
    if type(module) not in (Mlp, Cnn) or not linear or not inputs.numel() or inputs.dtype != layout.dtype:
        return None
    if labels.ndim != 1:
        return None
    classes = linear[-1].out_features
    built: Mlp | Cnn
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        if type(module) is Mlp:
            built = Mlp(inputs[0].numel(), tuple(layer.out_features for layer in linear[:-1]), classes)
        elif inputs.ndim == 4:
            built = Cnn((inputs.shape[1], inputs.shape[2], inputs.shape[3]), classes)
        else:
            return None
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    same = (
        [type(part) for part in module.modules()] == [type(part) for part in built.modules()]
        and str(module) == str(built)
        and layout.shapes == tuple(tuple(part.shape) for part in built.parameters())
        and not any(getattr(part, name) for part in module.modules() for name in hooks)
        and next(module.buffers(), None) is None
        and all(layout.trainable)
        and int(labels.max()) < classes
    )
    return type(built) if same else None


def to_tensor(
    images: npt.NDArray[np.uint8],
    mean: float | Sequence[float],
    std: float | Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(images / 255 - mean) / std as a new tensor, from uint8 [N, C, H, W].

    images     as stored, one byte a pixel
    mean, std  one number for all channels or one per channel, on the scale where white is 1; std above 0
    dtype      float32 or float64

    Raises `ConfigError` for anything else, and never shares memory with `images`.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        kind = images.dtype if isinstance(images, np.ndarray) else type(images).__name__
        raise ConfigError(f"must be a uint8 array, not {kind}", field="images")
    if images.ndim != 4:
        raise ConfigError(
            f"must have the shape [N, C, H, W], not {images.shape}",
            field="images",
            hint="images[:, None] adds the channel of grey images",
        )
    if dtype not in _NUMPY_DTYPES:
        raise ConfigError(f"must be torch.float32 or torch.float64, not {dtype}", field="dtype")
    channels = images.shape[1]
    shift = _per_channel(mean, channels, dtype, field="mean")
    scale = _per_channel(std, channels, dtype, field="std")
    if not bool((scale > 0).all()):
        raise ConfigError(f"must be above 0, not {std!r}", field="std")
    # astype copies: the tensor never shares memory with a read-only or memory-mapped array.
    pixels = torch.from_numpy(images.astype(_NUMPY_DTYPES[dtype], order="C"))
    return pixels.div_(255.0).sub_(shift).div_(scale)


def _per_channel(value: float | Sequence[float], channels: int, dtype: torch.dtype, *, field: str) -> Tensor:
    """`value` as [channels or 1, 1, 1], fit to be broadcast over images."""
    try:
        numbers = torch.from_numpy(np.array(value, dtype=np.float64)).to(dtype)
    except (TypeError, ValueError):
        raise ConfigError(f"must be a number or one per channel, not {value!r}", field=field) from None
    if numbers.ndim > 1 or (numbers.ndim == 1 and numbers.shape[0] != channels):
        raise ConfigError(f"must be one number or {channels} (one per channel), not {value!r}", field=field)
    if not bool(numbers.isfinite().all()):
        raise ConfigError(f"must be finite, not {value!r}", field=field)
    return numbers.reshape(-1, 1, 1)
