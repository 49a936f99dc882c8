"""From a plan to a run: the settings under which a simulation keeps what `niss plan --json` promised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from niss.errors import ConfigError

# What a simulation has where nothing else is said, of all that a plan decides; its settings are checked to agree.
USUAL: dict[str, Any] = {
    "privacy.unit": "client",
    "privacy.relation": "zero-out",
    "privacy.clip": 0.5,
    "privacy.epsilon": 3.0,
    "privacy.delta": 1e-5,
    "privacy.participations": None,
    "privacy.colluders": 0,
    "privacy.revealed": 0,
    "privacy.dropped": 0,
    "privacy.mechanism": "analytic",
    "privacy.allow_invalid": False,
    "protocol.mode": "tolerate",
    "protocol.dropout": 0.0,
}
USUAL_METHOD: dict[str, Any] = {
    "name": "niss",
    "kappa": "planned",
    "neighbours": 10.0,
    "graph": "regular",
    "distortion": "additive",
    "tau2": "calibrated",
}
HINT = "write one with `niss plan ... --json > plan.json`"
# The settings that `niss run` has a flag for; any other goes through --set.
_FLAGS = {
    "rounds": "--rounds",
    "data.clients": "--clients",
    "training.participants": "--participants",
    "privacy.epsilon": "--epsilon",
    "privacy.delta": "--delta",
    "privacy.clip": "--clip",
}


def settings_of_plan(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run by dotted key, and its method, from a plan as `niss plan --json` prints it.

    There are as many clients as it takes for each to take part as often as planned, where the plan names none.
    Raises `ConfigError` for a plan that the simulator cannot run, or that lacks something.
    """
    if not isinstance(values.get("plan"), dict):
        raise ConfigError("the file holds no plan that can be run", field="--plan", hint=HINT)
    try:
        found = _carried(values) if values.get("carry") else _within_rounds(values)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the plan lacks something or is damaged: {error}", field="--plan", hint=HINT
        ) from None
    settings, method = found
    # What is as usual need not be said.
    return {key: value for key, value in settings.items() if value != USUAL.get(key, ...)}, method


def _within_rounds(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plan, participants = values["plan"], int(values["participants"])
    often = int(plan["participations"])
    rounds = int(values.get("rounds") or often)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "data.clients": participants * math.ceil(rounds / often),
        "training.participants": participants,
        **{key: plan[key.removeprefix("privacy.")] for key in USUAL if key.startswith("privacy.")},
        "protocol.mode": values["mode"],
        "protocol.dropout": float(values.get("dropout") or 0.0),
    }
    method = {name: plan[name] for name in ("kappa", "neighbours", "graph", "distortion")}
    method |= {"name": plan["method"], "tau2": "calibrated" if plan["tau2"] is None else plan["tau2"]}
    return settings, method


def _carried(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plan = values["plan"]
    noise, cyclic = plan["noise"], plan["pattern"] == "cyclic"
    settings: dict[str, Any] = {
        "rounds": int(plan["horizon"]),
        "data.clients": int(values["clients"]),
        "training.participants": int(noise["participants"]),
        "training.sampling": "cyclic" if cyclic else "uniform",
        "privacy.epsilon": values["epsilon"],
        "privacy.delta": values["delta"],
        "privacy.clip": values["clip"],
        "privacy.relation": values["relation"],
        "privacy.colluders": noise["colluders"],
        "protocol.mode": values["mode"],
        "protocol.dropout": values["dropout"],
    }
    if not cyclic:
        settings["training.separation"] = int(plan["separation"])
    return settings, {"name": "niss-carried", "kappa": values["kappa"]}


def run_arguments(values: Mapping[str, Any]) -> list[str]:
    """The arguments of `niss run` that carry out a plan, each as it is typed."""
    settings, method = settings_of_plan(values)
    arguments = []
    for key, value in settings.items():
        text = _text(value)
        arguments += [_FLAGS[key], text] if key in _FLAGS else ["--set", f"{key}={text}"]
    for name, value in method.items():
        if value != USUAL_METHOD[name]:
            arguments += ["--method" if name == "name" else f"--{name}", _text(value)]
    return arguments


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
