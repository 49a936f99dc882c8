"""How long a plan takes: `niss plan` as a user waits for it, and the answer to a slider of `niss ui`.

The command is a process of its own, imports included; `--version` beside it is what any command costs. The page's
answer is the function behind `/api/plan`, asked for another number of participants each time, so that no earlier answer
helps. Counted is the time of the processor, which other work on the machine hardly changes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from harness import Report, answer, command_line, elsewhere, in_turns, medians

MANY = "--participants 1000000 --collusion 0.2"
COMMANDS = {
    "niss --version": "--version",
    "200 participants": "plan --participants 200 --collusion 0.2",
    "5,000 participants": "plan --participants 5000 --collusion 0.2",
    "20,000 participants": "plan --participants 20000 --collusion 0.2",
    "1,000,000 participants": f"plan {MANY}",
    "1,000,000, dropouts repaired": f"plan {MANY} --dropout 0.05 --mode repair",
    "1,000, complete graph": "plan --participants 1000 --neighbours 999 --collusion 0.2",
    "carried, 1,000 of 10,000, 100 rounds": ("plan --carry --participants 1000 --clients 10000 --rounds 100"),
}
CARRIED = {"participants": 1_000, "clients": 10_000, "carry": True}
QUESTIONS: dict[str, dict[str, Any]] = {
    "14 participants, 5 neighbours": {"participants": 14, "neighbours": 5, "collusion": 0.2},
    "200 participants": {"participants": 200, "collusion": 0.2},
    "2,000 participants": {"participants": 2_000, "collusion": 0.2},
    "2,000 participants, repair": {
        **{"participants": 2_000, "collusion": 0.2, "dropout": 0.05, "mode": "repair"}
    },
    "1,000,000 participants": {"participants": 1_000_000, "collusion": 0.2},
    "carried, 100 rounds": {**CARRIED, "rounds": 100},
    "carried, 100 rounds, any pattern": {**CARRIED, "rounds": 100, "pattern": "any"},
    "carried, 300 rounds": {**CARRIED, "rounds": 300},
    "carried, 1,000 rounds": {**CARRIED, "rounds": 1_000},
    "carried, 1,000 rounds, any pattern": {**CARRIED, "rounds": 1_000, "pattern": "any"},
}


def ask(repeat: int) -> dict[str, float]:
    """The seconds of each answer of the page, in a process that has answered before: imports are no part of them."""
    from niss.ui.pages import PlanQuestion, answer

    answer(PlanQuestion(participants=50, clients=100, rounds=4, carry=True))
    answer(PlanQuestion(participants=50, collusion=0.2, dropout=0.05, mode="repair"))
    seconds = {}
    for name, question in QUESTIONS.items():
        question["participants"] -= repeat
        if "clients" in question:
            question["clients"] = 10 * question["participants"]
        began = time.process_time()
        answer(PlanQuestion(**question))
        seconds[name] = time.process_time() - began
    return seconds


def measure_commands(_: object) -> dict[str, float]:
    """The seconds of each command."""
    return {name: run([sys.executable, "-m", "niss", *flags.split()]) for name, flags in COMMANDS.items()}


def run(command: list[str]) -> float:
    """The seconds of processor that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_page(repeats: count[int]) -> dict[str, float]:
    """The same of the page, with other questions each time."""
    return dict(answer(elsewhere("planner.ask", next(repeats))))


MEASURED: dict[str, Callable[..., dict[str, float]]] = {"command": measure_commands, "page": measure_page}


def main() -> None:
    """Measure, print, write."""
    options = command_line(__doc__, only=list(MEASURED))
    report = Report(options, "scipy")
    for kind in options.only:
        turns = {kind: partial(MEASURED[kind], count(1))}
        found = medians(in_turns(turns, options.repeats)[kind])
        rows = [{kind: name, "seconds": seconds} for name, seconds in found.items()]
        report.add(f"seconds of processor, {kind}", rows)


if __name__ == "__main__":
    main()
