"""Two ranks against one process: seconds of a round, and what each process computed for it.

Every contestant trains the same clients with one worker a process, through `niss.run`; they take turns, and medians of
the repeats are printed. Seconds on a clock mean something only where nothing else runs. Processor seconds of the
busiest rank, against those of one process, say how the work divides wherever it is measured; they leave waiting out.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import Report, answer, command_line, elsewhere, in_turns, medians

WORK = {"clients": 60, "samples": 100, "epochs": 2, "rounds": 6}
"""Rounds of so many clients with an MLP 784-200-200-10, `samples` each."""
QUICK = {"clients": 8, "samples": 20, "epochs": 1, "rounds": 3}


def play(work: dict[str, int], method: str) -> dict[str, float]:
    """The run itself, in one of its processes: median seconds of rounds after the first, processor seconds of one."""
    import niss
    from niss.files import read_json_lines
    from niss.simulation.runner import compare  # noqa: F401 (loads the loop over rounds)

    loop, used = sys.modules["niss.simulation.runner"], [0.0]
    play_runs = loop.play_runs

    def timed(*arguments: Any) -> Any:
        used[0] = time.process_time()
        found = play_runs(*arguments)
        used[0] = (time.process_time() - used[0]) / work["rounds"]
        return found

    loop.play_runs = timed
    clients = work["clients"]
    config = niss.make_config(
        {
            "rounds": work["rounds"],
            "data": {"clients": clients, "samples_per_client": work["samples"], "split": "iid"},
            "training": {"participants": clients, "epochs": work["epochs"], "device": "cpu", "workers": 1},
            "privacy": {"epsilon": 8.0},
            "methods": [{"name": method}],
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        result = niss.run(config, out=Path(folder) / "run")
        if result.folder is None:  # not rank 0
            return {"processor": used[0]}
        seconds = [line["seconds"] for line in read_json_lines(result.folder / "timing.jsonl")[0]]
    return {"round": median(seconds[1:]), "processor": used[0], "accuracy": result.accuracy or 0.0}


def contest(work: dict[str, int], method: str, ranks: int) -> dict[str, float]:
    """One contestant, once."""
    environment = {"OMP_NUM_THREADS": "1"}
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        elsewhere("ranks.play", work, method, **environment, **({"RANK": str(rank)} if ranks > 1 else {}))
        for rank in range(ranks)
    ]
    found = [answer(process) for process in processes]
    spent = [one["processor"] for one in found]
    return {**found[0], "processor": max(spent), "processor of all": sum(spent)}


def main() -> None:
    """Measure, print, write."""
    options = command_line(__doc__, only=("fedavg", "niss"), ranks={"type": int, "default": 2})
    work, report = QUICK if options.quick else WORK, Report(options, "torch")
    for method in options.only:
        runs = in_turns(
            {str(ranks): partial(contest, work, method, ranks) for ranks in (1, options.ranks)},
            options.repeats,
        )
        one, several = runs["1"], runs[str(options.ranks)]
        ratios = [before["round"] / after["round"] for before, after in zip(one, several, strict=True)]
        fast = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows = [{"ranks": 1, **medians(one), "times as fast": "1"}]
        rows.append({"ranks": options.ranks, **medians(several), "times as fast": fast, "ratios": ratios})
        report.add(f"{method}, seconds: {work}", rows)


if __name__ == "__main__":
    main()
