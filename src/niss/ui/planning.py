"""The planner behind the sliders: the question as asked, its plan, and the commands that give the same plan again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from niss.accounting import forecast, forecast_carried, judge_plan
from niss.accounting.plan_settings import run_arguments
from niss.claims import printed_claim
from niss.errors import ConfigError
from niss.methods import look_of
from niss.methods.look import SERIES, Look
from niss.report.plan_chart import CURVES

# Of a curve on the page, in its units; looks give dashes in widths of the line.
_LINE_WIDTH = 2.2
# A longer carried run takes seconds, which is no longer "at once".
MOST_ROUNDS = 1_000
# Printed by the one function that prints claims, so that the page shows the digits of the command.
_EPSILONS = ("epsilon", "epsilon_joint", "epsilon_marginal")
_WITHIN_A_ROUND = ("neighbours", "participations")
_ACROSS_ROUNDS = ("clients", "pattern")


class PlanQuestion(BaseModel):
    """What `niss plan` takes, by the same names and with the same defaults; anything else is refused.

    rounds          in all; without `participations`, a client is taken to be in every one of them
    participations  the rounds that one client takes part in, over which its epsilon is composed
    collusion       share of the participants that may tell the server all they know
    dropout         share of the participants that may drop out of a round
    mode            what happens then; see `niss.accounting.forecast`
    carry           whether shares are carried to later rounds; only then `clients` and `pattern` mean
                    anything, and `neighbours` and `participations` nothing (`niss.accounting.forecast_carried`)
    parameters      size of the model, by which is judged whether it can learn anything under this noise
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    participants: int
    neighbours: float | None = None
    clip: float = 1.0
    epsilon: float = 3.0
    delta: float = 1e-5
    rounds: int | None = None
    participations: int | None = None
    collusion: float = 0.0
    dropout: float = 0.0
    mode: str = "tolerate"
    kappa: float | None = None
    relation: str = "zero-out"
    carry: bool = False
    clients: int | None = None
    pattern: str | None = None
    parameters: int | None = None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `forecast`, or of `forecast_carried`, that ask this question."""
        if self.carry:
            values = self.model_dump(exclude={"carry", "parameters", *_WITHIN_A_ROUND})
            return {name: value for name, value in values.items() if value is not None}
        values = self.model_dump(exclude={"carry", "rounds", "parameters", *_ACROSS_ROUNDS})
        return values | {"participations": self.participations or self.rounds or 1}


@lru_cache(maxsize=128)
def answer(question: PlanQuestion) -> dict[str, Any]:
    """The plan as `niss plan --json` prints it, with the command and the Python lines that reproduce it.

    Raises `ConfigError` for a question that has no answer, naming the field to change. Answers are kept, since a
    slider often goes back to where it was.
    """
    _check_belonging(question)
    planned = forecast_carried(**question.arguments()) if question.carry else forecast(**question.arguments())
    values = planned.to_json() | {"rounds": question.rounds}
    asked = ("clip", "relation") if question.carry else ("dropout",)
    values |= {name: getattr(question, name) for name in asked}
    if question.parameters is not None:
        values["outlook"] = judge_plan(
            planned, parameters=question.parameters, rounds=question.rounds, clip=question.clip
        ).to_json()
    arguments: list[str] | None = None
    with suppress(ConfigError):
        arguments = run_arguments(values)
    return {
        "plan": values,
        "run_command": None if arguments is None else shlex.join(["niss", "run", *arguments]),
        "printed": {
            name: printed_claim(getattr(planned, name)) for name in _EPSILONS if hasattr(planned, name)
        },
        "looks": {key: drawn(look_of(method)) for key, method in CURVES.items()},
        "command": command(question),
        "python": python_lines(question),
    }


def _check_belonging(question: PlanQuestion) -> None:
    """Settings that go together, refused as the command refuses them."""
    rounds, participations = question.rounds, question.participations
    foreign = _WITHIN_A_ROUND if question.carry else _ACROSS_ROUNDS
    for name in foreign:
        if getattr(question, name) != PlanQuestion.model_fields[name].default:
            raise ConfigError(
                f"has no meaning {'with' if question.carry else 'without'} carried shares",
                field=name,
                hint="leave it out, or turn the switch",
            )
    if question.carry:
        for name in ("clients", "rounds"):
            if getattr(question, name) is None:
                raise ConfigError("is missing, and carried shares need it", field=name, hint="give a number")
        if rounds is not None and rounds > MOST_ROUNDS:
            raise ConfigError(
                f"this page plans carried shares for at most {MOST_ROUNDS} rounds, not {rounds}",
                field="rounds",
                hint="use the command `niss plan --carry` for more; it takes its time",
            )
    elif rounds is not None and participations is not None and participations > rounds:
        raise ConfigError(
            f"{participations} participations do not fit into {rounds} rounds",
            field="participations",
            hint="raise the rounds or lower the participations",
        )


def command(question: PlanQuestion) -> str:
    """The command line that prints this plan."""
    flags = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(_text(value))}"
        for name, value in _chosen(question.model_dump()).items()
    ]
    return " ".join(["niss plan", *flags, "--json"])


def python_lines(question: PlanQuestion) -> str:
    """The Python lines that make this plan."""
    arguments = _chosen(question.arguments())
    if arguments.get("participations") == 1:
        del arguments["participations"]
    lines = "".join(f"    {name}={value!r},\n" for name, value in arguments.items())
    planner = "forecast_carried" if question.carry else "forecast"
    return (
        f"from niss.accounting import {planner}\n\nplanned = {planner}(\n{lines})\nprint(planned.to_json())\n"
    )


def _chosen(values: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the defaults."""
    fields = PlanQuestion.model_fields
    return {
        name: value for name, value in values.items() if value is not None and value != fields[name].default
    }


def _text(value: object) -> str:
    """As one would type it: a float that is whole without its `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def drawn(look: Look) -> dict[str, str]:
    """The colour of the method in every figure, as the pages name it, and its dashes."""
    colour = f"series-{SERIES.index(look.colour) + 1}" if look.colour in SERIES else "ink"
    strokes = look.line[1] if isinstance(look.line, tuple) else ()
    return {"colour": colour, "dash": " ".join(f"{_LINE_WIDTH * length:g}" for length in strokes)}
