"""The paper's experiments: the eight panels of Figure 3, the pictures of Figure 4, and readings of their noise.

How far one client moves its upload the paper does not say, so every reading of that has a name. All use its Gaussian
mechanism, sigma_k = Delta sqrt(2 ln(1.25 / delta)) / epsilon, outside its range (epsilon = 10, not below 1). None
proves anything for E = 5 local epochs, except `clip` and `replace` if the update were clipped in L2 norm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from textwrap import fill
from typing import Any

from niss.errors import ConfigError

FIGURE_3, SWEEP, FIGURE_4 = "figure-3", "sweep", "figure-4"
SEEDS = (1, 2, 3)
ROUNDS, EPOCHS, FEDERATION = 100, 5, 100
"""Of a panel; so many clients are there in all."""


@dataclass(frozen=True)
class Setup:
    """The quantities the readings are made of; `records` is d_k, `shares` is v."""

    records: int = 600
    clip: float = 3.0
    epsilon: float = 10.0
    delta: float = 1e-4
    learning_rate: float = 0.01
    batch_size: int = 10
    participants: int = 30
    shares: int = 10


@dataclass(frozen=True)
class Reading:
    """One reading: its name, the formula of its sensitivity, and what it takes the paper to mean."""

    name: str
    formula: str
    meaning: str
    sensitivity: Callable[[Setup], float]

    def sigma(self, setup: Setup) -> float:
        """sigma_k, the deviation of the noise on one upload."""
        return self.sensitivity(setup) * _multiplier(setup)


def _multiplier(setup: Setup) -> float:
    return math.sqrt(2.0 * math.log(1.25 / setup.delta)) / setup.epsilon


NBAFL = Reading(
    "nbafl",
    "2 ζ / d_k",
    "the reference the paper gives for its clipping (NbAFL); the reading used for Figure 3",
    lambda s: 2.0 * s.clip / s.records,
)

READINGS = (
    NBAFL,
    Reading(
        "nbafl-weighted",
        "2 ζ p_k / d_k",
        "as NbAFL, the noise added before the parameters are weighted by p_k = 1/m",
        lambda s: 2.0 * s.clip / (s.records * s.participants),
    ),
    Reading(
        "one-step",
        "2 η ζ / d_k",
        "one gradient step over all of a client's records",
        lambda s: 2.0 * s.learning_rate * s.clip / s.records,
    ),
    Reading(
        "minibatch",
        "2 ζ / B",
        "one minibatch gradient, as in DP-SGD",
        lambda s: 2.0 * s.clip / s.batch_size,
    ),
    Reading("unit", "1", "the sensitivity left out of the formula", lambda _: 1.0),
    Reading("clip", "ζ", "a whole client appears or not", lambda s: s.clip),
    Reading("replace", "2 ζ", "a whole client is replaced", lambda s: 2.0 * s.clip),
    Reading(
        "unit-noise",
        "√(0.01 v) ε / √(2 ln(1.25/δ))",
        "the paper's list of settings, unit noise variance 0.01, with v = 10 shares",
        lambda s: math.sqrt(0.01 * s.shares) / _multiplier(s),
    ),
)


def find_reading(name: str) -> Reading:
    """The reading of that name; a number is taken as sigma_k itself."""
    for reading in READINGS:
        if reading.name == name:
            return reading
    try:
        sigma = float(name)
    except ValueError:
        sigma = math.nan
    if not (math.isfinite(sigma) and sigma > 0.0):
        raise ConfigError(
            f"unknown reading {name!r}",
            field="--reading",
            hint="give sigma_k, or one of: " + ", ".join(reading.name for reading in READINGS),
        )
    return given_sigma(sigma)


def given_sigma(sigma: float) -> Reading:
    """The reading that yields this sigma_k, whatever the sensitivity."""
    return Reading(f"sigma-{sigma:.3g}", "σ_k given", "a point of a sweep", lambda s: sigma / _multiplier(s))


SPLITS = {"iid": "iid", "non-iid": "shards", "natural": "natural"}
"""The splits as the paper calls them, and as `niss` does; with `natural`, clients have what is theirs in the data."""
X_VALUES = (0.0, 0.3, 0.6, 1.0)


def titled(*parts: str) -> str:
    """For a reader: `MNIST, MLP, non-IID`."""
    words = {
        "mnist": "MNIST",
        "cifar10": "CIFAR-10",
        "shakespeare": "Shakespeare",
        "iid": "IID",
        "non-iid": "non-IID",
        "gru": "GRU",
        "resnet": "ResNet",
        "breast-cancer": "Breast cancer",
    }
    return ", ".join(words.get(part, part) for part in parts)


@dataclass(frozen=True)
class Panel:
    """One of the eight; `split` is `iid` or `non-iid` (two label-sorted shards a client)."""

    dataset: str
    model: str
    split: str

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.model}-{self.split}"

    @property
    def title(self) -> str:
        return titled(self.dataset, self.model.upper(), self.split)

    @property
    def setup(self) -> Setup:
        """The paper's numbers, with the images that a client has of this dataset."""
        return Setup(records=training_images()[self.dataset] // FEDERATION)

    @property
    def base(self) -> dict[str, Any]:
        """What all of its cells have in common, for its result file: the paper's settings."""
        own = {"dataset": self.dataset, "model": self.model, "split": self.split, "clients": FEDERATION}
        return {**own, "rounds": ROUNDS, "epochs": EPOCHS, **asdict(self.setup)}


PANELS = tuple(
    Panel(dataset, model, split)
    for dataset in ("mnist", "cifar10")
    for model in ("mlp", "cnn")
    for split in ("iid", "non-iid")
)


@cache
def training_images() -> dict[str, int]:
    """The image datasets that niss knows, and how many training images each has."""
    from niss.data import list_datasets

    return {info.name: info.train_size for info in list_datasets() if info.kind == "images"}


def find_panel(name: str) -> Panel:
    """The panel of that name; any dataset that niss knows may stand in front."""
    found = re.fullmatch(r"(.+)-(mlp|cnn)-(iid|non-iid)", name)
    if found is None or found[1] not in training_images():
        raise ConfigError(
            f"unknown panel {name!r}",
            field="--panel",
            hint="use one of: " + ", ".join(panel.name for panel in PANELS),
        )
    return Panel(found[1], found[2], found[3])


def panels_in(results: Mapping[str, Any]) -> list[Panel]:
    """Those that there are results for, as the paper has them; others behind."""
    known = [panel for panel in PANELS if panel.name in results]
    return [*known, *map(find_panel, sorted(results.keys() - {panel.name for panel in known}))]


def panel_cell(reading: str, x: float, seed: int) -> str:
    """The id of a cell of Figure 3 or of the sweep."""
    return f"{reading}/X={x:g}/seed-{seed}"


IMAGES = ("mnist:0", "mnist:7", "cifar10:4", "cifar10:7")
"""Training pictures, which are what a client holds."""
CLIENTS = 30
ITERATIONS, RESTARTS, FRAMES = 2000, 4, 8
CLIENT_NOISE = "client"
"""The label of the noise that hides a whole client: epsilon = 3, delta = 1e-5, in one round."""


@dataclass(frozen=True)
class Level:
    """One way to protect an upload, and what the server looks at: `alone` (this upload) or `joint` (all of them).

    `calibrated` sizes what does not cancel for the joint view; NISS otherwise has tau = 0. `promising` takes the
    noise of `client` instead of the paper's.
    """

    name: str
    title: str
    method: str
    view: str = "alone"
    calibrated: bool = False
    promising: bool = False

    @property
    def caption(self) -> str:
        """Over its picture."""
        return fill(("ε = 3: " if self.promising else "") + self.title, 13)


LEVELS = {
    level.name: level
    for level in (
        Level("fedavg", "FedAvg", "fedavg"),
        Level("dp-fedavg", "DP-FedAvg", "dp-fedavg"),
        Level("niss", "NISS as printed", "niss"),
        Level("niss-joint", "NISS as printed, all uploads", "niss", view="joint"),
        Level("niss-calibrated", "NISS calibrated, all uploads", "niss", view="joint", calibrated=True),
        Level("client-dp-fedavg", "DP-FedAvg", "dp-fedavg", promising=True),
        Level("client-niss", "NISS, τ = 0", "niss", promising=True),
        Level("client-niss-joint", "NISS, τ = 0, all uploads", "niss", view="joint", promising=True),
        Level(
            "client-niss-calibrated",
            "NISS calibrated, all uploads",
            "niss",
            view="joint",
            calibrated=True,
            promising=True,
        ),
    )
}
PAPER_LEVELS = ("fedavg", "dp-fedavg", "niss")


def picture_name(image: str) -> str:
    """`cifar10:7` as the name of a file, and of a result."""
    return image.replace(":", "-")


AttackCell = tuple[dict[str, Any], Level, Reading]
"""Its labels, its level, and the paper's noise it takes, where it takes that."""


def attack_cells(seeds: Sequence[int] = SEEDS) -> dict[str, AttackCell]:
    """All attacks on a picture by id.

    Every level at the noise of Figure 3, and those of the paper at three times as much.
    """
    weak = [(level, NBAFL) for level in LEVELS.values()]
    strong = [(LEVELS[name], find_reading("0.013")) for name in PAPER_LEVELS[1:]]
    cells: dict[str, AttackCell] = {}
    for seed, (level, reading) in product(seeds, weak + strong):
        noise = CLIENT_NOISE if level.promising else reading.name
        noise = "none" if level.method == "fedavg" else noise
        labels = {
            "level": level.name,
            "noise": noise,
            "sigma_k": reading.sigma(Setup()) if noise == reading.name else None,
            "view": level.view,
            "seed": seed,
        }
        cells[f"{noise}/{level.name}/seed-{seed}"] = labels, level, reading
    return cells


SWEEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
"""sigma_k in a sweep, in units of the NbAFL reading's."""


def sweep_cells(panel: Panel) -> Iterator[str]:
    """The ids of all cells of a sweep."""
    usual = NBAFL.sigma(panel.setup)
    for seed in SEEDS if panel.model == "mlp" else SEEDS[:1]:
        yield panel_cell(NBAFL.name, 0.0, seed)
        for factor in SWEEP_FACTORS:
            yield panel_cell(given_sigma(factor * usual).name, 1.0, seed)
