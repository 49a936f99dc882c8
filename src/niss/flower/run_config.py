"""The settings of a run, read from `[tool.flwr.app.config]`: what `NissStrategy.from_run_config` takes from where.

    plan      epsilon, delta, clip, kappa, neighbours, colluders, relation, dropped, revealed, shares, as in `Plan`;
              its participations from `rounds`, or `num-server-rounds` as Flower's templates call it;
              with `carry` also separation, pattern, dropout and closing
    strategy  mode, carry, participants, tracker, tracker-ca, server-key, coalition, report, resume, stage-timeout,
              clip-quantile, first-clip, weight-cap

A setting that is left out, or empty text, keeps its default. In mode `repair` one client may drop out of a round, and
one edge be revealed, unless the settings say otherwise. Flower hands the run configuration to the nodes too, but they
take no limit from it: it is the server's side that writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from niss.accounting import Plan
from niss.errors import ConfigError


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


_ROUNDS = ("rounds", "num-server-rounds")
_PLAN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("epsilon", "delta", "clip", "kappa", "neighbours"), float),
    **dict.fromkeys(("colluders", "dropped", "revealed"), int),
    "relation": str,
}
_CARRIED: dict[str, Callable[[Any], Any]] = {
    "separation": int,
    "pattern": str,
    "dropout": float,
    "closing": _switch,
}
_STRATEGY: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "mode": ("mode", str),
    "carry": ("carry", _switch),
    "participants": ("participants", int),
    "tracker": ("tracker", str),
    "tracker-ca": ("tracker_ca", str),
    "server-key": ("key", str),
    "coalition": ("coalition", str),
    "report": ("report", str),
    "resume": ("resume", str),
    "stage-timeout": ("stage_timeout", float),
    "clip-quantile": ("quantile", float),
    "first-clip": ("first_clip", float),
    "weight-cap": ("weight_cap", float),
}
_REQUIRED = ("epsilon", "clip")


def strategy_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `NissStrategy` in a run configuration, other than the plan.

    Raises `ConfigError`, naming the setting, for a value of the wrong kind.
    """
    given = _given(settings)
    return {
        argument: _read(name, given[name], parse)
        for name, (argument, parse) in _STRATEGY.items()
        if name in given
    }


def plan_of(settings: Mapping[str, Any]) -> Plan:
    """The plan in a run configuration; raises `ConfigError` for a setting that is missing or of the wrong kind."""
    given = _given(settings)
    if rounds := next((name for name in _ROUNDS if name in given), None):
        given[_ROUNDS[0]] = given[rounds]
    for name in (*_REQUIRED, _ROUNDS[0]):
        if name not in given:
            raise ConfigError(
                "is missing", field=name, hint=f"set {name} in [tool.flwr.app.config], or give a plan"
            )
    values = {name: _read(name, given[name], parse) for name, parse in _PLAN.items() if name in given}
    values["participations"] = _read(_ROUNDS[0], given[_ROUNDS[0]], int)
    if _read("carry", given.get("carry", False), _switch):
        values |= {name: _read(name, given[name], parse) for name, parse in _CARRIED.items() if name in given}
    if given.get("mode") == "repair":
        values = {"dropped": 1, "revealed": 1} | values
    return Plan(**values)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value != ""}


def _read(name: str, value: Any, parse: Callable[[Any], Any]) -> Any:
    try:
        return parse(value)
    except (TypeError, ValueError):
        raise ConfigError(f"invalid value {value!r}", field=name) from None
