"""niss: federated learning with noise that cancels, accounted in the joint view.

    import niss

    config = niss.make_config({"rounds": 5, "training": {"participants": 50}, "privacy": {"epsilon": 8.0}})
    result = niss.run(config, out="runs/mine")
    print(result.accuracy, result.statement.words)

The names below are the public interface: nouns are classes, verbs are functions. Each is imported on first use, so that
`import niss` is quick and planning and accounting never pull in torch. What is more special is imported from its room:
`niss.accounting`, `niss.views`, `niss.mechanism`, `niss.data`, `niss.learning`, `niss.protocol`, `niss.flower`,
`niss.attacks`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from niss import errors, records
    from niss.accounting import Plan, Statement, assess, plan
    from niss.errors import NissError
    from niss.graph import ShareGraph
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
    from niss.views import effective_variance

_ROOMS = {
    "accounting": ("Plan", "Statement", "assess", "plan"),
    "errors": ("NissError",),
    "graph": ("ShareGraph",),
    "report": ("write_report",),
    "simulation": (
        "Comparison", "Config", "RunResult", "compare", "load_config", "make_config", "preset", "resume", "run",
    ),
    "version": ("__version__",),
    "views": ("effective_variance",),
}  # fmt: skip

__all__ = [
    "Comparison",
    "Config",
    "NissError",
    "Plan",
    "RunResult",
    "ShareGraph",
    "Statement",
    "__version__",
    "assess",
    "compare",
    "effective_variance",
    "errors",
    "load_config",
    "make_config",
    "plan",
    "preset",
    "records",
    "resume",
    "run",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in ("errors", "records"):
        return import_module(f"niss.{name}")
    for room, names in _ROOMS.items():
        if name in names:
            value = getattr(import_module(f"niss.{room}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'niss' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
