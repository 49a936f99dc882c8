"""The models of the experiments, by name, with initial weights from a stream, and images as they take them.

images  `mlp`, `cnn` (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        2017), `resnet`, `logistic`
tokens  `gru`, `lstm`, `transformer`: logits for every position, from the tokens up to it

They are made of what all engines can train: no Dropout, no buffers, nothing that waits for a value, and nothing that
cannot be stacked over clients. Every engine trains any module; `Mlp` and `Cnn`, as `build_model` makes them, are
trained by code written for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning.local import seeded_torch
from niss.learning.stackable import Cell, gru_cell, lstm_cell
from niss.randomness import SimStream

# Channels that are normalised together in `resnet`.
NORM_GROUP = 4
# Of the positions at the start, smaller than the embedding of a token: what stands somewhere says more than where.
_POSITIONS = 0.1


class Mlp(nn.Module):
    """Linear layers of the `hidden` widths with ReLU between, and a linear output, of samples with so many `inputs`."""

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
    """Two convolutions with max-pools, a hidden layer and a linear output; `image_shape` is (channels, height, width).

    relu  5x5 kernels (32 and 64 channels, 'same' padding), each followed by a 2x2 max-pool; a hidden layer of 512:
          1,663,370 parameters for 1x28x28 images and 10 classes, as McMahan et al. (2017) report
    tanh  those of Papernot et al. 2021, "Tempered Sigmoid Activations" (2007.14191): bounded activations keep the
          gradients of single records short, so that clipping costs little. Grey images: 8x8 and 4x4 kernels with a
          stride of 2 (16 and 32 channels), each followed by a 2x2 max-pool with a stride of 1; a hidden layer of 32:
          26,010 parameters. Others: three pairs of 3x3 kernels (32, 64, 128 channels), each followed by a 2x2
          mean-pool; a hidden layer of 128: 550,570 for 3x32x32
    """

    def __init__(
        self, image_shape: tuple[int, int, int], classes: int, activation: Literal["relu", "tanh"] = "relu"
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        if activation == "tanh" and channels > 1:
            pairs: list[nn.Module] = []
            for before, size in ((channels, 32), (32, 64), (64, 128)):
                pairs += [nn.Conv2d(before, size, 3, padding=1), nn.Tanh()]
                pairs += [nn.Conv2d(size, size, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)]
            hidden = nn.Linear(128 * (height // 8) * (width // 8), 128)
            self.layers = nn.Sequential(*pairs, nn.Flatten(), hidden, nn.Tanh(), nn.Linear(128, classes))
            return
        if activation == "tanh":
            left = [((side - 2) // 2 - 4) // 2 for side in (height, width)]
            self.layers = nn.Sequential(
                nn.Conv2d(channels, 16, kernel_size=8, stride=2, padding=3),
                nn.Tanh(),
                nn.MaxPool2d(2, stride=1),
                nn.Conv2d(16, 32, kernel_size=4, stride=2),
                nn.Tanh(),
                nn.MaxPool2d(2, stride=1),
                nn.Flatten(),
                nn.Linear(32 * left[0] * left[1], 32),
                nn.Tanh(),
                nn.Linear(32, classes),
            )
            return
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


def one_hot(categories: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[...] to [..., size]: 1 at the category, else 0; all 0 for a category beyond `size`.

    A product with it is a table look-up whose gradient is a product too: its sums have one order on every
    device, many clients can be stacked, and nothing waits for the values. `torch.nn.functional.one_hot` looks at them.
    """
    return (categories.unsqueeze(-1) == torch.arange(size, device=categories.device)).to(dtype)


class RecurrentLayer(nn.Module):
    """What `torch.nn.GRU` or `torch.nn.LSTM` computes from a state of zeros, by `cell`, which has so many `gates`.

    Position by position in plain operations, because torch's own cannot be stacked over clients. The product with the
    inputs depends on no earlier step: it is one product for all positions. The bias of an LSTM's second gate starts at
    1, so that it remembers (Jozefowicz et al. 2015).
    """

    def __init__(self, cell: Cell, gates: int, inputs: int, width: int) -> None:
        super().__init__()
        self.cell, self.width = cell, width
        self.arriving = nn.Linear(inputs, gates * width)
        self.recurrent = nn.Linear(width, gates * width)
        # As torch draws them for recurrent layers.
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(width), 1 / math.sqrt(width))
        if cell is lstm_cell:
            with torch.no_grad():
                self.arriving.bias[width : 2 * width] = 1.0

    def forward(self, sequences: Tensor) -> Tensor:
        """States [N, T, width] of sequences [N, T, inputs]."""
        state: tuple[Tensor, ...] = (sequences.new_zeros(sequences.shape[0], self.width),) * 2
        states = []
        for arriving in self.arriving(sequences).unbind(1):
            state = self.cell(state, arriving, self.recurrent.weight, self.recurrent.bias)
            states.append(state[0])
        return torch.stack(states, dim=1)


class Recurrent(nn.Module):
    """An embedding of the tokens, recurrent layers of one kind, a linear output.

    For 80 tokens and classes, with one layer of 128 and an embedding of 16: 67,664 parameters with the GRU,
    86,352 with the LSTM.
    """

    def __init__(
        self,
        cell: Cell,
        gates: int,
        vocabulary: int,
        classes: int,
        *,
        embedding: int,
        width: int,
        layers: int,
    ) -> None:
        super().__init__()
        self.embedding = _embedding(vocabulary, embedding)
        inputs = [embedding] + [width] * (layers - 1)
        self.layers = nn.Sequential(*(RecurrentLayer(cell, gates, count, width) for count in inputs))
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, classes] of tokens [N, T]."""
        weight = self.embedding.weight
        values = self.embedding(one_hot(tokens, self.embedding.in_features, weight.dtype))
        logits: Tensor = self.output(self.layers(values))
        return logits


class TransformerLayer(nn.Module):
    """Attention and a perceptron of four times the width, each added to what came in (Vaswani et al. 2017).

    x <- x + Attention(LayerNorm(x)),  x <- x + Linear(GELU(Linear(LayerNorm(x)))). A position attends to itself and to
    those before it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, values: Tensor) -> Tensor:
        """[N, T, width] to the same."""
        values = values + self._attend(self.attention_norm(values))
        result: Tensor = values + self.perceptron(values)
        return result

    def _attend(self, values: Tensor) -> Tensor:
        count, length, width = values.shape
        # [N, T, 3 width] to three times [N, heads, T, width / heads].
        joint = self.queries_keys_values(values).view(count, length, 3, self.heads, width // self.heads)
        queries, keys, contents = joint.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(width // self.heads)
        places = torch.arange(length, device=values.device)
        scores = scores.masked_fill(places[None, :] > places[:, None], -torch.inf)
        mixed = (scores.softmax(-1) @ contents).transpose(1, 2).reshape(count, length, width)
        attended: Tensor = self.attended(mixed)
        return attended


class Transformer(nn.Module):
    """A causal transformer: embedded tokens plus learned positions, layers, a last LayerNorm, a linear output.

    115,536 parameters for 80 positions, tokens and classes, with two layers of 64.
    """

    def __init__(
        self, vocabulary: int, length: int, classes: int, *, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.embedding = _embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.positions, std=_POSITIONS)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [N, T, classes] of tokens [N, T], T at most `length`."""
        embedded = self.embedding(one_hot(tokens, self.embedding.in_features, self.positions.dtype))
        values = embedded + self.positions[: tokens.shape[1]]
        logits: Tensor = self.output(self.norm(self.layers(values)))
        return logits


def _embedding(vocabulary: int, width: int) -> nn.Linear:
    """A table as the linear layer that `one_hot` tokens go through; standard normal, as in `torch.nn.Embedding`."""
    table = nn.Linear(vocabulary, width, bias=False)
    nn.init.normal_(table.weight)
    return table


@dataclass(frozen=True)
class ImageSamples:
    """Floating-point images of `shape` (channels, height, width), with one label each."""

    shape: tuple[int, int, int]


@dataclass(frozen=True)
class TokenSamples:
    """Sequences of `length` tokens 0 .. vocabulary - 1, with one label for each position."""

    length: int
    vocabulary: int


Samples = ImageSamples | TokenSamples
_KINDS: dict[type[Samples], str] = {ImageSamples: "images", TokenSamples: "sequences of tokens"}


def _mlp(samples: ImageSamples, classes: int, hidden: tuple[int, ...]) -> Mlp:
    return Mlp(math.prod(samples.shape), hidden, classes)


def _cnn(samples: ImageSamples, classes: int, activation: Literal["relu", "tanh"]) -> Cnn:
    _require_sides(samples, "cnn", 4 if activation == "relu" else 14)
    return Cnn(samples.shape, classes, activation)


def _resnet(samples: ImageSamples, classes: int, width: int, layers: int) -> ResNet:
    _require_sides(samples, "resnet", 5)
    if width % NORM_GROUP:
        raise ConfigError(
            f"{width} channels do not make whole groups of {NORM_GROUP}",
            field="model.width",
            hint=f"choose a multiple of {NORM_GROUP}",
        )
    return ResNet(samples.shape, classes, width=width, blocks=layers)


def _require_sides(samples: ImageSamples, name: str, least: int) -> None:
    """Refuse images that two halvings leave too little of."""
    _, height, width = samples.shape
    if min(height, width) < least:
        raise ConfigError(
            f"{name!r} halves images twice and needs at least {least}x{least}, not {height}x{width}",
            field="samples.shape",
            hint="use model.name = 'mlp'",
        )


def _recurrent(cell: Cell, gates: int, samples: TokenSamples, classes: int, **sizes: int) -> Recurrent:
    return Recurrent(cell, gates, samples.vocabulary, classes, **sizes)


def _transformer(samples: TokenSamples, classes: int, width: int, layers: int, heads: int) -> Transformer:
    if width % heads:
        raise ConfigError(
            f"{heads} heads cannot share a width of {width} equally",
            field="model.heads",
            hint="choose a divisor of model.width (64 unless set)",
        )
    return Transformer(samples.vocabulary, samples.length, classes, width=width, layers=layers, heads=heads)


@dataclass(frozen=True)
class _Recipe:
    """How a model is made of samples, classes and sizes by name; from which samples, and the defaults of its sizes."""

    build: Callable[..., nn.Module]
    takes: type[Samples]
    sizes: dict[str, Any] = field(default_factory=dict)


_RECURRENT: dict[str, Any] = {"embedding": 16, "width": 128, "layers": 1}
_RECIPES = {
    # The "2NN" of McMahan et al. (2017).
    "mlp": _Recipe(_mlp, ImageSamples, {"hidden": (200, 200)}),
    "cnn": _Recipe(_cnn, ImageSamples, {"activation": "relu"}),
    "resnet": _Recipe(_resnet, ImageSamples, {"width": 16, "layers": 2}),
    "logistic": _Recipe(partial(_mlp, hidden=()), ImageSamples),
    "gru": _Recipe(partial(_recurrent, gru_cell, 3), TokenSamples, _RECURRENT),
    "lstm": _Recipe(partial(_recurrent, lstm_cell, 4), TokenSamples, _RECURRENT),
    "transformer": _Recipe(_transformer, TokenSamples, {"width": 64, "layers": 2, "heads": 4}),
}
# What `build_model` builds.
MODEL_NAMES = tuple(_RECIPES)


def accepts(name: str, samples: Samples) -> bool:
    """Whether the model of this name takes samples of this kind."""
    return isinstance(samples, _RECIPES[name].takes)


def check_model(name: str, samples: Samples, **sizes: Any) -> None:
    """Raise `ConfigError` for samples that the model cannot take, and for sizes it has no use for; None leaves the
    default. Names and ranges are those of `ModelConfig`, which has checked them.
    """
    recipe = _RECIPES[name]
    if not accepts(name, samples):
        fit = [other for other in MODEL_NAMES if accepts(other, samples)]
        raise ConfigError(
            f"{name!r} takes {_KINDS[recipe.takes]}, and the data are {_KINDS[type(samples)]}",
            field="model.name",
            hint=f"choose one of: {', '.join(fit)}; or other data",
        )
    for size, value in sizes.items():
        if value is not None and size not in recipe.sizes:
            users = [other for other, its in _RECIPES.items() if size in its.sizes]
            raise ConfigError(
                f"{name!r} has no such setting",
                field=f"model.{size}",
                hint=f"leave it out, or use model.name = {' or '.join(map(repr, users))}",
            )


def build_model(
    name: str,
    *,
    samples: Samples,
    classes: int,
    stream: SimStream,
    **sizes: int | str | tuple[int, ...] | None,
) -> nn.Module:
    """A fresh float32 model on the CPU; its initial weights depend on `stream` alone.

    name      one of `MODEL_NAMES`
    samples   what a sample looks like
    classes   how many classes there are
    stream    the source of the initial weights

    sizes     those that may be chosen; None leaves the default, and a model refuses those it has no use for:
      hidden     mlp: widths of the hidden layers (200 and 200); () is logistic regression
      width      resnet: channels of the first stage, a multiple of 4 (16); gru, lstm: units (128); transformer (64)
      layers     resnet: blocks in each of the three stages (2); gru, lstm (1) and transformer (2): layers
      heads      transformer: attention heads, a divisor of the width (4)
      embedding  gru, lstm: numbers that stand for a token (16)
      activation cnn: relu, or tanh for the smaller network that suits clipped gradients (relu)
    """
    check_model(name, samples, **sizes)
    given = {size: value for size, value in sizes.items() if value is not None}
    with seeded_torch(stream):
        return _RECIPES[name].build(samples, classes, **_RECIPES[name].sizes | given)


def to_tensor(
    images: npt.NDArray[np.uint8], mean: float | Sequence[float], std: float | Sequence[float]
) -> Tensor:
    """(images / 255 - mean) / std as a new float32 tensor, from uint8 [N, C, H, W].

    mean, std  one number for all channels or one per channel, on the scale where white is 1
    """
    shift, scale = (torch.tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in (mean, std))
    # astype copies: the tensor never shares memory with a read-only or memory-mapped array.
    pixels = torch.from_numpy(images.astype(np.float32, order="C"))
    return pixels.div_(255.0).sub_(shift).div_(scale)
