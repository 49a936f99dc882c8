"""The models of the experiments, by name, with initial weights from a stream.

images  `mlp`, `cnn`, `resnet`, `logistic`
tokens  `gru`, `lstm`, `transformer`: logits for every position

They are made of what all engines can train: no Dropout, no buffers, nothing that waits for a value, and nothing that
cannot be stacked over clients.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from niss.checks import require_whole
from niss.errors import ConfigError
from niss.learning.local import seeded_torch
from niss.learning.models.images import NORM_GROUP, Cnn, Mlp, ResNet, recognise, to_tensor
from niss.learning.models.tokens import GruLayer, LstmLayer, Recurrent, Transformer
from niss.randomness import SimStream

__all__ = [
    "MODEL_NAMES",
    "Cnn",
    "ImageSamples",
    "Mlp",
    "ModelSettings",
    "Recurrent",
    "ResNet",
    "Samples",
    "TokenSamples",
    "Transformer",
    "accepts",
    "build_model",
    "check_model",
    "recognise",
    "to_tensor",
]


@dataclass(frozen=True)
class ImageSamples:
    """Floating-point images of `shape` (channels, height, width), with one label each."""

    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        if len(self.shape) != 3:
            raise ConfigError(f"must be (channels, height, width), not {self.shape!r}", field="samples.shape")
        for extent in self.shape:
            require_whole(extent, field="samples.shape", at_least=1)


@dataclass(frozen=True)
class TokenSamples:
    """Sequences of `length` tokens 0 .. vocabulary - 1, with one label for each position."""

    length: int
    vocabulary: int

    def __post_init__(self) -> None:
        require_whole(self.length, field="samples.length", at_least=1)
        require_whole(self.vocabulary, field="samples.vocabulary", at_least=2)


Samples = ImageSamples | TokenSamples
_KINDS: dict[type[Samples], str] = {ImageSamples: "images", TokenSamples: "sequences of tokens"}


@dataclass(frozen=True)
class ModelSettings:
    """Sizes that may be chosen; None leaves the default, and a model refuses those it has no use for.

    hidden     mlp: widths of the hidden layers (200 and 200); () is logistic regression
    width      resnet: channels of the first stage, a multiple of 4 (16); gru, lstm: units (128); transformer (64)
    layers     resnet: blocks in each of the three stages (2); gru, lstm (1) and transformer (2): layers
    heads      transformer: attention heads, a divisor of the width (4)
    embedding  gru, lstm: numbers that stand for a token (16)
    """

    hidden: tuple[int, ...] | None = None
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    embedding: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.given().items():
            for number in value if isinstance(value, tuple) else (value,):
                require_whole(number, field=f"model.{name}", at_least=1)

    def given(self) -> dict[str, object]:
        """The settings that were chosen, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _mlp(samples: ImageSamples, classes: int, hidden: tuple[int, ...]) -> Mlp:
    return Mlp(math.prod(samples.shape), hidden, classes)


def _cnn(samples: ImageSamples, classes: int) -> Cnn:
    _require_sides(samples, "cnn", 4)
    return Cnn(samples.shape, classes)


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


def _recurrent(
    layer: type[GruLayer] | type[LstmLayer], samples: TokenSamples, classes: int, **sizes: int
) -> Recurrent:
    return Recurrent(layer, samples.vocabulary, classes, **sizes)


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
    """How a model is made, from which samples, and the settings it has a use for, with their defaults.

    `build` gets samples, classes and the settings by name.
    """

    build: Callable[..., nn.Module]
    takes: type[Samples]
    settings: dict[str, Any] = field(default_factory=dict)


_RECURRENT: dict[str, Any] = {"embedding": 16, "width": 128, "layers": 1}
_RECIPES = {
    # The "2NN" of McMahan et al. (2017).
    "mlp": _Recipe(_mlp, ImageSamples, {"hidden": (200, 200)}),
    "cnn": _Recipe(_cnn, ImageSamples),
    "resnet": _Recipe(_resnet, ImageSamples, {"width": 16, "layers": 2}),
    "logistic": _Recipe(partial(_mlp, hidden=()), ImageSamples),
    "gru": _Recipe(partial(_recurrent, GruLayer), TokenSamples, _RECURRENT),
    "lstm": _Recipe(partial(_recurrent, LstmLayer), TokenSamples, _RECURRENT),
    "transformer": _Recipe(_transformer, TokenSamples, {"width": 64, "layers": 2, "heads": 4}),
}
# What `build_model` builds.
MODEL_NAMES = tuple(_RECIPES)


def accepts(name: str, samples: Samples) -> bool:
    """Whether there is a model of this name, and it takes samples of this kind."""
    return name in _RECIPES and isinstance(samples, _RECIPES[name].takes)


def check_model(name: str, samples: Samples, settings: ModelSettings) -> None:
    """Raise `ConfigError` for an unknown name, samples that the model cannot take, and settings it has no use for."""
    recipe = _RECIPES.get(name)
    if recipe is None:
        nearest = difflib.get_close_matches(str(name).lower(), MODEL_NAMES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"no model is called {name!r}",
            field="model.name",
            hint=f"did you mean {nearest!r}? the models are: {', '.join(MODEL_NAMES)}",
        )
    if not accepts(name, samples):
        fit = [other for other in MODEL_NAMES if accepts(other, samples)]
        raise ConfigError(
            f"{name!r} takes {_KINDS[recipe.takes]}, and the data are {_KINDS[type(samples)]}",
            field="model.name",
            hint=f"choose one of: {', '.join(fit)}; or other data",
        )
    for setting in settings.given():
        if setting not in recipe.settings:
            users = [other for other, its in _RECIPES.items() if setting in its.settings]
            raise ConfigError(
                f"{name!r} has no such setting",
                field=f"model.{setting}",
                hint=f"leave it out, or use model.name = {' or '.join(map(repr, users))}",
            )


def build_model(
    name: str,
    *,
    samples: Samples,
    classes: int,
    stream: SimStream,
    settings: ModelSettings | None = None,
) -> nn.Module:
    """A fresh float32 model on the CPU; its initial weights depend on `stream` alone.

    name      one of `MODEL_NAMES`
    samples   what a sample looks like
    classes   how many classes there are, at least 2
    stream    the source of the initial weights
    settings  sizes of the model; those left out have its defaults

    Raises `ConfigError` as `check_model` does.
    """
    settings = ModelSettings() if settings is None else settings
    check_model(name, samples, settings)
    require_whole(classes, field="classes", at_least=2)
    with seeded_torch(stream):
        recipe = _RECIPES[name]
        return recipe.build(samples, classes, **recipe.settings | settings.given())
