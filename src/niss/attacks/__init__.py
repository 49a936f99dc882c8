"""Attacks on what really leaves the devices: each is given an `Observation` and nothing more.

    experiment     what an attack is: options, findings, charts
    invert         `niss attack dlg`, `invert`, `joint`      collude    `collude`
    dishonest      `average`, `rerun`, `fake-dropout`        audit      `audit`, `carried`

    estimates      what the adversary holds, and its best guess of one client's update
    pictures       what an update says of pictures; scores    inversion  the search for pictures behind an update
    canary         scores of many rounds or runs, and what they prove
    carried_runs   runs with carried shares, and servers that bend their rules
    rounds         a round simulated with the mechanism itself
    federation     the victim with its pictures, and the others
    lying          a server that lies to real nodes

Names and modules are imported on first use, so that the options of the experiments can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.attacks import canary as canary
    from niss.attacks import carried_runs as carried_runs
    from niss.attacks import estimates as estimates
    from niss.attacks import lying as lying
    from niss.attacks import pictures as pictures
    from niss.attacks import rounds as rounds
    from niss.attacks.canary import canary_scores as canary_scores
    from niss.attacks.canary import epsilon_bound as epsilon_bound
    from niss.attacks.estimates import Observation as Observation
    from niss.attacks.estimates import estimate_alone as estimate_alone
    from niss.attacks.estimates import estimate_jointly as estimate_jointly
    from niss.attacks.experiment import Experiment as Experiment
    from niss.attacks.experiment import Findings as Findings
    from niss.attacks.federation import AttackedFederation as AttackedFederation
    from niss.attacks.federation import load_pictures as load_pictures
    from niss.attacks.federation import make_federation as make_federation
    from niss.attacks.inversion import DlgSettings as DlgSettings
    from niss.attacks.inversion import Inversion as Inversion
    from niss.attacks.inversion import InvertSettings as InvertSettings
    from niss.attacks.inversion import deep_leakage as deep_leakage
    from niss.attacks.inversion import invert_update as invert_update
    from niss.attacks.pictures import Pictures as Pictures
    from niss.attacks.pictures import read_picture as read_picture
    from niss.attacks.pictures import recover_labels as recover_labels
    from niss.attacks.pictures import score_pictures as score_pictures
    from niss.attacks.rounds import RoundSetting as RoundSetting
    from niss.attacks.rounds import SimulatedRound as SimulatedRound
    from niss.attacks.rounds import recovered_fraction as recovered_fraction
    from niss.attacks.rounds import relative_error as relative_error
    from niss.attacks.rounds import simulate_round as simulate_round

# The commands of `niss attack`, in the order of its help, and the class of each; see `load_experiment`.
EXPERIMENTS = {
    "dlg": "niss.attacks.invert.DlgExperiment",
    "joint": "niss.attacks.invert.JointExperiment",
    "invert": "niss.attacks.invert.InvertExperiment",
    "collude": "niss.attacks.collude.ColludeExperiment",
    "average": "niss.attacks.dishonest.AverageExperiment",
    "fake-dropout": "niss.attacks.dishonest.FakeDropoutExperiment",
    "rerun": "niss.attacks.dishonest.RerunExperiment",
    "carried": "niss.attacks.audit.CarriedExperiment",
    "audit": "niss.attacks.audit.AuditExperiment",
}

# Each module, and the names of this room that it holds.
_MODULES = {
    "canary": "canary_scores epsilon_bound",
    "carried_runs": "",
    "estimates": "Observation estimate_alone estimate_jointly",
    "experiment": "Experiment Findings",
    "federation": "AttackedFederation load_pictures make_federation",
    "inversion": "DlgSettings Inversion InvertSettings deep_leakage invert_update",
    "lying": "",
    "pictures": "Pictures read_picture recover_labels score_pictures",
    "rounds": "RoundSetting SimulatedRound recovered_fraction relative_error simulate_round",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = ["EXPERIMENTS", "load_experiment", *_MODULES, *_HOME]


def load_experiment(name: str) -> type[Experiment]:
    """The class behind a command of `niss attack`. Its module is light; what a run needs is imported by the run."""
    module, _, kind = EXPERIMENTS[name].rpartition(".")
    experiment: type[Experiment] = getattr(import_module(module), kind)
    return experiment


if not TYPE_CHECKING:  # For a type checker an unknown name stays an error.

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"niss.attacks.{name}")
        if name in _HOME:
            return getattr(import_module(f"niss.attacks.{_HOME[name]}"), name)
        raise AttributeError(f"module 'niss.attacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
