"""NISS on Flower: `ClientApp(mods=[niss_mod])` and `NissStrategy(FedAvg(...), plan=plan)`.

A transport for `niss.session`, which has the two halves of a run. Here is what Flower needs of them, on the client and
on the server:

    mod          answers a message: has it checked, trains, has the update hidden; keeps a node's memory in its Context
    strategy     wraps one of Flower's strategies; a round from its side
    wrapped      the wrapped strategy: what of it can be served, and a start of its own
    given        its settings in an app's pyproject.toml, its plan, and what is refused of them
    state        where a server keeps its run
    transport    what Flower's messages carry, on both sides, and what is said of a round

The names are imported on first use, so that importing this package does not need Flower. Nothing here loads torch: an
app of any framework that gives numpy arrays will do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.flower.given import flower_plan
    from niss.flower.mod import NissMod, niss_mod
    from niss.flower.strategy import NissStrategy
    from niss.session.limits import Limits

_HOME = {
    "Limits": "niss.session.limits",
    "NissMod": "niss.flower.mod",
    "NissStrategy": "niss.flower.strategy",
    "flower_plan": "niss.flower.given",
    "niss_mod": "niss.flower.mod",
}

__all__ = ["Limits", "NissMod", "NissStrategy", "flower_plan", "niss_mod"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'niss.flower' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
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
