"""Federated runs on one machine: settings, rounds, runs, comparisons, and their folders.

`round.py` is a round from top to bottom; `run.py` is the loop around it.
"""

from niss.simulation.config import Config, load_config, make_config, preset, with_overrides
from niss.simulation.results import Comparison, RunResult
from niss.simulation.run import (
    RoundEvent,
    TrainingEvent,
    compare,
    compare_seeds,
    compare_together,
    resume,
    run,
)

__all__ = [
    "Comparison",
    "Config",
    "RoundEvent",
    "RunResult",
    "TrainingEvent",
    "compare",
    "compare_seeds",
    "compare_together",
    "load_config",
    "make_config",
    "preset",
    "resume",
    "run",
    "with_overrides",
]
