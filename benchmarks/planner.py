"""How long a plan takes: `niss plan` as a user waits for it, and the answer to a slider of `niss ui`.

The command is a process of its own, imports included; `--version` beside it is what any command costs. The page's
answer is the function behind `/api/plan`, asked for another number of participants each time, so that no earlier answer
helps. Counted is the time of the processor, which other work on the machine hardly changes; `--beside` measures another
checkout in the same run, repeat by repeat.

    python benchmarks/planner.py --beside ../earlier/src
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
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
    "1,000,000, dropouts repaired": [
        *("plan", "--participants", "1000000", "--collusion", "0.2", "--dropout", "0.05", "--mode", "repair")
    ],
    "1,000, complete graph": ["plan", "--participants", "1000", "--neighbours", "999", "--collusion", "0.2"],
    "carried, 1,000 of 10,000, 100 rounds": [
        *("plan", "--carry", "--participants", "1000", "--clients", "10000", "--rounds", "100")
    ],
}
QUESTIONS: dict[str, dict[str, Any]] = {
    "14 participants, 5 neighbours": {"participants": 14, "neighbours": 5, "collusion": 0.2},
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
    "carried, 1,000 rounds": {"participants": 1_000, "clients": 10_000, "rounds": 1_000, "carry": True},
    "carried, 1,000 rounds, any pattern": {
        **{"participants": 1_000, "clients": 10_000, "rounds": 1_000, "carry": True, "pattern": "any"}
    },
}
ASK = """
import json, sys, time
from niss.ui.planning import PlanQuestion, answer
questions, repeat = json.loads(sys.argv[1])
answer(PlanQuestion(participants=50, clients=100, rounds=4, carry=True))
answer(PlanQuestion(participants=50, collusion=0.2, dropout=0.05, mode="repair"))
for name, question in questions.items():
    question["participants"] -= repeat
    if "clients" in question:
        question["clients"] = 10 * question["participants"]
    began = time.process_time()
    answer(PlanQuestion(**question))
    questions[name] = time.process_time() - began
print(json.dumps(questions))
"""


def run(source: Path | None, *arguments: str) -> tuple[str, float]:
    """What Python prints with those arguments, and the seconds of processor it takes; `source`: of another checkout."""
    environment = dict(os.environ) if source is None else {**os.environ, "PYTHONPATH": str(source)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, check=False, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr.decode()}")
    return done.stdout.decode(), after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_commands(source: Path | None, _repeat: int) -> dict[str, float]:
    """The seconds of each command."""
    return {name: run(source, "-m", "niss", *arguments)[1] for name, arguments in COMMANDS.items()}


def measure_page(source: Path | None, repeat: int) -> dict[str, float]:
    """The seconds of each answer in a process that has answered before: imports are no part of a slider's answer."""
    printed, _ = run(source, "-c", ASK, json.dumps([QUESTIONS, repeat]))
    return dict(json.loads(printed))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--only", nargs="+", choices=["command", "page"], default=["command", "page"])
    parser.add_argument("--beside", type=Path, help="src of another checkout, measured in turn")
    parser.add_argument("--quick", action="store_true", help="one repeat, as a smoke test")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    where = machine("scipy")
    print(one_line(where))
    found: dict[str, Any] = {"machine": where}
    sources = [None] if options.beside is None else [None, options.beside.resolve()]
    for kind in options.only:
        measured = measure_commands if kind == "command" else measure_page
        times: list[dict[str, list[float]]] = [{} for _ in sources]
        for repeat in range(1, 1 + (1 if options.quick else options.repeats)):
            for source, kept in zip(sources, times, strict=True):
                for name, seconds in measured(source, repeat).items():
                    kept.setdefault(name, []).append(seconds)
        print(f"\n{kind:45} seconds of processor" + ("" if len(sources) == 1 else "   beside  ratio"))
        found[kind] = []
        for name in times[0]:
            here, *other = (median(kept[name]) for kept in times)
            row = {"name": name, "seconds": here}
            line = f"  {name:43} {here:20.2f}"
            if other:
                row |= {"beside": other[0], "ratio": other[0] / here}
                line += f" {other[0]:8.2f} {row['ratio']:6.1f}"
            print(line)
            found[kind].append(row)
    write_json(options.json, found)


if __name__ == "__main__":
    main()
