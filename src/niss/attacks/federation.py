"""A victim with private pictures among other clients, and the public model they train together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from niss.accounting import Plan
from niss.attacks.experiment import MODELS, check_at_least, check_names
from niss.attacks.experiment import VICTIM as VICTIM
from niss.attacks.gradients import UpdateFunction, read_picture
from niss.attacks.observation import FloatArray
from niss.attacks.pictures import Pictures, other_pictures, score_pictures
from niss.learning import (
    FlatLayout,
    ImageSamples,
    LocalTraining,
    ModelSettings,
    build_model,
    seeded_torch,
    train_client,
)
from niss.randomness import SimStream

_CHANNELS, _KERNEL = 12, 5


@dataclass(frozen=True)
class AttackedFederation:
    """One round before clip and noise.

    pictures        the victim's, scaled as the model reads them
    module          the network; it holds the public `weights` whenever nobody trains
    layout          where each parameter lies in a weight or update vector
    weights         the global model of the round, as one vector
    learning_rate   of the local steps
    steps           local steps, each on all pictures of a client
    updates         the bare updates of all clients, one per row, the victim's in row `VICTIM`
    """

    pictures: Pictures
    module: nn.Module
    layout: FlatLayout
    weights: Tensor
    learning_rate: float
    steps: int
    updates: FloatArray

    def update_function(self, plan: Plan | None = None) -> UpdateFunction:
        """What the server needs to test a guess; all of it is public. `plan` says how the client clips."""
        return UpdateFunction(self.module, self.layout, self.weights, self.learning_rate, self.steps, plan)

    def victims_update_from(self, weights: Tensor, stream: SimStream) -> FloatArray:
        """What the victim's training makes of other weights that the server may send."""
        held = self.pictures
        settings = LocalTraining(
            epochs=self.steps, batch_size=len(held.pixels), learning_rate=self.learning_rate
        )
        update = _train(self.module, self.layout, weights, held, settings, stream)
        self.layout.load(self.module, self.weights)
        return update

    def as_gradient(self, update: FloatArray) -> FloatArray:
        """An update in the units of a gradient: -update / (learning_rate * steps)."""
        return -update / (self.learning_rate * self.steps)

    def read_picture(
        self, update: FloatArray, variance: FloatArray | None = None
    ) -> tuple[FloatArray, float]:
        """The picture [C, H, W] that `read_picture` finds in a guess of the victim's update, and its PSNR in dB.

        variance   of each coordinate of the guess
        """
        function, pictures = self.update_function(), self.pictures
        found = read_picture(self.as_gradient(update), function, pictures, variance)
        return found[0], score_pictures(found, pictures.pixels).psnr


def make_federation(
    pictures: Pictures,
    *,
    model: str,
    clients: int,
    stream: SimStream,
    hidden: tuple[int, ...] = (32,),
    learning_rate: float = 0.1,
    steps: int = 1,
) -> AttackedFederation:
    """Train one round. Every client takes `steps` steps on as many pictures as the victim has, all of them at once.

    pictures   the victim's
    model      `mlp` (with layers of width `hidden`), `cnn` or `lenet`, which reads pixels as they are
    clients    participants, the victim among them
    stream     where the weights, the others' pictures and the order of training come from
    """
    check_at_least(2, clients, "--clients")
    check_names([model], MODELS, "--model")
    check_at_least(1, steps, "--steps")
    own = pictures.raw() if model == "lenet" else pictures
    module = _build(model, own, hidden, stream.child("model"))
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    settings = LocalTraining(epochs=steps, batch_size=len(pictures.pixels), learning_rate=learning_rate)
    updates = np.empty((clients, layout.size))
    for seat, held in enumerate([own, *other_pictures(own, clients - 1, stream.child("others"))]):
        held = held.raw() if model == "lenet" else held
        updates[seat] = _train(module, layout, start, held, settings, stream.child("client", seat))
    layout.load(module, start)
    return AttackedFederation(own, module, layout, start, learning_rate, steps, updates)


def _train(
    module: nn.Module,
    layout: FlatLayout,
    weights: Tensor,
    held: Pictures,
    settings: LocalTraining,
    stream: SimStream,
) -> FloatArray:
    """The update of one client, by the reference of `niss.learning`: one batch of all its pictures per step."""
    labels = torch.from_numpy(held.labels)
    update = train_client(module, layout, weights, held.inputs(), labels, settings, stream=stream)
    return update.double().numpy()


def _build(model: str, pictures: Pictures, hidden: tuple[int, ...], stream: SimStream) -> nn.Module:
    if model == "lenet":
        return build_lenet(pictures.shape, pictures.classes, stream)
    return build_model(
        model,
        samples=ImageSamples(pictures.shape),
        classes=pictures.classes,
        stream=stream,
        settings=ModelSettings(hidden=hidden) if model == "mlp" else None,
    )


class SigmoidLeNet(nn.Module):
    """Three 5x5 convolutions of 12 channels (strides 2, 2, 1) with sigmoids, then a linear output.

    The network of Zhu et al. (Deep Leakage from Gradients, 2019), whose gradients have gradients everywhere:
    768 -> 100 at the end for 3x32x32 pictures of 100 classes.
    """

    def __init__(self, image_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        layers: list[nn.Module] = []
        for incoming, stride in ((channels, 2), (_CHANNELS, 2), (_CHANNELS, 1)):
            layers += [nn.Conv2d(incoming, _CHANNELS, _KERNEL, stride, _KERNEL // 2), nn.Sigmoid()]
        self.features = nn.Sequential(*layers, nn.Flatten())
        # Both strides of 2 round up.
        features = _CHANNELS * -(-height // 4) * -(-width // 4)
        self.output = nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.output(self.features(images))
        return logits


def build_lenet(image_shape: tuple[int, int, int], classes: int, stream: SimStream) -> nn.Module:
    """A fresh network whose weights depend on `stream` alone.

    Weights and biases start uniform in [-0.5, 0.5], which keeps the sigmoids away from their flat ends and the
    gradients rich.
    """
    with seeded_torch(stream):
        module = SigmoidLeNet(image_shape, classes)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(-0.5, 0.5)
    return module
