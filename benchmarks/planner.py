"""How long a plan takes: `niss plan` as a user waits for it, and the answer to a slider of `niss ui`.

The command is a process of its own, imports included; `--version` beside it is what any command costs. The page's
answer is the function behind `/api/plan`, asked for another number of participants each time, so that no earlier answer
helps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, one_line, write_json

COMMANDS = {
    "niss --version": ["--version"],
    "200 participants": ["plan", "--participants", "200", "--collusion", "0.2"],
    "5,000 participants": ["plan", "--participants", "5000", "--collusion", "0.2"],
    "20,000 participants": ["plan", "--participants", "20000", "--collusion", "0.2"],
    "1,000,000 participants": ["plan", "--participants", "1000000", "--collusion", "0.2"],
    "carried, 1,000 of 10,000, 100 rounds": [
        *("plan", "--carry", "--participants", "1000", "--clients", "10000", "--rounds", "100")
    ],
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "200 participants": {"participants": 200, "collusion": 0.2},
    "2,000 participants": {"participants": 2_000, "collusion": 0.2},
    "2,000 participants, repair": {
        **{"participants": 2_000, "collusion": 0.2, "dropout": 0.05, "mode": "repair"}
    },
    "1,000,000 participants": {"participants": 1_000_000, "collusion": 0.2},
    "carried, 100 rounds": {"participants": 1_000, "clients": 10_000, "rounds": 100, "carry": True},
    "carried, 100 rounds, any pattern": {
        **{"participants": 1_000, "clients": 10_000, "rounds": 100, "carry": True, "pattern": "any"}
    },
    "carried, 300 rounds": {"participants": 1_000, "clients": 10_000, "rounds": 300, "carry": True},
}


def run_command(arguments: list[str], _repeat: int) -> None:
    """A process of its own."""
    done = subprocess.run([sys.executable, "-m", "niss", *arguments], capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"niss {' '.join(arguments)} failed:\n{done.stderr.decode()}")


def answer_question(question: dict[str, Any], repeat: int) -> None:
    """What the page waits for once the server is running."""
    from niss.ui.planning import PlanQuestion, answer

    participants = question["participants"] - repeat
    others = {"clients": 10 * participants} if "clients" in question else {}
    answer(PlanQuestion(**{**question, "participants": participants, **others}))


def measure(
    contestants: dict[str, Any], work: Callable[[Any, int], None], repeats: int
) -> list[dict[str, float | str]]:
    """Median seconds of each, the repeats interleaved, and how many times the first's."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(1, repeats + 1):
        for name, asked in contestants.items():
            began = time.perf_counter()
            work(asked, repeat)
            seconds[name].append(time.perf_counter() - began)
    first = median(next(iter(seconds.values())))
    return [
        {"name": name, "seconds": median(times), "times_the_first": median(times) / first}
        for name, times in seconds.items()
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--only", nargs="+", choices=["command", "page"], default=["command", "page"])
    parser.add_argument("--quick", action="store_true", help="one repeat, as a smoke test")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    where = machine("scipy")
    print(one_line(where))
    found: dict[str, Any] = {"machine": where}
    for kind in options.only:
        contestants, work = (COMMANDS, run_command) if kind == "command" else (QUESTIONS, answer_question)
        # Imports and first calls are no part of a slider's answer.
        work(next(iter(contestants.values())), 0)
        found[kind] = measure(contestants, work, 1 if options.quick else options.repeats)
        print(f"\n{kind:40} seconds  x the first")
        for row in found[kind]:
            print(f"  {row['name']:38} {row['seconds']:7.2f} {row['times_the_first']:12.1f}")
    write_json(options.json, found)


if __name__ == "__main__":
    main()
