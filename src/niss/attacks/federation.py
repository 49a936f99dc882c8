"""Who is attacked: a victim with private pictures among other clients, or a silo with a record that fails.

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
from niss.attacks.experiment import VICTIM as VICTIM
from niss.attacks.pictures import Pictures, UpdateFunction, read_picture, score_pictures
from niss.attacks.rounds import PAPER_RECORDS, RoundSetting, SimulatedRound, simulate_round
from niss.data import Dataset, list_datasets, load_dataset
from niss.errors import ConfigError
from niss.learning import FlatLayout, ImageSamples, LocalTraining, build_model, seeded_torch, train_client
from niss.randomness import SimStream
from niss.records import RecordEngine, Records, clipped_rows
from niss.records.batches import IntArray

_FILE_SIDE, _FILE_CLASSES = 32, 100
_CHANNELS, _KERNEL = 12, 5


def load_pictures(spec: str, *, count: int = 1) -> Pictures:
    """`count` pictures from `dataset:index` on, or the one in a file, to which the first class stands for a label.

    Raises `ConfigError` for a `spec` that names neither, for pictures a dataset does not have, and for a file that
    is no readable picture.
    """
    name, _, index = spec.rpartition(":")
    if name not in {info.name for info in list_datasets()}:
        return _from_file(Path(spec), count)
    dataset = load_dataset(name, download=False)
    size, first = len(dataset.train_labels), int(index) if index.isdigit() else -1
    if not 0 <= first <= size - count:
        raise ConfigError(
            f"{name} has the training pictures 0 to {size - 1}; cannot take {count} from {index!r} on",
            field="--image",
            hint=f"for example {name}:0",
        )
    held = _at(dataset, np.arange(first, first + count))
    return Pictures(name=spec, classes=dataset.classes, mean=dataset.mean, std=dataset.std, **held)


def other_pictures(of: Pictures, count: int, stream: SimStream) -> list[Pictures]:
    """What other clients hold.

    of       the victim's pictures: the others have as many each, of the same dataset; for a file, pictures of noise
    count    how many clients
    stream   where the choice comes from
    """
    generator, each = stream.generator(), len(of.pixels)
    name = of.name.rpartition(":")[0]
    if name in {info.name for info in list_datasets()}:
        dataset = load_dataset(name, download=False)
        chosen = generator.choice(len(dataset.train_labels), size=(count, each), replace=False)
        return [replace(of, **_at(dataset, indices)) for indices in chosen]
    return [
        replace(
            of,
            pixels=generator.random(of.pixels.shape),
            labels=generator.integers(of.classes, size=each),
        )
        for _ in range(count)
    ]


def _at(dataset: Dataset, indices: NDArray[np.int64]) -> dict[str, Any]:
    """Pixels and labels of training pictures."""
    pixels = dataset.train_images[indices].astype(np.float64) / 255.0
    return {"pixels": pixels, "labels": dataset.train_labels[indices]}


def _from_file(path: Path, count: int) -> Pictures:
    from PIL import Image, UnidentifiedImageError

    if count != 1:
        raise ConfigError(
            "a file contains only one picture", field="--batch", hint="use DATASET:INDEX for more"
        )
    try:
        with Image.open(path) as opened:
            colour = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(
            f"{str(path)!r} is neither DATASET:INDEX nor a picture: {error}",
            field="--image",
            hint="for example mnist-mini:0, or the path of a PNG; `niss data list` shows the datasets",
        ) from None
    side = min(colour.size)
    left, top = (colour.width - side) // 2, (colour.height - side) // 2
    square = colour.crop((left, top, left + side, top + side)).resize((_FILE_SIDE, _FILE_SIDE))
    pixels = np.asarray(square, dtype=np.float64).transpose(2, 0, 1)[None] / 255.0
    return Pictures(path.name, pixels, np.array([0]), _FILE_CLASSES, (0.5,) * 3, (0.25,) * 3)


@dataclass(frozen=True)
class AttackedFederation:
    """One round before clip and noise.

    pictures   the victim's, scaled as the model reads them
    function   what the server needs to test a guess, all of it public: the network, the global model, rate and steps
    updates    the bare updates of all clients, one per row, the victim's in row `VICTIM`
    """

    pictures: Pictures
    function: UpdateFunction
    updates: FloatArray

    def update_function(self, plan: Plan | None = None) -> UpdateFunction:
        """What pictures would cause; `plan` says how the client clips."""
        return replace(self.function, plan=plan)

    def train(self, held: Pictures, weights: Tensor, stream: SimStream) -> FloatArray:
        """What a client with these pictures makes of the weights that it is sent: one batch of them all per step."""
        known = self.function
        settings = LocalTraining(
            epochs=known.steps, batch_size=len(held.pixels), learning_rate=known.learning_rate
        )
        labels = torch.from_numpy(held.labels)
        update = train_client(
            known.module, known.layout, weights, held.inputs(), labels, settings, stream=stream
        )
        known.layout.load(known.module, known.weights)
        return update.double().numpy()

    def simulate(
        self, setting: RoundSetting, stream: SimStream, *, others_known: bool = True, **options: Any
    ) -> SimulatedRound:
        """The round in this setting, against a server that knows the others' updates, or does not."""
        size = len(self.updates)
        options |= {"share": np.ones(size) if setting.unit_weights else None, "records": PAPER_RECORDS}
        known = range(1, size) if others_known else ()
        return simulate_round(self.updates, setting.plan, stream=stream, knows_updates_of=known, **options)

    def as_gradient(self, update: FloatArray) -> FloatArray:
        """An update in the units of a gradient: -update / (learning_rate * steps)."""
        return -update / (self.function.learning_rate * self.function.steps)

    def read_picture(
        self, update: FloatArray, variance: FloatArray | None = None
    ) -> tuple[FloatArray, float]:
        """The picture [C, H, W] that `read_picture` finds in a guess of the victim's update, and its PSNR in dB.

        variance   of each coordinate of the guess
        """
        found = read_picture(self.as_gradient(update), self.function, self.pictures, variance)
        return found[0], score_pictures(found, self.pictures.pixels).psnr


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
    if model == "lenet":
        pictures = pictures.raw()
        module = build_lenet(pictures.shape, pictures.classes, stream.child("model"))
    else:
        module = build_model(
            model,
            samples=ImageSamples(pictures.shape),
            classes=pictures.classes,
            stream=stream.child("model"),
            hidden=hidden if model == "mlp" else None,
        )
    layout = FlatLayout.of(module)
    function = UpdateFunction(module, layout, layout.flatten(module), learning_rate, steps)
    federation = AttackedFederation(pictures, function, np.empty((clients, layout.size)))
    others = other_pictures(pictures, clients - 1, stream.child("others"))
    for seat, held in enumerate([pictures, *others]):
        federation.updates[seat] = federation.train(held, function.weights, stream.child("client", seat))
    return federation


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


# A silo with a record that fails. Its model is a table: record i adds `table[id] - label` to the row that it names. All
# records but the failing one name row 1 and miss their labels alike, so that their gradients add up in one direction;
# row 0 is the failing record's alone.
_WIDTH, _FAR, _HUGE, _CHUNK = 4, 10.0, 1e30, 32


def weights_of(failure: str) -> FloatArray:
    """What the server sends: a table of zeros, with a first row whose square overflows where that is the failure."""
    return np.repeat([_HUGE if failure == "overflows" else 0.0, 0.0], _WIDTH)


def direction() -> FloatArray:
    """Of what all other records add to an upload."""
    return np.repeat([0.0, 0.5], _WIDTH)


class FailingSilo:
    """So many records that each add a clip in one direction, and one that fails, if there is one.

    blank   whether the silo gives up where a record fails
    calls   of its model, so far
    """

    def __init__(self, count: int, clip: float, failure: str | None, *, blank: bool) -> None:
        ids = {None: [], "overflows": [0]}.get(failure, [2])
        names = np.array([*[1] * max(count, 1), *ids])
        labels = np.full((names.size, _WIDTH), _FAR * clip if count else 0.0, dtype=np.float32)
        table, self.calls = nn.Embedding(2, _WIDTH), 0
        table.register_forward_hook(self._count)
        self.records = Records(table, (names, labels), loss=_half_square, chunk=_CHUNK)
        if blank:
            vars(self.records)["engine"] = _Blank(self.records.engine)
        self.calls = 0  # Not those with which the model is tried out.

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def added(self, weights: FloatArray, clip: float) -> FloatArray:
        """What its node adds up, without noise: nothing where all fails."""
        before, everyone = self.calls, np.arange(len(self.records))
        try:
            chunks = clipped_rows(self.records, weights, everyone, clip)
            return np.asarray(np.concatenate([rows[:real] for rows, real in chunks]).sum(axis=0))
        except ArithmeticError:
            return np.zeros_like(weights)
        finally:
            self.calls = before


@dataclass
class _Blank:
    """An engine that makes of this what niss does not: it fails as a whole, and its silo uploads nothing."""

    engine: RecordEngine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def each(self, weights: FloatArray, rows: IntArray, clip: float) -> FloatArray:
        """See `RecordEngine`."""
        found = self.engine.each(weights, rows, clip)
        if not found.any(axis=1).all():
            raise FloatingPointError("a record has failed")
        return found


def _half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * torch.square(outputs - labels).sum()
