"""What is compared: the panels of Figure 3, the pictures and levels of Figure 4, and the settings beyond the paper.

Nothing here loads torch, so that the command line can name it all at once.

Settings beyond the paper hide whole clients, and have the size of a round in their name
(`mnist-iid-client-100-of-1000`): fixed cohorts come in turn, so that every method has the same clients in the same
rounds; only secret sampling draws its own. Those of silos (`mnist-non-iid-record-10-silos`) hide single records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from experiments.reproduce.sensitivity import NBAFL, Reading, Setup, find_reading, given_sigma
from niss.errors import ConfigError
from niss.methods import METHODS as KINDS

FIGURE_3, SWEEP, FIGURE_4 = "figure-3", "sweep", "figure-4"
BEYOND, TUNING, DATASETS, SILOS = "beyond", "tuning", "datasets", "silos"
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


def panels_in(results: Mapping[str, Any]) -> list[Panel]:
    """Those that there are results for, as the paper has them; others behind."""
    known = [panel for panel in PANELS if panel.name in results]
    return [*known, *map(find_panel, sorted(results.keys() - {panel.name for panel in known}))]


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
SEEDS = (1, 2, 3)
DELTA = 1e-5
UNIT = "client"
COHORT_ROUNDS, LARGE_ROUNDS = 100, 30
"""Rounds of a setting, and of one with a thousand clients in each, which are dear."""
LARGE = 1000


@dataclass(frozen=True)
class Setting:
    """A dataset and a split; cohorts of `participants` come in turn, of so many `clients`.

    images    samples of each client
    model     the network; all but the MLP are of one size, `width`, and have `clips` and `rates` of their own to be
              tuned over
    batch     of silos that hide single records: the probability with which each is in the batch of a round. Their
              server steps with momentum, and its rate is the one that is tuned
    epsilons  promised, the first of them where nobody is tuned at epsilon 3; `seeds` of the runs
    """

    dataset: str
    split: str
    participants: int
    clients: int
    rounds: int
    images: int
    epochs: int = 5
    batch_size: int = 10
    model: str = "mlp"
    width: int = 0
    clips: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    batch: float | None = None
    epsilons: tuple[float, ...] = EPSILONS
    seeds: tuple[int, ...] = SEEDS

    @property
    def name(self) -> str:
        if self.batch is not None:
            return f"{self.dataset}-{self.split}-record-{self.clients}-silos"
        if self.model != "mlp":
            return f"{self.dataset}-{self.model}"
        return f"{self.dataset}-{self.split}-{UNIT}-{self.participants}-of-{self.clients}"

    @property
    def experiment(self) -> str:
        """The one that its runs belong to."""
        if self.batch is not None:
            return SILOS
        return BEYOND if self.model == "mlp" else DATASETS

    @property
    def variants(self) -> tuple[str, ...]:
        """What goes wrong in it."""
        if self.batch is not None:
            return "none", "collusion", "late"
        return tuple(name for name in VARIANTS if name != "late") if self.model == "mlp" else ("none",)

    @property
    def title(self) -> str:
        """For a reader: `MNIST, IID`, or `Shakespeare, GRU`."""
        if self.batch is not None:
            return _title(self.dataset, self.split)
        return _title(self.dataset, self.split if self.model == "mlp" else self.model)

    @property
    def base(self) -> dict[str, Any]:
        """What all of its cells have in common, for its result file."""
        if self.batch is not None:
            return {
                "dataset": self.dataset,
                "split": self.split,
                "unit": "record",
                "clients": self.clients,
                "participants": self.participants,
                "rounds": self.rounds,
                "delta": DELTA,
                "batch": self.batch,
                "records": self.images,
                "model": self.model,
            }
        return {
            "dataset": self.dataset,
            "split": self.split,
            "unit": UNIT,
            "clients": self.clients,
            "participants": self.participants,
            "rounds": self.rounds,
            "delta": DELTA,
            "local_epochs": self.epochs,
            "batch_size": self.batch_size,
            "sampling": "cyclic",
            "images_per_client": self.images,
            **({} if self.model == "mlp" else {"model": self.model}),
        }

    def cut_to(self, records: int) -> Setting:
        """The same on a training set cut to so many images: as many to a client, hence fewer cohorts."""
        if self.batch is not None:
            return replace(self, images=records)
        if self.split == "natural":
            return self
        clients = records // self.images
        participants = min(self.participants, clients)
        return replace(self, clients=clients - clients % participants, participants=participants)


_ROLES = Setting(
    "shakespeare",
    "natural",
    participants=100,
    clients=600,
    rounds=60,
    epochs=2,
    batch_size=10,
    images=40,
    model="gru",
    width=64,
    clips=(0.1, 0.3, 1.0, 3.0),
    rates=(0.5, 1.0, 2.0),
)
"""Roles of plays, of each at most forty pieces of eighty characters; the next character."""
_PHOTOGRAPHS = Setting(
    "cifar10",
    "iid",
    participants=100,
    clients=1000,
    rounds=30,
    epochs=3,
    batch_size=10,
    images=40,
    model="resnet",
    width=8,
    clips=(0.1, 0.3, 1.0, 3.0),
    rates=(0.03, 0.1, 0.3),
)
"""Photographs, forty to a client; a network of three residual blocks."""
MODELLED = {setting.name: setting for setting in (_ROLES, _PHOTOGRAPHS)}
"""Settings with other models by name: shakespeare-gru, cifar10-resnet; all their sizes are here, and nowhere else.

Every method is tuned by the same search, at epsilon 3: a trial for each clip, for each further rate, and one more,
which makes 7 (3 for FedAvg, which does not clip). Then everyone runs at three epsilons with three seeds. With 8 methods
that is 52 trials and 66 runs in each setting, so that rounds, participants and epochs are what to cut where time is
short. Files of other sizes do not mix: their base says what they were run with.
"""


_SILOS = {
    "mnist": Setting(
        "mnist",
        "iid",
        participants=10,
        clients=10,
        rounds=300,
        images=60_000,
        model="cnn",
        clips=(0.05, 0.1, 0.2),
        rates=(2.0, 4.0, 8.0),
        batch=0.1,
        epsilons=(2.93,),
    ),
    "cifar10": Setting(
        "cifar10",
        "iid",
        participants=10,
        clients=10,
        rounds=150,
        images=50_000,
        model="cnn",
        clips=(0.1,),
        rates=(1.0, 2.0, 4.0),
        batch=0.1,
        epsilons=(7.53,),
    ),
}
"""Silos with the networks of Papernot et al. (2021), at the epsilons of their figures."""
IN_SILOS = {
    "mnist-non-iid-record-10-silos": 5,
    "mnist-non-iid-record-30-silos": 3,
}
"""The settings of silos that are compared, and with how many seeds."""


@dataclass(frozen=True)
class Variant:
    """What goes wrong: the share `rho` of a round's clients that collude, and the shares that drop out or are late."""

    name: str
    words: str
    rho: float = 0.0
    dropout: float = 0.0
    mode: str = "tolerate"
    late: float = 0.0


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("none", "nothing"),
        Variant("collusion", "a fifth colluding", rho=0.2),
        Variant("tolerate", "a tenth dropping out, tolerated", dropout=0.1),
        Variant("repair", "a tenth dropping out, repaired", dropout=0.1, mode="repair"),
        Variant("late", "a tenth late", late=0.1),
    )
}


@dataclass(frozen=True)
class Choice:
    """What is tuned for every method: the clip, the local rate (in silos the server's) and the width that is hidden."""

    clip: float = 0.5
    learning_rate: float = 0.1
    hidden: int = 32


@dataclass(frozen=True)
class Method:
    """A contestant.

    kind      the method of niss that runs
    noise     how its epsilon is recomputed (`promises`): `none`, each client's `own`, in the `sum` alone, `shares`, ...
    faults    the variants under which it is run: those that make a difference to it
    trusting  its epsilon does not hold against the server
    settings  what else its entry in `methods` says
    training  what else `training` says, such as another sampling
    """

    name: str
    kind: str
    noise: str
    faults: tuple[str, ...] = ()
    trusting: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

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
        Method("central-dp-sampled", "central-dp-sampled", "sampled", trusting=True),
        # As its results were computed; optimised bands leave 5 to 17 % less noise in the model.
        Method("central-mf", "central-mf", "banded", trusting=True, settings={"strategy": "square-root"}),
        Method("secagg-ddg", "secagg-ddg", "masked", ("collusion", "repair")),
        Method("niss-planned", "niss", "shares", (*_ALL, "late")),
        Method("niss-carried", "niss-carried", "carried", _ALL, settings={"graph": "complete"}),
    )
    if method.kind in KINDS
}
"""The contestants, in the order of tables and legends. Another one is another line."""


def contestants_of(setting: Setting) -> list[Method]:
    """Who takes part in a setting: where records are hidden, whoever has an account of them."""
    wanted = ("none", "own", "sum", "shares") if setting.batch is not None else None
    return [method for method in METHODS.values() if wanted is None or method.noise in wanted]


def find_setting(name: str, *, rounds: int | None = None) -> Setting:
    """`mnist-iid-client-100-of-1000` and the like, with any dataset that niss knows; or one of `MODELLED`.

    Cohorts of 100 come in turn, and the images are dealt out to 1,000 clients; who has many takes larger batches, so as
    few steps.
    """
    if silos := re.fullmatch(r"(mnist|cifar10)-(non-iid|iid)-record-(\d+)-silos", name):
        setting = _SILOS[silos[1]]
        size = int(silos[3])
        return replace(
            setting,
            split=silos[2],
            participants=size,
            clients=size,
            rounds=rounds or setting.rounds,
            seeds=tuple(range(1, IN_SILOS.get(name, 3) + 1)),
        )
    if name in MODELLED:
        return replace(MODELLED[name], rounds=rounds or MODELLED[name].rounds)
    found = re.fullmatch(rf"(.+?)-(non-iid|iid)-{UNIT}-(\d+)-of-(\d+)", name)
    if found is None or found[1] not in _training_images():
        raise ConfigError(
            f"unknown setting {name!r}",
            field="--setting",
            hint=f"for example {COMPARED[0]}, " + ", ".join(MODELLED),
        )
    dataset, split, participants, clients = found[1], found[2], int(found[3]), int(found[4])
    images = _training_images()[dataset] // max(clients, 1)
    if not 2 <= participants <= clients or clients % participants or not images:
        raise ConfigError(
            f"cannot deal {dataset} out to {clients} clients in cohorts of {participants}",
            field="--setting",
            hint="clients must be a multiple of participants",
        )
    usual = LARGE_ROUNDS if participants >= LARGE else COHORT_ROUNDS
    size = 10 if images <= 100 else 20
    return Setting(dataset, split, participants, clients, rounds or usual, images, batch_size=size)


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


RECORDS = {"mnist": 600, "cifar10": 500}
"""Images of a client in the paper's setting."""
SEARCHED = None
"""In place of the cells: those of a search, which are known once it is played again."""

Cells = frozenset[str] | None


def expected_cells() -> dict[tuple[str, str], Cells]:
    """The ids that each committed result file has to hold, by experiment and name; one too many is a fault, too."""
    found: dict[tuple[str, str], Cells] = {}
    for panel in PANELS:
        found[FIGURE_3, panel.name] = frozenset(
            panel_cell(NBAFL.name, x, seed) for x, seed in product(X_VALUES, SEEDS)
        )
        found[SWEEP, panel.name] = frozenset(_sweep(panel))
    for image in IMAGES:
        found[FIGURE_4, picture_name(image)] = frozenset(_attacks())
    for setting in map(find_setting, (*COMPARED, *MODELLED, *IN_SILOS)):
        found[setting.experiment, setting.name] = frozenset(_runs(setting))
        found[TUNING, setting.name] = SEARCHED
    return found


def _sweep(panel: Panel) -> Iterator[str]:
    usual = NBAFL.sigma(Setup(records=RECORDS[panel.dataset]))
    for seed in SEEDS if panel.model == "mlp" else SEEDS[:1]:
        yield panel_cell(NBAFL.name, 0.0, seed)
        for factor in SWEEP_FACTORS:
            yield panel_cell(given_sigma(factor * usual).name, 1.0, seed)


def _attacks() -> Iterator[str]:
    yield from cells_of(list(LEVELS.values()), [NBAFL], SEEDS)
    yield from cells_of(find_levels(["dp-fedavg", "niss"]), [find_reading("0.013")], SEEDS)


def _runs(setting: Setting) -> Iterator[str]:
    variants = [VARIANTS[one] for one in setting.variants]
    for variant, method in product(variants, contestants_of(setting)):
        if method.suffers(variant):
            for epsilon, seed in product(setting.epsilons if method.private else (None,), setting.seeds):
                yield run_cell(variant.name, method.name, epsilon, seed)
