"""What is compared: the panels of Figure 3, the pictures and levels of Figure 4, and the settings beyond the paper.

Nothing here loads torch, so that the command line can name it all at once.

Two units of privacy beyond the paper. `client`: thousands of clients of 10 images, 1,000 a round, where hiding a whole
client is affordable. `record`: the paper's 100 clients, 30 a round; per-sample clipping, one local step a round, more
rounds.

The settings that all rivals share have their size in their name (`mnist-iid-client-100-of-1000`): fixed cohorts come in
turn, so that every method has the same clients in the same rounds; only secret sampling draws its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from experiments.reproduce.sensitivity import Reading, Setup
from niss.errors import ConfigError
from niss.methods import METHODS as KINDS

FIGURE_3, SWEEP, FIGURE_4 = "figure-3", "sweep", "figure-4"
BEYOND, TUNING, SCALE, DATASETS = "beyond", "tuning", "scale", "datasets"
"""The experiments, and their folders in the results."""

SPLITS = {"iid": "iid", "non-iid": "shards", "natural": "natural"}
"""The splits as the paper calls them, and as `niss` does; with `natural`, clients have what is theirs in the data."""

X_VALUES = (0.0, 0.3, 0.6, 1.0)
SECONDS_A_ROUND = {"mlp": 0.027, "cnn": 0.21}
"""Seconds that a round of one cell takes on an NVIDIA H200: 30 clients, 5 epochs, evaluation included."""


def _title(*parts: str) -> str:
    words = {
        "mnist": "MNIST",
        "cifar10": "CIFAR-10",
        "shakespeare": "Shakespeare",
        "iid": "IID",
        "non-iid": "non-IID",
        "gru": "GRU",
        "resnet": "ResNet",
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
        """For a reader: `MNIST, MLP, non-IID`."""
        return _title(self.dataset, self.model.upper(), self.split)

    def expected_seconds(self, rounds: int, cells: int) -> float:
        """What an H200 needs for that many cells."""
        return SECONDS_A_ROUND[self.model] * rounds * cells


PANELS = tuple(
    Panel(dataset, model, split)
    for dataset in ("mnist", "cifar10")
    for model in ("mlp", "cnn")
    for split in ("iid", "non-iid")
)


@cache
def _training_images() -> dict[str, int]:
    """The image datasets that niss knows, and how many training images each has."""
    from niss.data import list_datasets

    return {info.name: info.train_size for info in list_datasets() if info.kind == "images"}


def find_panel(name: str) -> Panel:
    """The panel of that name; any dataset that niss knows may stand in front."""
    found = re.fullmatch(r"(.+)-(mlp|cnn)-(iid|non-iid)", name)
    if found is None or found[1] not in _training_images():
        raise ConfigError(
            f"unknown panel {name!r}",
            field="--panel",
            hint="use one of: " + ", ".join(panel.name for panel in PANELS),
        )
    return Panel(found[1], found[2], found[3])


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


def find_levels(names: Sequence[str]) -> list[Level]:
    unknown = [name for name in names if name not in LEVELS]
    if unknown or not names:
        raise ConfigError(
            f"unknown level {unknown[0]!r}" if unknown else "expected at least one level",
            field="--level",
            hint="use some of: " + ", ".join(LEVELS),
        )
    return [LEVELS[name] for name in names]


def picture_name(image: str) -> str:
    """`cifar10:7` as the name of a file, and of a result."""
    return image.replace(":", "-")


def cells_of(
    levels: Sequence[Level], readings: Sequence[Reading], seeds: Sequence[int]
) -> dict[str, tuple[dict[str, Any], Level, Reading]]:
    """All cells of a picture by id: its labels, its level and the paper's noise it takes, where it takes that."""
    cells: dict[str, tuple[dict[str, Any], Level, Reading]] = {}
    for seed in seeds:
        for reading in readings:
            for level in levels:
                noise = CLIENT_NOISE if level.promising else reading.name
                noise = "none" if level.method == "fedavg" else noise
                labels = {
                    "level": level.name,
                    "noise": noise,
                    "sigma_k": reading.sigma(Setup()) if noise == reading.name else None,
                    "view": level.view,
                    "seed": seed,
                }
                cells.setdefault(f"{noise}/{level.name}/seed-{seed}", (labels, level, reading))
    return cells


SWEEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0)
"""sigma_k in a sweep, in units of the NbAFL reading's."""

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
IMAGES_PER_CLIENT = 10
SCALES = (30, 100, 1000)
SCALE_EPSILON = 3.0
SCALE_METHODS = ("fedavg", "dp-fedavg", "central-dp", "niss-planned")
ROUNDS = {"client": 30, "record": 100}
PARTICIPANTS = {"client": 1000, "record": 30}


@dataclass(frozen=True)
class Setting:
    """A dataset, a split and a unit of privacy; `participants` a round, of so many `clients`.

    images  samples of each client, where fixed cohorts come in turn; None: cohorts are dealt out anew, and all images
    model   the network; all but the MLP are of one size, `width`, and have `clips` and `rates` of their own to be
            tuned over
    """

    dataset: str
    split: str
    unit: str
    participants: int
    clients: int
    rounds: int
    epochs: int = 5
    batch_size: int = 10
    images: int | None = None
    model: str = "mlp"
    width: int = 0
    clips: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        if self.model != "mlp":
            return f"{self.dataset}-{self.model}"
        return f"{self.dataset}-{self.split}-{self.unit}"

    @property
    def cohorts(self) -> bool:
        """Whether fixed cohorts come in turn."""
        return self.images is not None or self.split == "natural"

    @property
    def experiment(self) -> str:
        """The one that its runs belong to."""
        return BEYOND if self.model == "mlp" else DATASETS

    @property
    def variants(self) -> tuple[str, ...]:
        """What goes wrong in it."""
        return tuple(VARIANTS) if self.model == "mlp" else ("none",)

    @property
    def full_name(self) -> str:
        """With the size of a round where it is not the usual one: `mnist-iid-client-100`, or with that of a cohort."""
        if self.model != "mlp":
            return self.name
        if self.images is not None:
            return f"{self.name}-{self.participants}-of-{self.clients}"
        usual = self.participants == find_setting(self.name).participants
        return self.name if usual else f"{self.name}-{self.participants}"

    @property
    def title(self) -> str:
        """For a reader: `MNIST, IID, client`, or `Shakespeare, GRU`."""
        if self.model != "mlp":
            return _title(self.dataset, self.model)
        return _title(self.dataset, self.split, self.unit)

    @property
    def methods(self) -> tuple[str, ...]:
        """Everyone who is compared in it."""
        names = RIVALS if self.cohorts else EARLIER
        return tuple(name for name in names if name in METHODS)


@dataclass(frozen=True)
class Variant:
    """What goes wrong: the share `rho` of a round's clients that collude, and the share that drops out."""

    name: str
    words: str
    rho: float = 0.0
    dropout: float = 0.0
    mode: str = "tolerate"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("none", "nothing"),
        Variant("collusion", "a fifth colluding", rho=0.2),
        Variant("tolerate", "a tenth dropping out, tolerated", dropout=0.1),
        Variant("repair", "a tenth dropping out, repaired", dropout=0.1, mode="repair"),
    )
}


@dataclass(frozen=True)
class Choice:
    """What is tuned for every method: the clip, the local rate and the width of the hidden layer."""

    clip: float = 0.5
    learning_rate: float = 0.1
    hidden: int = 32


UNTUNED = {"client": Choice(), "record": Choice(clip=1.0, learning_rate=0.5)}


@dataclass(frozen=True)
class Method:
    """A contestant.

    kind      the method of niss that runs
    noise     how its epsilon is recomputed (`promises`): `none`, each client's `own`, in the `sum` alone, `shares`, ...
    faults    the variants under which it is run: those that make a difference to it
    tuned_as  whose tuning it takes; its own by default
    kappa     strength of the shares; None is the planner's choice
    printed   to the letter of the paper: tau = 0
    trusting  its epsilon does not hold against the server
    settings  what else its entry in `methods` says
    training  what else `training` says, such as another sampling
    """

    name: str
    kind: str
    noise: str
    faults: tuple[str, ...] = ()
    tuned_as: str = ""
    kappa: float | None = None
    printed: bool = False
    trusting: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tuning(self) -> str:
        return self.tuned_as or self.name

    @property
    def private(self) -> bool:
        return self.noise != "none"

    def suffers(self, variant: Variant) -> bool:
        """Whether it is run under a variant: where that makes a difference to it."""
        return variant.name == "none" or variant.name in self.faults


_ALL = ("collusion", "tolerate", "repair")
METHODS = {
    method.name: method
    for method in (
        Method("fedavg", "fedavg", "none"),
        Method("dp-fedavg", "dp-fedavg", "own"),
        Method("central-dp", "central-dp", "sum", trusting=True),
        Method("niss-as-printed", "niss", "shares", tuned_as="niss-planned", printed=True),
        Method("niss-kappa-1", "niss", "shares", ("collusion",), tuned_as="niss-planned", kappa=1.0),
        Method("niss-planned", "niss", "shares", _ALL),
        Method("central-dp-sampled", "central-dp-sampled", "sampled", trusting=True),
        Method("central-mf", "central-mf", "banded", trusting=True),
        Method("secagg-ddg", "secagg-ddg", "masked", ("collusion", "repair")),
        Method("niss-carried", "niss-carried", "carried", _ALL, settings={"graph": "complete"}),
    )
    if method.kind in KINDS
}
"""The contestants, in the order of tables and legends. Another one is another line."""
EARLIER = ("fedavg", "dp-fedavg", "central-dp", "niss-as-printed", "niss-kappa-1", "niss-planned")
"""Those of the settings without fixed cohorts."""
RIVALS = (
    "fedavg",
    "dp-fedavg",
    "central-dp",
    "central-dp-sampled",
    "central-mf",
    "secagg-ddg",
    "niss-planned",
    "niss-carried",
)
"""Those of the settings with fixed cohorts."""


def find_setting(name: str, *, participants: int | None = None, rounds: int | None = None) -> Setting:
    """`mnist-iid-client` and the like; any dataset that niss knows may stand in front. Or one of `MODELLED`.

    With `-100-of-1000` behind it cohorts of 100 come in turn, and the images are dealt out to 1,000 clients.
    """
    from experiments.reproduce.modelled import MODELLED  # which is made of settings

    if name in MODELLED:
        modelled = MODELLED[name]
        size = participants or modelled.participants
        return replace(modelled, participants=size, rounds=rounds or modelled.rounds)
    if found := re.fullmatch(r"(.+-client)-(\d+)-of-(\d+)", name):
        return _cohorts(find_setting(found[1]), int(found[2]), int(found[3]), rounds)
    known = _training_images()
    dataset, unit = name.removesuffix("-client").removesuffix("-record"), name.rpartition("-")[2]
    split = "non-iid" if dataset.endswith("-non-iid") else "iid"
    dataset = dataset.removesuffix(f"-{split}")
    if name != f"{dataset}-{split}-{unit}" or dataset not in known or unit not in ROUNDS:
        raise ConfigError(
            f"unknown setting {name!r}",
            field="--setting",
            hint="for example mnist-iid-client, cifar10-non-iid-record, mnist-iid-client-100-of-1000, "
            + ", ".join(MODELLED),
        )
    size = known[dataset]
    clients = size // IMAGES_PER_CLIENT if unit == "client" else 100
    return Setting(
        dataset,
        split,
        unit,
        participants=min(participants or PARTICIPANTS[unit], clients),
        clients=clients,
        rounds=rounds or ROUNDS[unit],
        epochs=5 if unit == "client" else 1,
    )


def _cohorts(usual: Setting, participants: int, clients: int, rounds: int | None) -> Setting:
    """Rounds of thousands are dear and few; clients with many images take larger batches, so as few steps."""
    images = _training_images()[usual.dataset] // max(clients, 1)
    if not 2 <= participants <= clients or clients % participants or not images:
        raise ConfigError(
            f"cannot deal {usual.dataset} out to {clients} clients in cohorts of {participants}",
            field="--setting",
            hint="clients must be a multiple of participants",
        )
    return replace(
        usual,
        participants=participants,
        clients=clients,
        rounds=rounds or (ROUNDS["client"] if participants >= PARTICIPANTS["client"] else COHORT_ROUNDS),
        batch_size=10 if images <= 100 else 20,
        images=images,
    )


SETTINGS = tuple(
    f"{dataset}-{split}-{unit}"
    for dataset in ("mnist", "cifar10")
    for split in ("iid", "non-iid")
    for unit in ("client", "record")
)


COHORT_ROUNDS = 100
COMPARED = (
    "mnist-iid-client-100-of-1000",
    "mnist-iid-client-1000-of-6000",
    "mnist-non-iid-client-100-of-1000",
    "cifar10-iid-client-1000-of-5000",
    "mnist-non-iid-client-1000-of-6000",
    "mnist-iid-client-30-of-300",
    "cifar10-non-iid-client-1000-of-5000",
    "mnist-non-iid-client-30-of-300",
    "cifar10-iid-client-100-of-1000",
    "cifar10-non-iid-client-100-of-1000",
    "cifar10-iid-client-30-of-300",
    "cifar10-non-iid-client-30-of-300",
)
"""The settings with fixed cohorts, in which all rivals meet; the most telling first."""


def panel_cell(reading: str, x: float, seed: int) -> str:
    """The id of a cell of Figure 3 or of the sweep."""
    return f"{reading}/X={x:g}/seed-{seed}"


def run_cell(variant: str, method: str, epsilon: float | None, seed: int) -> str:
    """The id of a run beyond the paper."""
    parts = [variant, method, *([] if epsilon is None else [f"epsilon={epsilon:g}"]), f"seed-{seed}"]
    return "/".join(parts)


def trial_cell(labels: Mapping[str, Any]) -> str:
    """The id of a trial of the tuning."""
    variant = labels.get("variant", "none")
    numbers = [f"{name}={labels[name]:g}" for name in ("epsilon", "clip") if labels[name] is not None]
    rate, hidden = labels["learning_rate"], labels["hidden"]
    parts = [] if variant == "none" else [variant]
    return "/".join([*parts, labels["method"], *numbers, f"rate={rate:g}", f"hidden={hidden}"])
