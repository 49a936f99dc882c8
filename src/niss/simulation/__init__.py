"""Federated runs on one machine: settings, rounds, runs, comparisons, and their folders.

`round.py` is a round from top to bottom; `method_run.py` is the loop around it. Settings are read without torch, so
that what is wrong with them is said at once; whatever trains is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from niss.simulation.config import Config, load_config, make_config, preset, with_overrides

if TYPE_CHECKING:
    from niss.simulation.method_run import RoundEvent, TrainingEvent
    from niss.simulation.results import Comparison, RunResult
    from niss.simulation.runner import compare, compare_together, resume, run

_ROOMS = {
    "results": ("Comparison", "RunResult"),
    "method_run": ("RoundEvent", "TrainingEvent"),
    "runner": ("compare", "compare_together", "resume", "run"),
}

__all__ = [
    "Comparison",
    "Config",
    "RoundEvent",
    "RunResult",
    "TrainingEvent",
    "compare",
    "compare_together",
    "load_config",
    "make_config",
    "preset",
    "resume",
    "run",
    "with_overrides",
]


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"niss.simulation.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
