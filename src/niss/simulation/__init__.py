"""Federated runs on one machine: settings, rounds, runs, comparisons, and their folders."""

from niss.simulation.config import Config, load_config, make_config, preset, with_overrides
from niss.simulation.method_run import RunResult
from niss.simulation.run import Comparison, RoundEvent, TrainingEvent, compare, resume, run
from niss.simulation.together import compare_seeds, compare_together

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
