"""A victim with private pictures among other clients, and the public model they train together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.accounting import Plan
from niss.attacks.imitation import Imitation
from niss.attacks.lenet import build_lenet
from niss.attacks.pictures import Pictures, other_pictures
from niss.errors import ConfigError
from niss.learning import FlatLayout, LocalTraining, build_model, train_client
from niss.randomness import SimStream

FloatArray = NDArray[np.float64]

VICTIM = 0
MODELS = ("lenet", "mlp", "cnn")


@dataclass(frozen=True)
class Scene:
    """One round before the noise: `updates` are the bare updates of all clients, the victim's in row 0."""

    pictures: Pictures
    module: nn.Module
    layout: FlatLayout
    weights: Tensor
    learning_rate: float
    steps: int
    updates: FloatArray

    def imitation(self, plan: Plan | None = None) -> Imitation:
        """What the server needs to test a guess; all of it is public."""
        return Imitation(self.module, self.layout, self.weights, self.learning_rate, self.steps, plan)

    def victims_update_from(self, weights: Tensor, stream: SimStream) -> FloatArray:
        """What the victim's training makes of other weights that the server may send."""
        held = self.pictures
        settings = LocalTraining(
            epochs=self.steps, batch_size=len(held.pixels), learning_rate=self.learning_rate
        )
        update = train_client(
            self.module,
            self.layout,
            weights,
            held.inputs(),
            torch.from_numpy(held.labels),
            settings,
            stream=stream,
        )
        self.layout.load(self.module, self.weights)
        return update.double().numpy()

    def as_gradient(self, update: FloatArray) -> FloatArray:
        return -update / (self.learning_rate * self.steps)


def make_scene(
    pictures: Pictures,
    *,
    model: str,
    clients: int,
    stream: SimStream,
    hidden: tuple[int, ...] = (32,),
    learning_rate: float = 0.1,
    steps: int = 1,
) -> Scene:
    """Every client trains on as many pictures as the victim has, `steps` steps on all of them at once."""
    if clients < 2:
        raise ConfigError(f"a round needs at least two, not {clients}", field="--clients")
    if model not in MODELS:
        raise ConfigError(
            f"unknown model {model!r}", field="--model", hint="use one of: " + ", ".join(MODELS)
        )
    if steps < 1:
        raise ConfigError(f"must be at least 1, not {steps}", field="--steps")
    shown = pictures.raw() if model == "lenet" else pictures
    module = _build(model, shown, hidden, stream.child("model"))
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    settings = LocalTraining(epochs=steps, batch_size=len(pictures.pixels), learning_rate=learning_rate)
    everyone = [shown, *other_pictures(shown, clients - 1, stream.child("others"))]
    updates = np.empty((clients, layout.size))
    for seat, held in enumerate(everyone):
        held = held.raw() if model == "lenet" else held
        update = train_client(
            module,
            layout,
            start,
            held.inputs(),
            torch.from_numpy(held.labels),
            settings,
            stream=stream.child("client", seat),
        )
        updates[seat] = update.double().numpy()
    layout.load(module, start)
    return Scene(shown, module, layout, start, learning_rate, steps, updates)


def _build(model: str, pictures: Pictures, hidden: tuple[int, ...], stream: SimStream) -> nn.Module:
    if model == "lenet":
        return build_lenet(pictures.shape, pictures.classes, stream)
    return build_model(
        model,
        image_shape=pictures.shape,
        classes=pictures.classes,
        stream=stream,
        hidden=hidden if model == "mlp" else None,
    )
