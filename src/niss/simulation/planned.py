"""From a plan to a run: the settings under which a simulation keeps what `niss plan --json` promised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niss.errors import ConfigError, RunFolderError
from niss.files import read_json
from niss.simulation.config import Config, MethodConfig, PrivacyConfig

_HINT = "write one with `niss plan ... --json > plan.json`"
# The settings that `niss run` has a flag for; any other goes through --set.
_FLAGS = {
    "rounds": "--rounds",
    "data.clients": "--clients",
    "training.participants": "--participants",
    "privacy.epsilon": "--epsilon",
    "privacy.delta": "--delta",
    "privacy.clip": "--clip",
}


def read_plan(path: Path) -> dict[str, Any]:
    """The plan in a file; raises `ConfigError` where it holds none that can be run."""
    try:
        values = read_json(path)
    except RunFolderError as error:
        raise ConfigError(error.message, field="--plan", hint=_HINT) from None
    if not isinstance(values.get("plan"), dict):
        raise ConfigError(f"{path} holds no plan that can be run", field="--plan", hint=_HINT)
    return values


def settings_of_plan(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run by dotted key, and its method, from a plan as `niss plan --json` prints it.

    There are as many clients as it takes for each to take part as often as planned, where the plan names none.
    Raises `ConfigError` for a plan that the simulator cannot run, or that lacks something.
    """
    try:
        found = _carried(values) if "noise_central" in values else _within_rounds(values)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the plan lacks something or is damaged: {error}", field="--plan", hint=_HINT
        ) from None
    settings, method = found
    unusual = Config()
    for section in ("privacy", "protocol"):
        for name, value in getattr(unusual, section).model_dump().items():
            # What is as usual need not be said.
            if settings.get(f"{section}.{name}", ...) == value:
                del settings[f"{section}.{name}"]
    return settings, method


def _within_rounds(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plan, participants = values["plan"], int(values["participants"])
    often = int(plan["participations"])
    rounds = int(values.get("rounds") or often)
    settings: dict[str, Any] = {
        "rounds": rounds,
        "data.clients": participants * math.ceil(rounds / often),
        "training.participants": participants,
        **{f"privacy.{name}": plan[name] for name in PrivacyConfig.model_fields if name in plan},
        "protocol.mode": values["mode"],
        "protocol.dropout": float(values.get("dropout") or 0.0),
    }
    names = ("kappa", "neighbours", "graph", "distortion")
    method = {name: plan[name] for name in names if name in MethodConfig.model_fields}
    method |= {"name": plan["method"], "tau2": "calibrated" if plan["tau2"] is None else plan["tau2"]}
    return settings, method


def _carried(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plan = values["plan"]
    if len(plan["carried_to_residual"]) > 1:
        raise ConfigError(
            "the simulator carries shares to the next round only",
            field="--plan",
            hint="plan with --lags 1",
        )
    cyclic = plan["pattern"] == "cyclic"
    settings: dict[str, Any] = {
        "rounds": int(plan["horizon"]),
        "data.clients": int(values["clients"]),
        "training.participants": int(plan["participants"]),
        "training.sampling": "cyclic" if cyclic else "uniform",
        "privacy.epsilon": values["epsilon"],
        "privacy.delta": values["delta"],
        "privacy.clip": values["clip"],
        "privacy.relation": values["relation"],
        "privacy.colluders": plan["colluders"],
        "protocol.mode": values["mode"],
        "protocol.dropout": values["dropout"],
    }
    if not cyclic:
        settings["training.separation"] = int(plan["separation"])
    return settings, {"name": "niss-carried", "kappa": values["kappa"]}


def check_kept(config: Config, settings: Mapping[str, Any]) -> None:
    """Refuse settings under which clients would take part more often than was planned for."""
    planned = config.privacy.participations
    if planned is None or "data.clients" not in settings:
        return
    free = config.model_copy(update={"privacy": config.privacy.model_copy(update={"participations": None})})
    if free.participations > planned:
        raise ConfigError(
            f"clients would take part {free.participations} times, and the plan is for {planned}",
            field="rounds",
            hint="fewer rounds, more clients, or a plan for more participations",
        )


def run_arguments(values: Mapping[str, Any]) -> list[str]:
    """The arguments of `niss run` that carry out a plan, each as it is typed."""
    settings, method = settings_of_plan(values)
    arguments = []
    for key, value in settings.items():
        text = _text(value)
        arguments += [_FLAGS[key], text] if key in _FLAGS else ["--set", f"{key}={text}"]
    for name, value in {"method": method.pop("name"), **method}.items():
        usual = "niss" if name == "method" else MethodConfig.model_fields[name].default
        if value != usual:
            arguments += [f"--{name}", _text(value)]
    return arguments


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
