"""Two ranks against one process: seconds of a round, and what each process computed for it.

Every contestant trains the same clients with one worker a process, through `niss.run`; they take turns, and medians of
the repeats are printed. Seconds on a clock mean something only where nothing else runs. Processor seconds of the
busiest rank, against those of one process, say how the work divides wherever it is measured; they leave waiting out.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import machine, one_line, write_json


@dataclass(frozen=True)
class Work:
    """Rounds of so many clients with an MLP 784-200-200-10, `samples` each."""

    clients: int = 60
    samples: int = 100
    epochs: int = 2
    rounds: int = 6


QUICK = Work(clients=8, samples=20, epochs=1, rounds=3)
METHODS = ("fedavg", "niss")


def play(work: Work, method: str) -> dict[str, Any]:
    """The run itself, in one of its processes: median seconds of rounds after the first, processor seconds of one."""
    import niss
    from niss.files import read_json_lines
    from niss.simulation import compare  # noqa: F401 (loads the loop over rounds)

    loop, used = sys.modules["niss.simulation.run"], [0.0]
    play_runs = loop.play_runs

    def timed(*arguments: Any) -> Any:
        used[0] = time.process_time()
        found = play_runs(*arguments)
        used[0] = (time.process_time() - used[0]) / work.rounds
        return found

    loop.play_runs = timed

    config = niss.make_config(
        {
            "rounds": work.rounds,
            "data": {"clients": work.clients, "samples_per_client": work.samples, "split": "iid"},
            "training": {"participants": work.clients, "epochs": work.epochs, "device": "cpu", "workers": 1},
            "privacy": {"epsilon": 8.0},
            "methods": [{"name": method}],
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        result = niss.run(config, out=Path(folder) / "run")
        if result.folder is None:  # not rank 0
            return {"processor": used[0]}
        seconds = [line["seconds"] for line in read_json_lines(result.folder / "timing.jsonl")[0]]
    return {
        "round_seconds": median(seconds[1:]),
        "processor": used[0],
        "accuracy": result.accuracy,
    }


def contest(work: Work, method: str, ranks: int) -> dict[str, float]:
    """One contestant, once."""
    command = [sys.executable, __file__, "--play", json.dumps({"method": method, **asdict(work)})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)} if ranks > 1 else environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = [json.loads(process.communicate()[0]) for process in processes]
    spent = [one["processor"] for one in found]
    return {**found[0], "processor": max(spent), "processor_of_all": sum(spent)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--quick", action="store_true", help="a smoke test of seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play is not None:
        settings = json.loads(options.play)
        method = settings.pop("method")
        print(json.dumps(play(Work(**settings), method)))
        return
    work, where = QUICK if options.quick else Work(), machine("torch")
    print(one_line(where), f"\nload {os.getloadavg()[0]:.1f} before", sep="")
    rows = []
    for method in options.only:
        runs: dict[int, list[dict[str, float]]] = {1: [], options.ranks: []}
        for _ in range(1 if options.quick else options.repeats):
            for ranks, kept in runs.items():
                kept.append(contest(work, method, ranks))
        found = {
            ranks: {name: median(run[name] for run in kept) for name in kept[0]}
            for ranks, kept in runs.items()
        }
        ratios = [
            one["round_seconds"] / two["round_seconds"]
            for one, two in zip(runs[1], runs[options.ranks], strict=True)
        ]
        rows.append({"method": method, "ratios": ratios, **{str(ranks): one for ranks, one in found.items()}})
        print(
            f"{method}: one process {found[1]['round_seconds']:.2f} s a round, {options.ranks} ranks "
            f"{found[options.ranks]['round_seconds']:.2f} s; {median(ratios):.2f} times as fast "
            f"({min(ratios):.2f} to {max(ratios):.2f}); processor seconds a round {found[1]['processor']:.2f}, of the "
            f"busiest rank {found[options.ranks]['processor']:.2f} "
            f"({found[1]['processor'] / found[options.ranks]['processor']:.2f} times less), of all ranks "
            f"{found[options.ranks]['processor_of_all']:.2f}"
        )
        write_json(options.json, {"machine": where, "work": asdict(work), "rows": rows})


if __name__ == "__main__":
    main()
