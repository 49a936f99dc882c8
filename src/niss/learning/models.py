"""The models of the experiments: a multilayer perceptron and the CNN of McMahan et al. (2017)."""

from __future__ import annotations

import difflib
import math

from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning.checks import require_whole
from niss.learning.seeding import seeded_torch
from niss.randomness import SimStream

MODEL_NAMES = ("cnn", "mlp")
DEFAULT_HIDDEN = (200, 200)


class Mlp(nn.Module):
    """Flatten, then linear layers of the `hidden` widths with ReLU between, then a linear output."""

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
        logits: Tensor = self.layers(images)
        return logits


class Cnn(nn.Module):
    """Two 5x5 convolutions (32 and 64 channels, 'same' padding), each followed by a 2x2 max-pool and
    ReLU; a hidden layer of 512 with ReLU; a linear output.

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
        logits: Tensor = self.layers(images)
        return logits


def build_model(
    name: str,
    *,
    image_shape: tuple[int, int, int],
    classes: int,
    stream: SimStream,
    hidden: tuple[int, ...] | None = None,
) -> nn.Module:
    """A fresh float32 model on the CPU; its initial weights depend on `stream` alone.

    `hidden` gives the layer widths of `mlp` (default (200, 200); () is logistic regression) and is
    refused for `cnn`.
    """
    if len(image_shape) != 3:
        raise ConfigError(f"must be (channels, height, width), not {image_shape!r}", field="image_shape")
    for extent in image_shape:
        require_whole(extent, field="image_shape", at_least=1)
    require_whole(classes, field="classes", at_least=2)
    if name == "mlp":
        widths = DEFAULT_HIDDEN if hidden is None else tuple(hidden)
        for width in widths:
            require_whole(width, field="model.hidden", at_least=1)
        with seeded_torch(stream):
            return Mlp(math.prod(image_shape), widths, classes)
    if name == "cnn":
        if hidden is not None:
            raise ConfigError(
                "the layers of 'cnn' are fixed",
                field="model.hidden",
                hint="leave it out, or use model.name = 'mlp'",
            )
        if min(image_shape[1:]) < 4:
            raise ConfigError(
                f"'cnn' pools twice and needs images of at least 4x4, not {image_shape[1]}x{image_shape[2]}",
                field="image_shape",
                hint="use model.name = 'mlp'",
            )
        with seeded_torch(stream):
            return Cnn(image_shape, classes)
    nearest = difflib.get_close_matches(str(name).lower(), MODEL_NAMES, n=1, cutoff=0.0)[0]
    raise ConfigError(
        f"no model is called {name!r}",
        field="model.name",
        hint=f"did you mean {nearest!r}? the models are: {', '.join(MODEL_NAMES)}",
    )
