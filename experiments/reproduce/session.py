"""All rivals in all settings on one machine: `python -m experiments.reproduce.session --out OUT --work WORK`.

Processes side by side take one task after the other: the search of a contestant, or its runs at all epsilons with all
seeds. Where there are several GPUs, the processes take them in turn. Runs begin once all searches are over. When the
time is over, what is whole is kept in OUT; the same command goes on from there, and from the rounds in WORK where that
is still there. Nothing here needs a terminal library, so that it runs where only the simulator does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.reproduce import design
from experiments.reproduce.results import merge_results, read_result, result_path, write_result

STAGES = ("tune", "run", "all")
TUNED_AT = 3.0
"""The epsilon at which everyone is tuned, in settings that have it; the choice serves for the others too."""
RESERVE = 15.0
"""Seconds that are kept for the processes to end and for the results to be merged."""


@dataclass(frozen=True)
class Task:
    """The search or the runs of one method under one variant in one setting."""

    setting: design.Setting
    experiment: str
    method: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.setting.name}/{self.variant}/{self.method}"


@dataclass(frozen=True)
class Job:
    """What a process needs to know besides its task; `until` is a time of `time.time`."""

    out: Path
    work: Path
    until: float
    device: str
    epsilons: tuple[float, ...] | None
    seeds: tuple[int, ...] | None

    def part(self, task: Task) -> Path:
        """The folder of the results of one task: no two processes write to the same file."""
        return self.work / "parts" / task.name.replace("/", "_")


@dataclass(frozen=True)
class Outcome:
    """What came of a task: how many cells it has, how many are new, and whether it is over; `trouble` says why not."""

    cells: int
    fresh: int
    seconds: float
    finished: bool
    trouble: str = ""

    def __str__(self) -> str:
        pace = f", {self.seconds / self.fresh:.1f} s a cell" if self.fresh else ""
        state = self.trouble or ("done" if self.finished else "out of time")
        return f"{self.cells} cells, {self.fresh} new in {self.seconds:.0f} s{pace}; {state}"


def experiments_of(setting: design.Setting, stage: str) -> tuple[str, ...]:
    """What a stage has to do in a setting, in order."""
    both = design.TUNING, setting.experiment
    return {"tune": both[:1], "run": both[1:], "all": both}[stage]


def tasks_of(setting: design.Setting, experiment: str, methods: Sequence[str] | None = None) -> list[Task]:
    """Everyone under every variant that makes a difference, the longest first."""
    found = [
        Task(setting, experiment, method, variant.name)
        for method in methods or [one.name for one in design.contestants_of(setting)]
        for variant in (design.VARIANTS[name] for name in setting.variants)
        if design.METHODS[method].suffers(variant) and not (experiment == design.TUNING and variant.late)
    ]
    longest = ("sampled", "own", "carried", "shares")
    return sorted(
        found,
        key=lambda task: (*longest, design.METHODS[task.method].noise).index(
            design.METHODS[task.method].noise
        ),
    )


def perform(task: Task, job: Job) -> Outcome:
    """One task, in a process of its own; it never raises, so that one that fails does not end the others."""
    began, path = time.time(), result_path(job.part(task), task.experiment, task.setting.name)
    before, finished, trouble = 0, False, ""
    try:
        before = _take_over(task, job, path)
        finished = time.time() < job.until and _work(task, job)
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    result = read_result(path)
    cells = len(result.cells) if result else 0
    return Outcome(cells, cells - before, time.time() - began, finished, trouble)


def _take_over(task: Task, job: Job, path: Path) -> int:
    """Begin with the cells of this task that an earlier session left in the results; returns how many there are."""
    merged = read_result(result_path(job.out, task.experiment, task.setting.name))
    known = read_result(path)
    if merged is not None:
        mine = [
            cell
            for cell in merged.cells
            if (cell.labels["method"], cell.labels["variant"]) == (task.method, task.variant)
        ]
        known = (known or replace(merged, cells=())).with_cells(mine)
        if known.cells:
            write_result(path, known)
    return len(known.cells) if known else 0


def _work(task: Task, job: Job) -> bool:
    from experiments.reproduce.beyond import run_setting, tune
    from experiments.reproduce.runner import OutOfTime, Watch

    common: dict[str, Any] = {
        "out": job.part(task),
        "work": job.work / "runs",
        "methods": (task.method,),
        "variants": (task.variant,),
        "device": job.device,
        "progress": Watch(until=time.monotonic() + job.until - time.time()),
    }
    try:
        if task.experiment == design.TUNING:
            own = task.setting.epsilons
            tune(task.setting, (TUNED_AT if TUNED_AT in own else own[0],), **common)
        else:
            run_setting(task.setting, epsilons=job.epsilons, seeds=job.seeds, tuned_in=job.out, **common)
    except OutOfTime:
        return False
    return True


def _gpus(device: str) -> list[str]:
    """The GPUs that the processes take in turn, where there are several; else none is taken."""
    if device == "cpu":
        return []
    from niss.learning.cohort import visible_gpus

    found = visible_gpus()
    return found if len(found) > 1 else []


def memory_share(processes: int, gpus: int) -> float:
    """The share of a GPU's memory that is a process's own where so many processes take so many GPUs in turn.

    A twentieth is left to what CUDA itself takes for each of them.
    """
    return 0.95 / -(-processes // max(gpus, 1))


def take_gpu(names: Sequence[str], numbers: Any, share: float | None) -> None:
    """In a process that begins: see one of these GPUs alone, the next in turn, and take no more than its share.

    numbers  a queue of numbers
    share    of the GPU's memory (`memory_share`), None on a CPU: who is out of it trains fewer clients at once, and the
             others do not notice; without it, the first would leave nothing to the last
    """
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[numbers.get() % len(names)]
    if share is None:
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def work_through(tasks: Sequence[Task], job: Job, processes: int) -> list[str]:
    """All tasks, `processes` side by side, in order; returns the names of those that are not finished.

    The results of all are merged, also of those that were not finished.
    """
    # Each process starts afresh: CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    names, numbers = _gpus(job.device), context.Queue()
    for number in range(processes):
        numbers.put(number)
    share = None if job.device == "cpu" else memory_share(processes, len(names))
    left = [task.name for task in tasks]
    try:
        with ProcessPoolExecutor(
            processes, mp_context=context, initializer=take_gpu, initargs=(names, numbers, share)
        ) as pool:
            patience = max(job.until + RESERVE / 2.0 - time.time(), 0.1)
            begun = {pool.submit(perform, task, job): task for task in tasks}
            try:
                for done in as_completed(begun, timeout=patience):
                    task, outcome = begun[done], done.result()
                    if outcome.finished:
                        left.remove(task.name)
                    print(f"{job.until - time.time():6.0f} s left | {task.name}: {outcome}", flush=True)
            except TimeoutError:
                # Those that do not end by themselves; the cells they have finished are in their parts.
                for process in multiprocessing.active_children():
                    process.kill()
    finally:  # also where a process was killed, which ends all of them
        parts = sorted((job.work / "parts").glob("*"))
        if any(any(part.glob("*/*.json")) for part in parts):
            merge_results(parts, job.out)
    return left


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, help="datasets; the environment's NISS_DATA by default")
    parser.add_argument("--out", type=Path, required=True, help="the result files")
    parser.add_argument(
        "--work", type=Path, required=True, help="parts and runs; a disk in memory is fastest"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=560.0, help="after which everything has ended")
    parser.add_argument(
        "--settings", default=",".join(design.COMPARED), help="comma-separated, in this order"
    )
    parser.add_argument("--methods", help="comma-separated; all by default")
    parser.add_argument("--stage", choices=STAGES, default="all")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--epsilons", help="comma-separated; the setting's by default")
    parser.add_argument("--seeds", type=int, help="how many; the setting's by default")
    parser.add_argument("--rounds", type=int, help="instead of those of the setting, to try it out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 once nothing is left to do, else 3."""
    options = _options(arguments)
    # Read where the processes load their linear algebra: each works on one thread.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    if options.data_dir is not None:
        os.environ["NISS_DATA"] = str(options.data_dir.resolve())
    settings = [design.find_setting(name, rounds=options.rounds) for name in options.settings.split(",")]
    job = Job(
        out=options.out,
        work=options.work,
        until=time.time() + max(options.seconds - RESERVE, 1.0),
        device=options.device,
        epsilons=tuple(map(float, options.epsilons.split(","))) if options.epsilons else None,
        seeds=tuple(range(1, options.seeds + 1)) if options.seeds else None,
    )
    methods = options.methods.split(",") if options.methods else None
    unfinished: list[str] = []
    # The runs need the choices that all searches of their setting have made.
    for stage in ("tune", "run") if options.stage == "all" else (options.stage,):
        if not unfinished:
            tasks = [
                task
                for setting in settings
                for experiment in experiments_of(setting, stage)
                for task in tasks_of(setting, experiment, methods)
            ]
            unfinished += work_through(tasks, job, options.processes)
    for setting in settings:
        for experiment in experiments_of(setting, options.stage):
            result = read_result(result_path(job.out, experiment, setting.name))
            cells = result.cells if result else ()
            seconds = sum(cell.seconds for cell in cells)
            pace = f", {seconds / len(cells):.1f} s each" if cells else ""
            print(f"{experiment}/{setting.name}: {len(cells)} cells{pace}")
    print("finished" if not unfinished else f"{len(unfinished)} tasks left: " + ", ".join(unfinished))
    return 3 if unfinished else 0


if __name__ == "__main__":
    raise SystemExit(main())
