"""The settings beyond the paper: same epsilon for every method, in the joint view, over the whole training.

Two units of privacy. `client`: thousands of clients of 10 images, 1,000 a round, where hiding a whole client is
affordable. `record`: the paper's 100 clients, 30 a round; per-sample clipping, one local step a round, more rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from niss.accounting import Plan, make_plan
from niss.data import list_datasets
from niss.errors import ConfigError
from niss.simulation import Config, make_config

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
IMAGES_PER_CLIENT = 10
ROUNDS = {"client": 30, "record": 100}
PARTICIPANTS = {"client": 1000, "record": 30}
PROTOCOL_PARTICIPANTS = 100
"""Dropouts of the client unit go through the real protocol in rounds of at most so many; else they are simulated."""
_SPLITS = {"iid": "iid", "non-iid": "shards"}


@dataclass(frozen=True)
class Setting:
    """A dataset, a split and a unit of privacy; `participants` a round, of so many `clients`."""

    dataset: str
    split: str
    unit: str
    participants: int
    clients: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.split}-{self.unit}"

    @property
    def full_name(self) -> str:
        """With the size of a round where it is not the usual one: `mnist-iid-client-100`."""
        usual = self.participants == find_setting(self.name).participants
        return self.name if usual else f"{self.name}-{self.participants}"

    @property
    def title(self) -> str:
        """For a reader: `MNIST, IID, client`."""
        shown = {"mnist": "MNIST", "cifar10": "CIFAR-10", "iid": "IID", "non-iid": "non-IID"}
        return ", ".join(shown.get(part, part) for part in (self.dataset, self.split, self.unit))


@dataclass(frozen=True)
class Variant:
    """What goes wrong: the share `rho` of a round's clients that collude, and the share that drops out."""

    name: str
    rho: float = 0.0
    dropout: float = 0.0
    mode: str = "tolerate"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("none"),
        Variant("collusion", rho=0.2),
        Variant("tolerate", dropout=0.1),
        Variant("repair", dropout=0.1, mode="repair"),
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
    """A contestant: `kappa` None is the planner's choice; `tuned_as` names whose tuning it takes."""

    name: str
    kind: str
    tuned_as: str
    kappa: float | None = None
    printed: bool = False


METHODS = {
    method.name: method
    for method in (
        Method("fedavg", "fedavg", "fedavg"),
        Method("dp-fedavg", "dp-fedavg", "dp-fedavg"),
        Method("central-dp", "central-dp", "central-dp"),
        Method("niss-as-printed", "niss", "niss-planned", printed=True),
        Method("niss-kappa-1", "niss", "niss-planned", kappa=1.0),
        Method("niss-planned", "niss", "niss-planned"),
    )
}


def find_setting(name: str, *, participants: int | None = None, rounds: int | None = None) -> Setting:
    """`mnist-iid-client` and the like; any dataset that niss knows may stand in front."""
    known = {info.name: info.train_size for info in list_datasets()}
    dataset, unit = name.removesuffix("-client").removesuffix("-record"), name.rpartition("-")[2]
    split = "non-iid" if dataset.endswith("-non-iid") else "iid"
    dataset = dataset.removesuffix(f"-{split}")
    if name != f"{dataset}-{split}-{unit}" or dataset not in known or unit not in ROUNDS:
        raise ConfigError(
            f"unknown setting {name!r}",
            field="--setting",
            hint="for example mnist-iid-client, cifar10-non-iid-record",
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
    )


SETTINGS = tuple(
    f"{dataset}-{split}-{unit}"
    for dataset in ("mnist", "cifar10")
    for split in ("iid", "non-iid")
    for unit in ("client", "record")
)


def setting_config(
    setting: Setting,
    method: Method,
    choice: Choice,
    *,
    epsilon: float,
    variant: Variant = VARIANTS["none"],
    seed: int = 1,
    device: str = "auto",
) -> Config:
    """The run of one method. Colluders and dropouts count only where noise is shared."""
    client = setting.unit == "client"
    niss = method.kind == "niss"
    drops = variant.dropout if niss else 0.0
    real = drops > 0.0 and client and setting.participants <= PROTOCOL_PARTICIPANTS
    values: dict[str, Any] = {
        "name": setting.name,
        "seed": seed,
        "rounds": setting.rounds,
        "exchange": "protocol" if real else "simulated",
        "data": {"dataset": setting.dataset, "split": _SPLITS[setting.split], "clients": setting.clients},
        "model": {"name": "mlp", "hidden": [choice.hidden]},
        "training": {
            "participants": setting.participants,
            "sampling": "shuffled",
            "epochs": 5 if client else 1,
            "batch_size": 10,
            "learning_rate": choice.learning_rate,
            "device": device,
        },
        "privacy": {"unit": setting.unit, "clip": choice.clip, "epsilon": epsilon, "delta": DELTA},
        "methods": [{"name": method.kind, "label": method.name}],
    }
    if niss:
        values["protocol"] = {"mode": variant.mode, "dropout": drops}
        values["privacy"] |= {"colluders": math.ceil(variant.rho * setting.participants - 1e-9)}
        _share_noise(values, setting, method, variant, make_config(values).participations)
    return make_config(values)


def _share_noise(
    values: dict[str, Any], setting: Setting, method: Method, variant: Variant, participations: int
) -> None:
    """Who shares with how many, how strongly, and how much may be revealed: as the planner says."""
    if method.printed:
        values["methods"][0] |= {"distortion": "scalar", "tau2": 0.0}
        return
    planned = _planned(setting.participants, participations, variant, method.kappa)
    values["privacy"] |= {"revealed": planned.revealed, "dropped": planned.dropped}
    values["methods"][0] |= {
        "kappa": planned.kappa,
        "neighbours": planned.neighbours,
        "graph": planned.graph,
    }


@cache
def _planned(participants: int, participations: int, variant: Variant, kappa: float | None) -> Plan:
    """The planner's choice. It depends on ratios of variances alone, so one epsilon serves for all."""
    return make_plan(
        participants=participants,
        delta=DELTA,
        participations=participations,
        collusion=variant.rho,
        dropout=variant.dropout,
        mode=variant.mode,
        kappa=kappa,
    ).plan


def setting_base(setting: Setting) -> Mapping[str, Any]:
    """What all cells of a setting have in common, for its result file."""
    return {
        "dataset": setting.dataset,
        "split": setting.split,
        "unit": setting.unit,
        "clients": setting.clients,
        "participants": setting.participants,
        "rounds": setting.rounds,
        "delta": DELTA,
        "local_epochs": 5 if setting.unit == "client" else 1,
        "batch_size": 10,
    }


def held_out_setting(setting: Setting, records: int) -> Setting:
    """The same setting on a training set cut to `records` images: as many to a client, hence fewer clients."""
    if setting.unit == "record":
        return setting
    clients = records // IMAGES_PER_CLIENT
    return replace(setting, clients=clients, participants=min(setting.participants, clients))
