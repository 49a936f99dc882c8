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
    from niss import errors as errors
    from niss import records as records
    from niss.accounting import Plan as Plan
    from niss.accounting import Statement as Statement
    from niss.accounting import assess as assess
    from niss.accounting import plan as plan
    from niss.errors import NissError as NissError
    from niss.graph import ShareGraph as ShareGraph
    from niss.report import write_report as write_report
    from niss.simulation import Config as Config
    from niss.simulation import load_config as load_config
    from niss.simulation import make_config as make_config
    from niss.simulation import preset as preset
    from niss.simulation.results import Comparison as Comparison
    from niss.simulation.results import RunResult as RunResult
    from niss.simulation.runner import compare as compare
    from niss.simulation.runner import resume as resume
    from niss.simulation.runner import run as run
    from niss.version import __version__ as __version__
    from niss.views import effective_variance as effective_variance

# Of each name the room that has it; errors and records are rooms themselves.
_ROOMS = {
    **dict.fromkeys(("Plan", "Statement", "assess", "plan"), "accounting"),
    **dict.fromkeys(("Comparison", "RunResult"), "simulation.results"),
    **dict.fromkeys(("compare", "resume", "run"), "simulation.runner"),
    **dict.fromkeys(("Config", "load_config", "make_config", "preset"), "simulation"),
    **{"NissError": "errors", "ShareGraph": "graph", "write_report": "report"},
    **{"__version__": "version", "effective_variance": "views"},
}
__all__ = sorted((*_ROOMS, "errors", "records"))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'niss' has no attribute {name!r}")
    room = import_module(f"niss.{_ROOMS.get(name, name)}")
    value = globals()[name] = room if name not in _ROOMS else getattr(room, name)
    return value


def __dir__() -> list[str]:
    return __all__
