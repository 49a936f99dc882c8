"""Attacks on what really leaves the devices: each is given an `Observation` and nothing more.

    experiment     what an attack is: options, findings, charts
    invert         `niss attack dlg`, `invert`, `joint`      collude    `collude`
    dishonest      `average`, `rerun`, `fake-dropout`        audit      `audit`, `carried`
    silo           `silo`, `oracle`

    estimates      what the adversary holds, and its best guess of one client's update
    pictures       what an update says of pictures; scores    inversion  the search for pictures behind an update
    canary         scores of many rounds or runs, and what they prove
    rounds         a round simulated with the mechanism itself
    runs           whole runs as a server sees them, and servers that bend their rules
    federation     the victim with its pictures, and the others; a silo with a record that fails
    lying          a server that lies to real nodes

Modules are imported on first use, so that the options of the experiments can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.attacks import canary as canary
    from niss.attacks import estimates as estimates
    from niss.attacks import federation as federation
    from niss.attacks import inversion as inversion
    from niss.attacks import lying as lying
    from niss.attacks import pictures as pictures
    from niss.attacks import rounds as rounds
    from niss.attacks import runs as runs
    from niss.attacks.experiment import Experiment

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
    "silo": "niss.attacks.silo.SiloExperiment",
    "oracle": "niss.attacks.silo.OracleExperiment",
    "audit": "niss.attacks.audit.AuditExperiment",
}

_MODULES = (
    "canary",
    "estimates",
    "federation",
    "inversion",
    "lying",
    "pictures",
    "rounds",
    "runs",
)
__all__ = ["EXPERIMENTS", "load_experiment", *_MODULES]


def load_experiment(name: str) -> type[Experiment]:
    """The class behind a command of `niss attack`. Its module is light; what a run needs is imported by the run."""
    module, _, kind = EXPERIMENTS[name].rpartition(".")
    experiment: type[Experiment] = getattr(import_module(module), kind)
    return experiment


if not TYPE_CHECKING:  # For a type checker an unknown name stays an error.

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"niss.attacks.{name}")
        raise AttributeError(f"module 'niss.attacks' has no attribute {name!r}")
