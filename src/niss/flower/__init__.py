"""NISS on Flower: `ClientApp(mods=[niss_mod])` and `NissStrategy(FedAvg(...), plan=plan)`.

The names are imported on first use, so that the parts that need no Flower work without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from niss.errors import ConfigError

if TYPE_CHECKING:
    from niss.flower.limits import Limits
    from niss.flower.mod import NissMod, niss_mod
    from niss.flower.strategy import NissStrategy

_HOME = {
    "Limits": "niss.flower.limits",
    "NissMod": "niss.flower.mod",
    "NissStrategy": "niss.flower.strategy",
    "niss_mod": "niss.flower.mod",
}

__all__ = ["Limits", "NissMod", "NissStrategy", "niss_mod"]


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
