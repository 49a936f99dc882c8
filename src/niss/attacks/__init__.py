"""Attacks on what really leaves the devices: each is given an `Observation` and nothing more.

`simulate_round` runs a round with the mechanism itself, the estimates guess one client's update from what was seen,
the inversions turn an update back into pictures, and the audit turns success into a lower bound on epsilon. The
experiments put these together for `niss attack`; `EXPERIMENTS` lists them.

Names and modules are imported on first use, so that the options of the experiments can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.attacks import (
        canary,
        carried_runs,
        carried_servers,
        estimates,
        observation,
        pictures,
        protocol_rounds,
        rounds,
    )
    from niss.attacks.canary import canary_scores, epsilon_bound
    from niss.attacks.estimates import estimate_alone, estimate_jointly
    from niss.attacks.experiment import Experiment, Findings
    from niss.attacks.federation import AttackedFederation, make_federation
    from niss.attacks.gradients import read_picture, recover_labels
    from niss.attacks.inversion import DlgSettings, Inversion, InvertSettings, deep_leakage, invert_update
    from niss.attacks.observation import Observation
    from niss.attacks.pictures import Pictures, load_pictures, score_pictures
    from niss.attacks.rounds import (
        RoundSetting,
        SimulatedRound,
        recovered_fraction,
        relative_error,
        simulate_round,
    )

# The commands of `niss attack`, in the order of its help, and the class of each; see `load_experiment`.
EXPERIMENTS = {
    "dlg": "niss.attacks.invert.DlgExperiment",
    "joint": "niss.attacks.invert.JointExperiment",
    "invert": "niss.attacks.invert.InvertExperiment",
    "collude": "niss.attacks.collude.ColludeExperiment",
    "average": "niss.attacks.average.AverageExperiment",
    "fake-dropout": "niss.attacks.fake_dropout.FakeDropoutExperiment",
    "rerun": "niss.attacks.average.RerunExperiment",
    "carried": "niss.attacks.carried.CarriedExperiment",
    "audit": "niss.attacks.audit.AuditExperiment",
}

# Each module, and the names of `__all__` that it holds.
_MODULES = {
    "canary": "canary_scores epsilon_bound",
    "carried_runs": "",
    "carried_servers": "",
    "estimates": "estimate_alone estimate_jointly",
    "experiment": "Experiment Findings",
    "federation": "AttackedFederation make_federation",
    "gradients": "read_picture recover_labels",
    "inversion": "DlgSettings Inversion InvertSettings deep_leakage invert_update",
    "observation": "Observation",
    "pictures": "Pictures load_pictures score_pictures",
    "protocol_rounds": "",
    "rounds": "RoundSetting SimulatedRound recovered_fraction relative_error simulate_round",
}

__all__ = [
    "EXPERIMENTS",
    "AttackedFederation",
    "DlgSettings",
    "Experiment",
    "Findings",
    "Inversion",
    "InvertSettings",
    "Observation",
    "Pictures",
    "RoundSetting",
    "SimulatedRound",
    "canary",
    "canary_scores",
    "carried_runs",
    "carried_servers",
    "deep_leakage",
    "epsilon_bound",
    "estimate_alone",
    "estimate_jointly",
    "estimates",
    "invert_update",
    "load_experiment",
    "load_pictures",
    "make_federation",
    "observation",
    "pictures",
    "protocol_rounds",
    "read_picture",
    "recover_labels",
    "recovered_fraction",
    "relative_error",
    "rounds",
    "score_pictures",
    "simulate_round",
]


def load_experiment(name: str) -> type[Experiment]:
    """The class behind a command of `niss attack`. Its module is light; what a run needs is imported by the run."""
    module, _, kind = EXPERIMENTS[name].rpartition(".")
    experiment: type[Experiment] = getattr(import_module(module), kind)
    return experiment


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name == module:
            return import_module(f"niss.attacks.{module}")
        if name in names.split():
            return getattr(import_module(f"niss.attacks.{module}"), name)
    raise AttributeError(f"module 'niss.attacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
