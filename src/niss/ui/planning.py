"""The planner behind the sliders: the question as asked, its plan, and the commands that give the same plan again."""

from __future__ import annotations

import shlex
from contextlib import suppress
from functools import lru_cache
from typing import Any

from niss.accounting import PlanQuestion
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
        "looks": {key: drawn(look_of(method)) for key, method in CURVES.items()},
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


def drawn(look: Look) -> dict[str, str]:
    """The colour of the method in every figure, as the pages name it, and its dashes."""
    colour = f"series-{SERIES.index(look.colour) + 1}" if look.colour in SERIES else "ink"
    strokes = look.line[1] if isinstance(look.line, tuple) else ()
    return {"colour": colour, "dash": " ".join(f"{_LINE_WIDTH * length:g}" for length in strokes)}
