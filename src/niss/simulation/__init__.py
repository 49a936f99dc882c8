"""Federated runs on one machine: settings, rounds, runs, comparisons, and their folders."""

from niss.simulation.config import Config, load_config, make_config, preset, with_overrides
from niss.simulation.run import Comparison, RoundEvent, RunResult, compare, resume, run

__all__ = [
    "Comparison",
    "Config",
    "RoundEvent",
    "RunResult",
    "compare",
    "load_config",
    "make_config",
    "preset",
    "resume",
    "run",
    "with_overrides",
]
