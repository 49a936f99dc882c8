"""niss: federated learning with noise that cancels, accounted in the joint view.

The names below are the public interface. They are imported on first use, so that `import niss` is quick
and accounting never pulls in torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss.accounting import (
        Plan,
        Planned,
        Statement,
        calibrate_tau2,
        effective_variance,
        make_plan,
        statement,
    )
    from niss.data import Dataset, load_dataset, partition
    from niss.errors import ConfigError, DataError, NissError, PrivacyError, ProtocolError, RunFolderError
    from niss.graph import ShareGraph
    from niss.learning import build_model
    from niss.mechanism import clip_l2, gaussian_sigma, gdp_epsilon, gdp_mu
    from niss.randomness import SimStream
    from niss.report import write_report
    from niss.simulation import (
        Comparison,
        Config,
        RunResult,
        compare,
        load_config,
        make_config,
        preset,
        resume,
        run,
    )
    from niss.version import __version__

_HOME = {
    "Comparison": "niss.simulation",
    "Config": "niss.simulation",
    "ConfigError": "niss.errors",
    "DataError": "niss.errors",
    "Dataset": "niss.data",
    "NissError": "niss.errors",
    "Plan": "niss.accounting",
    "Planned": "niss.accounting",
    "PrivacyError": "niss.errors",
    "ProtocolError": "niss.errors",
    "RunFolderError": "niss.errors",
    "RunResult": "niss.simulation",
    "ShareGraph": "niss.graph",
    "SimStream": "niss.randomness",
    "Statement": "niss.accounting",
    "__version__": "niss.version",
    "build_model": "niss.learning",
    "calibrate_tau2": "niss.accounting",
    "clip_l2": "niss.mechanism",
    "compare": "niss.simulation",
    "effective_variance": "niss.accounting",
    "gaussian_sigma": "niss.mechanism",
    "gdp_epsilon": "niss.mechanism",
    "gdp_mu": "niss.mechanism",
    "load_config": "niss.simulation",
    "load_dataset": "niss.data",
    "make_config": "niss.simulation",
    "make_plan": "niss.accounting",
    "partition": "niss.data",
    "preset": "niss.simulation",
    "resume": "niss.simulation",
    "run": "niss.simulation",
    "statement": "niss.accounting",
    "write_report": "niss.report",
}

__all__ = [
    "Comparison",
    "Config",
    "ConfigError",
    "DataError",
    "Dataset",
    "NissError",
    "Plan",
    "Planned",
    "PrivacyError",
    "ProtocolError",
    "RunFolderError",
    "RunResult",
    "ShareGraph",
    "SimStream",
    "Statement",
    "__version__",
    "build_model",
    "calibrate_tau2",
    "clip_l2",
    "compare",
    "effective_variance",
    "gaussian_sigma",
    "gdp_epsilon",
    "gdp_mu",
    "load_config",
    "load_dataset",
    "make_config",
    "make_plan",
    "partition",
    "preset",
    "resume",
    "run",
    "statement",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'niss' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
