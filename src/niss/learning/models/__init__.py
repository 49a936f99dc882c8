"""The models of the experiments, by name, with initial weights from a stream.

images  `mlp`, `cnn`, `resnet`, `logistic`
tokens  `gru`, `lstm`, `transformer`: logits for every position

They are made of what all engines can train: no Dropout, no buffers, nothing that waits for a value, and nothing that
cannot be stacked over clients.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from niss.errors import ConfigError
from niss.learning.local import require_whole, seeded_torch
from niss.learning.models.images import (
    Cnn,
    Mlp,
    ResNet,
    build_cnn,
    build_mlp,
    build_resnet,
    recognise,
    to_tensor,
)
from niss.learning.models.settings import ModelSettings
from niss.learning.models.tokens import Recurrent, Transformer, build_gru, build_lstm, build_transformer
from niss.learning.samples import ImageSamples, Samples, TokenSamples
from niss.randomness import SimStream

__all__ = [
    "MODEL_NAMES",
    "Cnn",
    "Mlp",
    "ModelSettings",
    "Recurrent",
    "ResNet",
    "Transformer",
    "accepts",
    "build_model",
    "check_model",
    "recognise",
    "to_tensor",
]


@dataclass(frozen=True)
class _Recipe:
    """How a model is made, from which samples (`build` gets nothing else), and the settings it has a use for."""

    build: Callable[[Any, int, ModelSettings], nn.Module]
    takes: tuple[type[Samples], ...]
    settings: tuple[str, ...] = ()


def _logistic(samples: ImageSamples, classes: int, _settings: ModelSettings) -> nn.Module:
    """A weight for each pixel and class."""
    return build_mlp(samples, classes, ModelSettings(hidden=()))


_RECIPES = {
    "mlp": _Recipe(build_mlp, (ImageSamples,), ("hidden",)),
    "cnn": _Recipe(build_cnn, (ImageSamples,)),
    "resnet": _Recipe(build_resnet, (ImageSamples,), ("width", "layers")),
    "logistic": _Recipe(_logistic, (ImageSamples,)),
    "gru": _Recipe(build_gru, (TokenSamples,), ("width", "layers", "embedding")),
    "lstm": _Recipe(build_lstm, (TokenSamples,), ("width", "layers", "embedding")),
    "transformer": _Recipe(build_transformer, (TokenSamples,), ("width", "layers", "heads")),
}
# What `build_model` builds.
MODEL_NAMES = tuple(_RECIPES)
_KINDS: dict[type[Samples], str] = {
    ImageSamples: "images",
    TokenSamples: "sequences of tokens",
}


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
        kinds = " or ".join(_KINDS[kind] for kind in recipe.takes)
        fit = [other for other in MODEL_NAMES if accepts(other, samples)]
        raise ConfigError(
            f"{name!r} takes {kinds}, and the data are {_KINDS[type(samples)]}",
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
        return _RECIPES[name].build(samples, classes, settings)
