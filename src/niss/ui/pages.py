"""What the pages say, filled into the templates of assets/: the planner's form, its answers, runs and their progress.

The planner answers a question as asked with its plan, and with the commands that give the same plan again.

The form is made from the fields of the question (`niss.settings`): type, choices, default and meaning are theirs. Added
here is what only a page needs: where a control stands, what it is called, and the ends of its slider.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from markupsafe import Markup

from niss.accounting import PlanQuestion
from niss.claims import digits, printed_claim
from niss.errors import ConfigError
from niss.report.page import environment
from niss.report.plans import plan_chart, plan_lines
from niss.settings import described
from niss.simulation import settings_of_plan
from niss.simulation.sections import MethodConfig
from niss.svg import in_two_widths
from niss.version import __version__

# A longer carried run takes seconds, which is no longer "at once".
MOST_ROUNDS = 1_000
# The settings that `niss run` has a flag for; any other goes through --set.
_FLAGS = {
    "rounds": "--rounds",
    "data.clients": "--clients",
    "training.participants": "--participants",
    "privacy.epsilon": "--epsilon",
    "privacy.delta": "--delta",
    "privacy.clip": "--clip",
}
# Printed by the one function that prints claims, so that the page shows the digits of the command.
_EPSILONS = ("epsilon_joint", "epsilon_marginal")
_PROMISE, _ROUND, _SILOS = "The promise", "Rounds and clients", "Silos and records"
_TROUBLE, _MORE = "What may go wrong", "More settings"
_CHOOSE = "let the planner choose"


@dataclass(frozen=True)
class Control:
    """One setting of the question on the page.

    home       the group it stands in
    label      what it is called
    low, high  the ends of its slider, logarithmic unless it begins at 0
    start      what it is at first, unless that is the field's default
    auto       what is said beside a box that leaves the value to the planner; empty: there is no box
    only       shown and sent alone with carried shares ("carry") or without ("round"); empty: always
    figures    digits that the slider rounds to
    """

    home: str
    label: str
    low: float = 0.0
    high: float = 0.0
    start: Any = None
    auto: str = ""
    only: str = ""
    figures: int = 2


_DELTA = Control(_PROMISE, "δ", 1e-10, 1e-2, figures=1)
_COLLUSION = Control(_TROUBLE, "Collusion", 0.0, 0.9)
_CLIP = Control(_MORE, "Clip", 0.01, 100.0)
# By what is hidden, the settings that belong to it. `unit` is asked first; what a given `tau2` promises, and
# participations that do not follow from all clients, are asked on the command line.
CONTROLS = {
    "client": {
        "participants": Control(_ROUND, "Clients in a round", 3, 2000, 200),
        "clients": Control(_ROUND, "Clients in all", 3, 100_000, 1000),
        "rounds": Control(_ROUND, "Rounds", 1, 1000, 30),
        "parameters": Control(_ROUND, "Model size", 100, 1e8, 199210),
        "carry": Control(_ROUND, "Carry shares to the next round"),
        "pattern": Control(_ROUND, "How clients come back", only="carry"),
        "for_": Control(_ROUND, "What noise is carried for", only="carry"),
        "epsilon": Control(_PROMISE, "ε, privacy loss", 0.1, 20.0),
        "delta": _DELTA,
        "collusion": _COLLUSION,
        "dropout": Control(_TROUBLE, "Dropout", 0.0, 0.5),
        "mode": Control(_TROUBLE, "When clients drop out", start="tolerate"),
        "neighbours": Control(_MORE, "Neighbours", 1, 199, 30, _CHOOSE, "round"),
        "kappa": Control(_MORE, "κ, strength of the shares", 0.25, 100.0, 4, _CHOOSE),
        "clip": _CLIP,
        "relation": Control(_MORE, "What takes its place"),
    },
    "record": {
        "participants": Control(_SILOS, "Silos", 3, 100, 10),
        "records": Control(_SILOS, "Records of all silos", 100, 10**8, 10_000),
        "batch": Control(_SILOS, "Batch, share of the records", 1e-4, 1.0, "0.05"),
        "rounds": Control(_SILOS, "Rounds", 1, 1000, 100),
        "parameters": Control(_SILOS, "Model size", 10, 1e8, 10_000),
        "epsilon": Control(_PROMISE, "ε, privacy loss", 0.1, 20.0, 2.0),
        "delta": _DELTA,
        "collusion": _COLLUSION,
        "dropout": Control(_TROUBLE, "Dropout", 0.0, 0.5),
        "mode": Control(_TROUBLE, "When a silo is lost", start="repair"),
        "neighbours": Control(_MORE, "Neighbours", 1, 9, 9, _CHOOSE),
        "kappa": Control(_MORE, "κ, strength of the shares", 0.25, 100.0, 4, _CHOOSE),
        "clip": _CLIP,
    },
}
_CHOICES = {
    "client": "all that a client holds",
    "record": "one record of a silo",
    "cyclic": "fixed cohorts take turns",
    "any": "at least so many rounds apart",
    "publishing": "a good last model",
    "training": "good models on the way, too",
    "planned": "repair for silos, else tolerate",
    "tolerate": "their noise stays in the sum",
    "repair": "a committee takes it out",
    "zero-out": "what a client sent",
    "replace-one": "any other data instead",
}


def form(unit: str) -> dict[str, list[dict[str, Any]]]:
    """The controls of the planner for what is hidden, by their groups, each with the setting it stands for."""
    fields = {setting.name: setting for setting in described(PlanQuestion)}
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, control in CONTROLS[unit].items():
        setting = fields[name]
        start = setting.default if control.start is None else control.start
        shown = {
            "setting": setting,
            "control": control,
            "start": digits(start).replace(",", "") if isinstance(start, float) else start,
            "whole": isinstance(control.low, int),
        }
        groups.setdefault(control.home, []).append(shown)
    return groups


def planner_page(unit: str) -> str:
    """The planner's page for what is hidden; for people where that is none of the choices."""
    asked = next(setting for setting in described(PlanQuestion) if setting.name == "unit")
    unit = unit if unit in asked.choices else str(asked.default)
    return fill("planner.html", {"page": "planner", "unit": asked, "hidden": unit, "form": form(unit)})


def in_code(text: str) -> Markup:
    """Text in which a word between backticks is code."""
    parts = text.split("`")
    return Markup().join(
        Markup("<code>{}</code>").format(part) if at % 2 else part for at, part in enumerate(parts)
    )


def log_place(value: float, low: float, high: float) -> str:
    """Where a value lies between two others on a logarithmic line, in percent of its length."""
    share = math.log(max(value, low) / low) / math.log(max(high / low, 1.0001))
    return f"{100 * min(1.0, share):.2f}%"


_TEMPLATES = environment("niss.ui", "assets")
_TEMPLATES.filters["in_code"] = in_code
_TEMPLATES.globals |= {"log_place": log_place, "choices": _CHOICES, "version": __version__}


def fill(name: str, values: Mapping[str, Any]) -> str:
    """A template of assets/ with these values in it."""
    return _TEMPLATES.get_template(name).render(values)


@lru_cache(maxsize=128)
def answer(question: PlanQuestion) -> dict[str, Any]:
    """The plan as `niss plan --json` prints it, the commands and Python lines that reproduce it, and the page of it.

    Raises `ConfigError` for a question that has no answer, naming the field to change. Answers are kept, since a
    slider often goes back to where it was.
    """
    if question.carry and question.rounds is not None and question.rounds > MOST_ROUNDS:
        many = f"this page plans carried shares for at most {MOST_ROUNDS} rounds, not {question.rounds}"
        raise ConfigError(many, field="rounds", hint="`niss plan --carry` takes its time for more")
    planned = question.forecast()
    values = question.to_json(planned)
    run_command = None
    with suppress(ConfigError):
        run_command = shlex.join(["niss", "run", *run_arguments(values)])
    said = {
        "plan": values,
        "run_command": run_command,
        "printed": {name: printed_claim(getattr(planned, name)) for name in _EPSILONS},
        "command": command(question),
        "python": python_lines(question),
    }
    chart = in_two_widths(plan_chart(values)) if values.get("curve") or values["carry"] else ""
    return said | {"html": fill("answer.html", said | {"chart": chart, "lines": plan_lines(planned, values)})}


def command(question: PlanQuestion) -> str:
    """The command line that prints this plan."""
    flags = [
        f"--{name.rstrip('_')}" if value is True else f"--{name.rstrip('_')} {shlex.quote(_text(value))}"
        for name, value in question.asked().items()
    ]
    return " ".join(["niss plan", *flags, "--json"])


def run_arguments(values: Mapping[str, Any]) -> list[str]:
    """The arguments of `niss run` that carry out a plan, each as it is typed."""
    found, method = settings_of_plan(values)
    arguments = []
    for key, value in found.items():
        text = _number(value)
        arguments += [_FLAGS[key], text] if key in _FLAGS else ["--set", f"{key}={text}"]
    for name, value in method.items():
        if value != getattr(MethodConfig(), name):
            arguments += ["--method" if name == "name" else f"--{name}", _number(value)]
    return arguments


def _number(value: object) -> str:
    """As `niss run` reads it, to six digits."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def python_lines(question: PlanQuestion) -> str:
    """The Python lines that make this plan."""
    lines = "".join(f"    {name}={value!r},\n" for name, value in question.asked().items())
    return (
        f"from niss.accounting import PlanQuestion\n\nquestion = PlanQuestion(\n{lines})\n"
        "planned = question.forecast()\nprint(question.to_json(planned))\n"
    )


def _text(value: object) -> str:
    """As one would type it: a float that is whole without its `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
