"""The planner behind the sliders: the question as asked, its plan, and the commands that give the same plan again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from niss.accounting import PlanQuestion
from niss.claims import printed_claim
from niss.errors import ConfigError
from niss.report.run_charts import plan_chart
from niss.report.svg import in_two_widths
from niss.simulation.config import settings_of_plan
from niss.simulation.sections import MethodConfig

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
_EPSILONS = ("epsilon", "epsilon_joint", "epsilon_marginal")


@lru_cache(maxsize=128)
def answer(question: PlanQuestion) -> dict[str, Any]:
    """The plan as `niss plan --json` prints it, with the command and the Python lines that reproduce it.

    Raises `ConfigError` for a question that has no answer, naming the field to change. Answers are kept, since a
    slider often goes back to where it was.
    """
    if question.carry and question.rounds is not None and question.rounds > MOST_ROUNDS:
        raise ConfigError(
            f"this page plans carried shares for at most {MOST_ROUNDS} rounds, not {question.rounds}",
            field="rounds",
            hint="use the command `niss plan --carry` for more; it takes its time",
        )
    planned = question.forecast()
    values = question.to_json(planned)
    arguments: list[str] | None = None
    with suppress(ConfigError):
        arguments = run_arguments(values)
    return {
        "plan": values,
        "run_command": None if arguments is None else shlex.join(["niss", "run", *arguments]),
        "printed": {
            name: printed_claim(getattr(planned, name)) for name in _EPSILONS if hasattr(planned, name)
        },
        "chart": in_two_widths(plan_chart(values)) if values.get("curve") or values["carry"] else "",
        "command": command(question),
        "python": python_lines(question),
    }


def command(question: PlanQuestion) -> str:
    """The command line that prints this plan."""
    flags = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(_text(value))}"
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
