"""What is compared beyond the paper: settings, methods, what goes wrong, and which cells every result file has.

Nothing here loads torch, so that the command line can name it all at once.

Settings beyond the paper hide whole clients, and have the size of a round in their name
(`mnist-iid-client-100-of-1000`): fixed cohorts come in turn, so that every method has the same clients in the same
rounds; only secret sampling draws its own. Those of silos (`mnist-non-iid-record-10-silos`) hide single records.

A `Contestant` is a method under a variant at an epsilon: who is tuned, run, compared and computed again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from experiments.reproduce import paper
from experiments.reproduce.paper import (
    FIGURE_3,
    FIGURE_4,
    NBAFL,
    SEEDS,
    SWEEP,
    titled,
    training_images,
)
from niss.errors import ConfigError
from niss.methods import METHODS as KINDS

BEYOND, TUNING, SILOS, DEMOS = "beyond", "tuning", "silos", "demos"
COMPARING = (BEYOND, SILOS)
EXPERIMENTS = (FIGURE_3, SWEEP, TUNING, *COMPARING, DEMOS, FIGURE_4)
"""The experiments, and their folders in the results: those that compare methods, and all, the attacks last."""

EPSILONS = (1.0, 3.0, 8.0)
MORE_SEEDS = (1, 2, 3, 4, 5)
TABULAR = ("breast-cancer",)
DELTA = 1e-5
UNIT = "client"
COHORT_ROUNDS, LARGE_ROUNDS = 100, 30
"""Rounds of a setting, and of one with a thousand clients in each, which are dear."""
LARGE = 1000


@dataclass(frozen=True)
class Variant:
    """What goes wrong: the share `rho` of a round's clients that collude, and the shares that drop out or are late."""

    name: str
    rho: float = 0.0
    dropout: float = 0.0
    mode: str = "tolerate"
    late: float = 0.0


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("none"),
        Variant("collusion", rho=0.2),
        Variant("tolerate", dropout=0.1),
        Variant("repair", dropout=0.1, mode="repair"),
        Variant("late", late=0.1),
    )
}


@dataclass(frozen=True)
class Choice:
    """What is tuned for every method: the clip, the local rate (in silos the server's) and the width that is hidden."""

    clip: float = 0.5
    learning_rate: float = 0.1
    hidden: int = 32


@dataclass(frozen=True)
class Search:
    """How choices are looked for: among which values, from where, at which epsilons, and on which seeds.

    clip, learning_rate, hidden  the values that may be chosen, in ascending order
    start     the choice that is tried first; at a further epsilon that is the best of the first one
    epsilons  at which everyone is tuned, the first of them first; the choice of the nearest serves for others
    seeds     of each trial; of several it scores the mean (`Cell.score`)
    variants  under which everyone is tuned; the choice without faults serves for others
    walks     to better neighbours until there are none; otherwise from coarse to fine (`tuning`)
    """

    clip: tuple[float, ...]
    learning_rate: tuple[float, ...]
    hidden: tuple[int, ...]
    start: Choice
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...] = SEEDS
    variants: tuple[str, ...] = ("none",)
    walks: bool = True

    def place(self, choice: Choice) -> tuple[int, int, int]:
        return (
            self.clip.index(choice.clip),
            self.learning_rate.index(choice.learning_rate),
            self.hidden.index(choice.hidden),
        )

    def choices(self) -> Iterator[Choice]:
        """All there are, in the order of their places."""
        return (Choice(*values) for values in product(self.clip, self.learning_rate, self.hidden))

    def of(self, method: Method) -> Search:
        """Without noise nothing clips updates, so trials that differ in the clip would be one run."""
        return self if method.private else replace(self, clip=(self.start.clip,))

    @property
    def words(self) -> str:
        """For a reader: `at epsilon 3 on one seed`."""
        seeds = "one seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"
        *others, last = (f"{epsilon:g}" for epsilon in sorted(self.epsilons))
        return f"at epsilon {', '.join(others)}{' and ' * bool(others)}{last} on {seeds}"


def walk(start: Choice, *epsilons: float) -> Search:
    """Over clips and rates that double, four times to each side of the start."""

    def doubling(middle: float) -> tuple[float, ...]:
        return tuple(middle * 2.0**step for step in range(-4, 5))

    clips, rates = doubling(start.clip), doubling(start.learning_rate)
    return Search(clips, rates, (start.hidden,), start, epsilons or (3.0, 1.0, 8.0))


MLP_SEARCH = walk(Choice(clip=0.2, learning_rate=0.1, hidden=64))


@dataclass(frozen=True)
class Setting:
    """A dataset and a split; cohorts of `participants` come in turn, of so many `clients`.

    images      samples of each client
    model       the network
    batch       of silos that hide single records: the probability with which each is in the batch of a round. Their
                server steps with momentum, and its rate is the one that is tuned
    search      how everyone is tuned
    epsilons    promised; `seeds` of the runs
    bands       of `central-mf`
    parameters  of the model, where they are few, so that variances are measured over few numbers
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
    batch: float | None = None
    search: Search = MLP_SEARCH
    epsilons: tuple[float, ...] = EPSILONS
    seeds: tuple[int, ...] = MORE_SEEDS
    bands: str = "optimised"
    parameters: int = 0

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
        return BEYOND if self.batch is None else SILOS

    @property
    def guesses(self) -> bool:
        """Whether its files say how often the most frequent label is right: beyond images with the MLP and in silos."""
        return self.dataset in TABULAR or (self.batch is None and self.model != "mlp")

    @property
    def variants(self) -> tuple[str, ...]:
        """What goes wrong in it."""
        if self.batch is not None:
            return "none", "collusion", "late"
        return tuple(name for name in VARIANTS if name != "late") if self.model == "mlp" else ("none",)

    @property
    def participations(self) -> int:
        """Rounds in which a client takes part."""
        return math.ceil(self.rounds / (self.clients // self.participants))

    @property
    def title(self) -> str:
        """For a reader: `MNIST, IID`, or `Shakespeare, GRU`."""
        if self.batch is not None:
            return titled(self.dataset, self.split)
        return titled(self.dataset, self.split if self.model == "mlp" else self.model)

    @property
    def base(self) -> dict[str, Any]:
        """What all of its cells have in common, for its result file."""
        sizes = {"clients": self.clients, "participants": self.participants, "rounds": self.rounds}
        base = {"dataset": self.dataset, "split": self.split, **sizes, "delta": DELTA}
        base |= {"tuned": self.search.words} if self.search.walks else {}
        model = {} if self.model == "mlp" else {"model": self.model}
        if self.batch is not None:
            few = {"parameters": self.parameters} if self.parameters else {}
            return base | {"unit": "record", "batch": self.batch, "records": self.images, **model, **few}
        training = {"local_epochs": self.epochs, "batch_size": self.batch_size, "sampling": "cyclic"}
        return base | {"unit": UNIT, **training, "images_per_client": self.images, **model}

    def held_out_base(self, count: int) -> dict[str, Any]:
        """What the file of its search says besides; older ones were searched with one seed of the held-out part."""
        return {"held_out": count} | ({} if self.search.walks else {"seed": 1})

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
    search=walk(Choice(clip=0.8, learning_rate=1.6, hidden=64)),
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
    search=walk(Choice(clip=0.4, learning_rate=0.05, hidden=8)),
)
"""Photographs, forty to a client; a network of three residual blocks."""
MODELLED = {setting.name: setting for setting in (_ROLES, _PHOTOGRAPHS)}
"""Settings with other models by name: shakespeare-gru, cifar10-resnet; all their sizes are here, and nowhere else.
Where time is short, rounds, participants and epochs are what to cut. Files of other sizes do not mix: their base says
what they were run with.
"""


_DIGITS = Setting(
    "mnist",
    "iid",
    participants=10,
    clients=10,
    rounds=300,
    images=60_000,
    model="cnn",
    batch=0.1,
    search=walk(Choice(clip=0.1, learning_rate=4.0, hidden=0), 2.93),
    epsilons=(2.93,),
)
_PATIENTS = Setting(
    "breast-cancer",
    "iid",
    participants=10,
    clients=10,
    rounds=40,
    images=455,
    model="logistic",
    batch=0.2,
    search=walk(Choice(clip=0.4, learning_rate=1.0, hidden=0), 1.0),
    epsilons=(1.0,),
    parameters=62,
)
_SILOS = {one.dataset: one for one in (_DIGITS, _PATIENTS)}
"""Silos: digits with the network of Papernot et al. (2021), at the epsilon of their figure; and a table that comes with
scikit-learn, with logistic regression."""
IN_SILOS = (
    "mnist-non-iid-record-10-silos",
    "mnist-non-iid-record-30-silos",
    *(f"breast-cancer-{split}-record-{size}-silos" for size in (5, 10) for split in ("iid", "non-iid")),
)
"""The settings of silos that are compared."""


def _coarse(
    clips: Sequence[float],
    rates: Sequence[float],
    hidden: Sequence[int],
    start: Choice,
    epsilon: float,
    seeds: Sequence[int] = (1,),
) -> Search:
    """From coarse to fine, at one epsilon and under every variant."""
    variants = tuple(name for name, variant in VARIANTS.items() if not variant.late)
    return Search(
        tuple(clips), tuple(rates), tuple(hidden), start, (epsilon,), tuple(seeds), variants, walks=False
    )


_MLP = _coarse((0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0), (0.05, 0.1, 0.2), (16, 32, 64), Choice(clip=0.5), 3.0)
_OLDER_SEARCHES = {
    "gru": _coarse((0.1, 0.3, 1.0, 3.0), (0.5, 1.0, 2.0), (64,), Choice(1.0, 1.0, 64), 3.0),
    "resnet": _coarse((0.1, 0.3, 1.0, 3.0), (0.03, 0.1, 0.3), (8,), Choice(1.0, 0.1, 8), 3.0),
    "cnn": _coarse((0.05, 0.1, 0.2), (2.0, 4.0, 8.0), (0,), Choice(0.1, 4.0, 0), 2.93),
    "logistic": _coarse((0.1, 0.3, 1.0), (0.25, 0.5, 1.0, 2.0), (0,), Choice(0.3, 1.0, 0), 1.0, SEEDS),
}
"""By model: how the stored settings were tuned that have not been run again since everyone is tuned at each epsilon."""


def as_stored(setting: Setting) -> Setting:
    """The setting of result files that do not say how they were tuned: at one epsilon, on one seed but for tables.

    `central-mf` had the truncated square root then, and all but the silos three seeds.
    """
    search = _OLDER_SEARCHES.get(setting.model, _MLP)
    more = setting.batch is not None and setting.clients <= 10
    return replace(setting, search=search, seeds=MORE_SEEDS if more else SEEDS, bands="square-root")


@dataclass(frozen=True)
class Method:
    """A contestant.

    kind      the method of niss that runs
    noise     how its epsilon is recomputed (`promises`): `none`, each client's `own`, in the `sum` alone, `shares`, ...
    faults    the variants under which it is run: those that make a difference to it
    trusting  its epsilon does not hold against the server
    settings  what else its entry in `methods` says
    """

    name: str
    kind: str
    noise: str
    faults: tuple[str, ...] = ()
    trusting: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def private(self) -> bool:
        return self.noise != "none"

    @property
    def protects(self) -> bool:
        """Whether something is promised to somebody."""
        return self.noise not in ("none", "cancelled")

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
        Method("central-mf", "central-mf", "banded", trusting=True),
        Method("secagg-ddg", "secagg-ddg", "masked", ("collusion", "repair")),
        Method("niss-planned", "niss", "shares", (*_ALL, "late")),
        Method("niss-carried", "niss-carried", "carried", _ALL, settings={"graph": "complete"}),
        Method("alone", "alone", "alone"),
    )
    if method.kind in KINDS
}
"""The contestants, in the order of tables and legends. Another one is another line."""


EVERYONE = METHODS | {
    method.name: method
    for method in (
        Method("niss", "niss", "shares"),
        Method("niss-as-printed", "niss", "cancelled"),
    )
}
"""With those that are compared in the presets alone."""
PRESETS = ("demo", "silos")


def demo(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What all runs of a preset have in common, for its result file; and the labels of each, by its method's title."""
    from niss.data.catalog import spec_named
    from niss.simulation import preset

    config, labels = preset(name), {}
    spec, privacy = spec_named(config.data.dataset), config.privacy
    for method in config.methods:
        plan, kind = config.plan(method), EVERYONE[method.title]
        more: dict[str, Any] = {"clip": plan.clip, "seed": config.seed, "participations": plan.participations}
        more["epsilon"] = privacy.epsilon if kind.private else None
        labels[method.title] = Contestant(kind, VARIANTS["none"], None).labels | more
    records = {} if privacy.batch is None else {"batch": privacy.batch, "records": spec.train_size}
    base = {
        name: getattr(config, name)
        for name in ("split", "clients", "participants", "rounds", "evaluate_every")
    }
    own = {"dataset": spec.name, "model": config.model.name, "unit": privacy.unit, "delta": privacy.delta}
    return base | own | records | {"tested": spec.test_size}, labels


def methods_of(setting: Setting) -> list[Method]:
    """Who takes part in a setting: where records are hidden, whoever has an account of them."""
    wanted = (
        {"none", "own", "sum", "shares"}
        if setting.batch is not None
        else {one.noise for one in METHODS.values()}
    )
    wanted = wanted | {"alone"} if setting.dataset in TABULAR else wanted - {"alone"}
    return [method for method in METHODS.values() if method.noise in wanted]


@dataclass(frozen=True)
class Contestant:
    """A method under a variant at an epsilon; None where nothing is promised."""

    method: Method
    variant: Variant
    epsilon: float | None

    @classmethod
    def of(cls, labels: Mapping[str, Any]) -> Contestant:
        """Whose run, or trial, carries these labels."""
        return cls(EVERYONE[labels["method"]], VARIANTS[labels["variant"]], labels["epsilon"])

    @property
    def labels(self) -> dict[str, Any]:
        """What all of its runs and trials carry."""
        return {"method": self.method.name, "variant": self.variant.name, "epsilon": self.epsilon}

    def trial(self, choice: Choice, seed: int | None = None) -> dict[str, Any]:
        """The labels of a trial, with its seed where there are several."""
        clip = choice.clip if self.method.private else None
        return self.labels | asdict(choice) | {"clip": clip} | ({} if seed is None else {"seed": seed})


def contestants(
    epsilons: Sequence[float], methods: Sequence[str], variants: Sequence[str] = ("none",)
) -> list[Contestant]:
    """Everyone who is tuned and run for these methods, under the variants that make a difference to them."""
    return [
        Contestant(method, VARIANTS[variant], epsilon)
        for method, variant in product((METHODS[name] for name in methods), variants)
        if method.suffers(VARIANTS[variant])
        for epsilon in (epsilons if method.private else (None,))
    ]


def find_setting(name: str, *, rounds: int | None = None) -> Setting:
    """`mnist-iid-client-100-of-1000` and the like, with any dataset that niss knows; or one of `MODELLED`.

    Cohorts of 100 come in turn, and the images are dealt out to 1,000 clients; who has many takes larger batches, so as
    few steps.
    """
    if silos := re.fullmatch(rf"({'|'.join(_SILOS)})-(non-iid|iid)-record-(\d+)-silos", name):
        setting = _SILOS[silos[1]]
        size = int(silos[3])
        return replace(
            setting, split=silos[2], participants=size, clients=size, rounds=rounds or setting.rounds
        )
    if name in MODELLED:
        return replace(MODELLED[name], rounds=rounds or MODELLED[name].rounds)
    found = re.fullmatch(rf"(.+?)-(non-iid|iid)-{UNIT}-(\d+)-of-(\d+)", name)
    if found is None or found[1] not in training_images():
        raise ConfigError(
            f"unknown setting {name!r}",
            field="--setting",
            hint=f"for example {COMPARED[0]}, " + ", ".join(MODELLED),
        )
    dataset, split, participants, clients = found[1], found[2], int(found[3]), int(found[4])
    images = training_images()[dataset] // max(clients, 1)
    if not 2 <= participants <= clients or clients % participants or not images:
        raise ConfigError(
            f"cannot deal {dataset} out to {clients} clients in cohorts of {participants}",
            field="--setting",
            hint="clients must be a multiple of participants",
        )
    usual = LARGE_ROUNDS if participants >= LARGE else COHORT_ROUNDS
    size = 10 if images <= 100 else 20
    return Setting(dataset, split, participants, clients, rounds or usual, images, batch_size=size)


def setting_of(name: str, base: Mapping[str, Any]) -> Setting:
    """That of a result file: its name, and whether it says how everyone was tuned."""
    setting = find_setting(name)
    return setting if "tuned" in base else as_stored(setting)


COMPARED = (
    "mnist-iid-client-100-of-1000",
    "mnist-non-iid-client-100-of-1000",
    "mnist-iid-client-1000-of-6000",
    "cifar10-non-iid-client-100-of-1000",
    *MODELLED,
)
"""The settings with fixed cohorts, in which all rivals meet."""
WITHOUT_FAULTS = frozenset(COMPARED[:2])
"""Those whose stored results have no faults yet: what they ran under them had been tuned in another way."""
NOT_RUN_AGAIN = frozenset((*COMPARED, *IN_SILOS)) - WITHOUT_FAULTS
"""Those whose stored results are older than the search at each epsilon (`as_stored`)."""


def run_cell(labels: Mapping[str, Any]) -> str:
    """The id of a run beyond the paper."""
    epsilon = [] if labels["epsilon"] is None else [f"epsilon={labels['epsilon']:g}"]
    return "/".join([labels["variant"], labels["method"], *epsilon, f"seed-{labels['seed']}"])


def trial_cell(labels: Mapping[str, Any]) -> str:
    """The id of a trial of the tuning."""
    numbers = [f"{name}={labels[name]:g}" for name in ("epsilon", "clip") if labels[name] is not None]
    parts = [] if labels["variant"] == "none" else [labels["variant"]]
    choice = [f"rate={labels['learning_rate']:g}", f"hidden={labels['hidden']}"]
    seed = [f"seed-{labels['seed']}"] if "seed" in labels else []
    return "/".join([*parts, labels["method"], *numbers, *choice, *seed])


SEARCHED = None
"""In place of the cells: those of a search, which are known once it is played again."""
Cells = frozenset[str] | None


def expected_cells() -> dict[tuple[str, str], Cells]:
    """The ids that each committed result file has to hold, by experiment and name; one too many is a fault, too."""
    found: dict[tuple[str, str], Cells] = {}
    for panel in paper.PANELS:
        found[FIGURE_3, panel.name] = frozenset(
            paper.panel_cell(NBAFL.name, x, seed) for x, seed in product(paper.X_VALUES, SEEDS)
        )
        found[SWEEP, panel.name] = frozenset(paper.sweep_cells(panel))
    for image in paper.IMAGES:
        found[FIGURE_4, paper.picture_name(image)] = frozenset(paper.attack_cells())
    for name in PRESETS:
        found[DEMOS, name] = frozenset(map(run_cell, demo(name)[1].values()))
    for setting in map(find_setting, (*COMPARED, *IN_SILOS)):
        if setting.name in NOT_RUN_AGAIN:
            setting = as_stored(setting)
        variants = ("none",) if setting.name in WITHOUT_FAULTS else setting.variants
        everyone = contestants(setting.epsilons, [one.name for one in methods_of(setting)], variants)
        found[setting.experiment, setting.name] = frozenset(
            run_cell(one.labels | {"seed": seed}) for one, seed in product(everyone, setting.seeds)
        )
        found[TUNING, setting.name] = SEARCHED
    return found
