"""What the benchmarks have in common: flags, turns, medians, tables, processes, and where the numbers go."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

Found = TypeVar("Found")
Name = TypeVar("Name")
Row = dict[str, Any]
FOLDER = Path(__file__).parent


def command_line(
    doc: str, *, only: Sequence[str] = (), repeats: int = 5, **flags: dict[str, Any]
) -> argparse.Namespace:
    """The flags of every benchmark, and its own `flags`, each with what `add_argument` takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the numbers there")
    parser.add_argument("--quick", action="store_true", help="a smoke test of seconds")
    parser.add_argument("--repeats", type=int, default=repeats, help="default: %(default)s")
    if only:
        names = ", ".join(only)
        parser.add_argument("--only", nargs="+", choices=only, default=list(only), metavar="NAME", help=names)
    for name, settings in flags.items():
        parser.add_argument(f"--{name}", **settings)
    options = parser.parse_args()
    options.repeats = 1 if options.quick else options.repeats
    return options


class Report:
    """Tables as they are found: printed, and kept where `--json` says so."""

    def __init__(self, options: argparse.Namespace, *packages: str) -> None:
        where = machine(*packages)
        self._path, self._kept = options.json, {"machine": where, "tables": {}}
        print(", ".join(f"{name} {value}" for name, value in where.items()))

    def add(self, title: str, rows: Sequence[Row]) -> None:
        """Print a line for each row, in the columns of the first; lists and dictionaries are kept alone."""
        columns = [name for name, value in rows[0].items() if not isinstance(value, list | dict)]
        if title not in self._kept["tables"]:
            print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
        for row in rows:
            print("| " + " | ".join(_cell(row.get(name)) for name in columns) + " |", flush=True)
        self._kept["tables"].setdefault(title, []).extend(rows)
        if self._path is not None:
            self._path.write_text(json.dumps(self._kept, indent=2) + "\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else str(value)


def machine(*packages: str) -> Row:
    """Where this was measured, with which versions, and how busy it was."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    installed = [name for name in ("niss", "numpy", *packages) if importlib.util.find_spec(name)]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in installed},
    }


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """How long it takes; by default CPU time of all threads, which other work on the machine changes least."""
    began = clock()
    work()
    return clock() - began


def in_turns(
    contestants: Mapping[Name, Callable[[], Found]], repeats: int, *, warm_up: bool = False
) -> dict[Name, list[Found]]:
    """What each returns, one after the other and so often; a warm-up before is left out."""
    found: dict[Name, list[Found]] = {name: [] for name in contestants}
    for _ in range(repeats + warm_up):
        for name, play in contestants.items():
            found[name].append(play())
    return {name: values[warm_up:] for name, values in found.items()}


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each number by name."""
    return {name: median(run[name] for run in runs) for name in runs[0]}


def elsewhere(function: str, *arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """A process that calls `module.function` of this folder and prints what it returns; `answer` waits for that."""
    module = function.partition(".")[0]
    code = f"import json, sys, {module}; print(json.dumps({function}(*json.loads(sys.argv[1]))))"
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(arguments)],
        env=os.environ | environment | with_this_folder(environment.get("PYTHONPATH")),
        stdout=subprocess.PIPE,
        text=True,
    )


def with_this_folder(path: str | None = None) -> dict[str, str]:
    """The environment in which other processes find these files, after those in `path`."""
    paths = (path, str(FOLDER), os.getenv("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(part for part in paths if part)}


def answer(process: subprocess.Popen[str]) -> Any:
    """What the function in another process returned."""
    printed, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args} failed")
    return json.loads(printed)


def family(process: int) -> list[int]:
    """The process and those it has begun, and they."""
    try:
        tasks = Path(f"/proc/{process}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [process, *(member for child in children for member in family(child))]


def cpu_seconds(processes: Sequence[int]) -> float:
    """That they have used so far; those that have ended count nothing."""
    used = 0.0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def peak() -> float:
    """The most megabytes that this process held since it was last asked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024.0


def megabytes(processes: Sequence[int], kind: str) -> float:
    """Of a kind in smaps: Rss, Pss (what is shared counts once) or Private_ (what each has to itself)."""
    lines = [line for one in processes for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024.0
