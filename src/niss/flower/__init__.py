"""NISS on Flower: `ClientApp(mods=[niss_mod])` and `NissStrategy(FedAvg(...), plan=plan)`.

Where to read, on the client and on the server:

    mod          answers a message: trains, checks, hides the update
    limits       what the owner of a node insists on
    state        what a client keeps between messages
    strategy     wraps one of Flower's strategies; a round from its side
    wrapped      what is asked of that strategy, and what it gets to see
    run_config   its settings in an app's pyproject.toml
    run_plan     what is refused of them, and made of the plan
    session      a run of the protocol: enrolment, rounds, repair
    carrying     the rounds of a run that carries noise from each to the next
    cohorts      whose turn it is in them
    coordinator  who hands out keys and holds the beacon: the server, or a tracker
    saving       what is kept of a run, to go on after the server was killed
    account      what was charged and what happened; the statement
    metrics      metrics inside the upload, on both sides
    proposal     how a run begins, on both sides
    transport    what Flower's messages carry, on both sides

The names are imported on first use, so that importing this package does not need Flower. Nothing here loads torch: an
app of any framework that gives numpy arrays will do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.flower.limits import Limits
    from niss.flower.mod import NissMod, niss_mod
    from niss.flower.strategy import NissStrategy

_HOME = {"Limits": "limits", "NissMod": "mod", "NissStrategy": "strategy", "niss_mod": "mod"}

__all__ = ["Limits", "NissMod", "NissStrategy", "niss_mod"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'niss.flower' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"niss.flower.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "flwr":
            raise
        raise ConfigError(
            "Flower is not installed", hint="install it with: pip install 'niss[flower]'"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
