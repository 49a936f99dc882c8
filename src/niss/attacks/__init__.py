"""Attacks on what really leaves the devices: each is given an `Observation` and nothing more.

`simulate_round` plays a round with the mechanism itself, the estimates guess one client's update from what was seen,
the inversions turn an update back into pictures, and the audit turns success into a lower bound on epsilon. The
experiments put these together for `niss attack`; `EXPERIMENTS` lists them.

All names are imported on first use, so that the options of the experiments can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from niss.attacks.experiment import Experiment as Experiment
from niss.attacks.experiment import Findings as Findings
from niss.attacks.experiment import options_of as options_of

if TYPE_CHECKING:
    from niss.attacks.canary import AuditBound, CanaryScores, canary_scores, epsilon_bound
    from niss.attacks.estimates import Estimate, estimate_alone, estimate_jointly
    from niss.attacks.federation import Federation, make_federation
    from niss.attacks.gradients import UpdateFunction, read_picture, recover_labels
    from niss.attacks.inversion import DlgSettings, Inversion, InvertSettings, deep_leakage, invert_update
    from niss.attacks.observation import Observation
    from niss.attacks.pictures import Pictures, PictureScores, load_pictures, score_pictures
    from niss.attacks.rounds import SimulatedRound, recovered_fraction, relative_error, simulate_round

EXPERIMENTS = {
    "dlg": "niss.attacks.invert.DlgExperiment",
    "joint": "niss.attacks.joint.JointExperiment",
    "invert": "niss.attacks.invert.InvertExperiment",
    "collude": "niss.attacks.collude.ColludeExperiment",
    "average": "niss.attacks.average.AverageExperiment",
    "fake-dropout": "niss.attacks.fake_dropout.FakeDropoutExperiment",
    "rerun": "niss.attacks.rerun.RerunExperiment",
    "audit": "niss.attacks.audit.AuditExperiment",
}
"""The commands of `niss attack`, in the order of its help, and the class of each; see `load_experiment`."""

_NAMES = {
    "canary": ("AuditBound", "CanaryScores", "canary_scores", "epsilon_bound"),
    "estimates": ("Estimate", "estimate_alone", "estimate_jointly"),
    "federation": ("Federation", "make_federation"),
    "gradients": ("UpdateFunction", "read_picture", "recover_labels"),
    "inversion": ("DlgSettings", "Inversion", "InvertSettings", "deep_leakage", "invert_update"),
    "observation": ("Observation",),
    "pictures": ("PictureScores", "Pictures", "load_pictures", "score_pictures"),
    "rounds": ("SimulatedRound", "recovered_fraction", "relative_error", "simulate_round"),
}
_HOME = {name: f"niss.attacks.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "EXPERIMENTS",
    "AuditBound",
    "CanaryScores",
    "DlgSettings",
    "Estimate",
    "Experiment",
    "Federation",
    "Findings",
    "Inversion",
    "InvertSettings",
    "Observation",
    "PictureScores",
    "Pictures",
    "SimulatedRound",
    "UpdateFunction",
    "canary_scores",
    "deep_leakage",
    "epsilon_bound",
    "estimate_alone",
    "estimate_jointly",
    "invert_update",
    "load_experiment",
    "load_pictures",
    "make_federation",
    "options_of",
    "read_picture",
    "recover_labels",
    "recovered_fraction",
    "relative_error",
    "score_pictures",
    "simulate_round",
]


def load_experiment(name: str) -> type[Experiment]:
    """The class behind a command of `niss attack`. Its module is light; what a run needs is imported by the run."""
    module, _, kind = EXPERIMENTS[name].rpartition(".")
    experiment: type[Experiment] = getattr(import_module(module), kind)
    return experiment


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'niss.attacks' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
