"""A victim with private pictures among other clients, and the public model they train together.

`dataset:index` names a training picture (`mnist-mini:0` is always at hand); anything else is the path of a
picture file, which is cut to a square, brought to 32 x 32 and given in colour.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from niss.accounting import Plan
from niss.attacks.estimates import FloatArray
from niss.attacks.experiment import MODELS
from niss.attacks.experiment import VICTIM as VICTIM
from niss.attacks.pictures import Pictures, UpdateFunction, read_picture, score_pictures
from niss.attacks.rounds import RoundSetting, SimulatedRound
from niss.checks import require_one_of, require_whole
from niss.data import Dataset, list_datasets, load_dataset
from niss.errors import ConfigError
from niss.learning import (
    FlatLayout,
    ImageSamples,
    LocalTraining,
    build_model,
    seeded_torch,
    train_client,
)
from niss.randomness import SimStream

FILE_SIDE, FILE_CLASSES = 32, 100
_CHANNELS, _KERNEL = 12, 5


def load_pictures(spec: str, *, count: int = 1, label: int | None = None) -> Pictures:
    """`count` pictures from `dataset:index` on, or the one in a file, whose label is `label` (default 0).

    Raises `ConfigError` for a `spec` that names neither, for pictures a dataset does not have, and for a file that
    is no readable picture.
    """
    require_whole(count, field="--batch", at_least=1)
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

    def train(self, held: Pictures, weights: Tensor, stream: SimStream) -> FloatArray:
        """What a client with these pictures makes of the weights that it is sent: one batch of them all per step."""
        settings = LocalTraining(
            epochs=self.steps, batch_size=len(held.pixels), learning_rate=self.learning_rate
        )
        labels = torch.from_numpy(held.labels)
        update = train_client(
            self.module, self.layout, weights, held.inputs(), labels, settings, stream=stream
        )
        self.layout.load(self.module, self.weights)
        return update.double().numpy()

    def simulate(
        self, setting: RoundSetting, stream: SimStream, *, others_known: bool = True, **options: Any
    ) -> SimulatedRound:
        """The round in this setting, against a server that knows the others' updates, or does not."""
        known = range(1, len(self.updates)) if others_known else ()
        weights = self.weights.numpy()
        return setting.simulate(self.updates, weights, stream=stream, knows_updates_of=known, **options)

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
    require_whole(clients, field="--clients", at_least=2)
    require_one_of(model, MODELS, field="--model")
    require_whole(steps, field="--steps", at_least=1)
    own = pictures.raw() if model == "lenet" else pictures
    module = _build(model, own, hidden, stream.child("model"))
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    federation = AttackedFederation(
        own, module, layout, start, learning_rate, steps, np.empty((clients, layout.size))
    )
    for seat, held in enumerate([own, *other_pictures(own, clients - 1, stream.child("others"))]):
        held = held.raw() if model == "lenet" else held
        federation.updates[seat] = federation.train(held, start, stream.child("client", seat))
    return federation


def _build(model: str, pictures: Pictures, hidden: tuple[int, ...], stream: SimStream) -> nn.Module:
    if model == "lenet":
        return build_lenet(pictures.shape, pictures.classes, stream)
    return build_model(
        model,
        samples=ImageSamples(pictures.shape),
        classes=pictures.classes,
        stream=stream,
        hidden=hidden if model == "mlp" else None,
    )


def build_lenet(image_shape: tuple[int, int, int], classes: int, stream: SimStream) -> nn.Module:
    """Three 5x5 convolutions of 12 channels (strides 2, 2, 1) with sigmoids, then a linear output, from `stream` alone.

    The network of Zhu et al. (Deep Leakage from Gradients, 2019), whose gradients have gradients everywhere:
    768 -> 100 at the end for 3x32x32 pictures of 100 classes. Weights and biases start uniform in [-0.5, 0.5], which
    keeps the sigmoids away from their flat ends and the gradients rich.
    """
    channels, height, width = image_shape
    # Both strides of 2 round up.
    features = _CHANNELS * -(-height // 4) * -(-width // 4)
    layers: list[nn.Module] = []
    with seeded_torch(stream):
        for incoming, stride in ((channels, 2), (_CHANNELS, 2), (_CHANNELS, 1)):
            layers += [nn.Conv2d(incoming, _CHANNELS, _KERNEL, stride, _KERNEL // 2), nn.Sigmoid()]
        module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(-0.5, 0.5)
    return module
