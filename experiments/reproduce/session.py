"""`niss reproduce beyond`: all methods in all settings, in processes side by side on one machine.

They take one task after the other: the search of a contestant, or its runs at all epsilons with all seeds. Where there
are several GPUs, the processes take them in turn. Runs begin once all searches are over. When the time is over, what is
whole is kept; the same command goes on from there, and from the rounds in the working folder where that is still there.
Nothing here needs a terminal library, so that `play` runs where only the simulator does.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import Doc

from experiments.reproduce import design
from experiments.reproduce.results import merge_results, read_result, result_path, write_result
from niss.settings import Count, Positive

RESULTS, RUNS = Path("results/paper"), Path("runs/reproduce")
RESERVE = 15.0
"""Seconds that are kept for the processes to end and for the results to be merged."""


@dataclass(frozen=True)
class Comparison:
    """For each setting: tune every method, then run it."""

    setting: Annotated[
        tuple[str, ...], Doc("Comma-separated, e.g. mnist-iid-client-100-of-1000; or all with fixed cohorts.")
    ] = ("all",)
    methods: Annotated[tuple[str, ...] | None, Doc("Comma-separated; all by default.")] = None
    variant: Annotated[tuple[str, ...], Doc("Comma-separated: none, collusion, tolerate, repair, late.")] = (
        tuple(design.VARIANTS)
    )
    epsilons: Annotated[
        tuple[float, ...] | None, Doc("Comma-separated, over the whole training; the setting's by default.")
    ] = None
    seeds: Annotated[Count | None, Doc("How many; the setting's by default.")] = None
    rounds: Annotated[Count | None, Doc("Instead of those of the setting, to try it out.")] = None
    stage: Annotated[Literal["tune", "run", "all"], Doc("tune, run or all.")] = "all"
    processes: Annotated[Count, Doc("Side by side.")] = 1
    stop_after: Annotated[Positive | None, Doc("Stop after so many seconds, ready to go on.")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Doc("Where clients train: auto, cpu or cuda.")] = "auto"
    out: Annotated[Path, Doc("Folder of the result files, figures and tables.")] = RESULTS
    work: Annotated[Path, Doc("Folder of the runs, from which an interrupted one goes on.")] = RUNS

    def settings(self) -> list[design.Setting]:
        """By name."""
        names = design.COMPARED if self.setting == ("all",) else self.setting
        return [design.find_setting(name, rounds=self.rounds) for name in names]

    def tasks(self, stage: str) -> list[Task]:
        """Everyone under every variant that makes a difference, the longest first."""
        longest = ("sampled", "own", "carried", "shares")
        found = [
            Task(setting, stage, method, variant)
            for setting in self.settings()
            for method in self.methods or [one.name for one in design.methods_of(setting)]
            for variant in self.variant
            if variant in setting.variants
            and design.METHODS[method].suffers(one := design.VARIANTS[variant])
            and not (stage == "tune" and one.late)
        ]
        noises = [design.METHODS[task.method].noise for task in found]
        order = sorted(range(len(found)), key=lambda at: (*longest, noises[at]).index(noises[at]))
        return [found[at] for at in order]


@dataclass(frozen=True)
class Task:
    """The search (`tune`) or the runs (`run`) of one method under one variant in one setting."""

    setting: design.Setting
    stage: str
    method: str
    variant: str

    @property
    def experiment(self) -> str:
        return design.TUNING if self.stage == "tune" else self.setting.experiment

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.setting.name}/{self.variant}/{self.method}"


def play(options: Comparison) -> list[str]:
    """Work through all stages; returns the names of the tasks that are not finished."""
    # Read where the processes load their linear algebra: each works on one thread.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    until = float("inf")
    if options.stop_after is not None:
        until = time.time() + max(options.stop_after - RESERVE, 1.0)
    unfinished: list[str] = []
    # The runs need the choices that all searches of their setting have made.
    for stage in ("tune", "run") if options.stage == "all" else (options.stage,):
        if not unfinished:
            unfinished = _work_through(options.tasks(stage), options, until)
    return unfinished


def perform(task: Task, options: Comparison, until: float) -> tuple[bool, str]:
    """One task, in a process of its own: whether it is over, and what is said of it.

    It never raises, so that one that fails does not end the others.
    """
    part = options.work / "parts" / task.name.replace("/", "_")
    began, path = time.time(), result_path(part, task.experiment, task.setting.name)
    before, finished, trouble = 0, False, ""
    try:
        before = _take_over(task, options, path)
        finished = began < until and _run(task, options, part, until)
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    result = read_result(path)
    fresh = (len(result.cells) if result else 0) - before
    state = trouble or ("done" if finished else "out of time")
    return finished, f"{before} cells, {fresh} new in {time.time() - began:.0f} s; {state}"


def _take_over(task: Task, options: Comparison, path: Path) -> int:
    """Begin with the cells of this task that an earlier session left in the results; returns how many there are."""
    merged = read_result(result_path(options.out, task.experiment, task.setting.name))
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


def _run(task: Task, options: Comparison, part: Path, until: float) -> bool:
    from experiments.reproduce.beyond import run_setting, tune
    from experiments.reproduce.runner import OutOfTime, Watch

    common: dict[str, Any] = {
        "out": part,
        "work": options.work / "runs",
        "methods": (task.method,),
        "variants": (task.variant,),
        "device": options.device,
        "progress": Watch(until=time.monotonic() + until - time.time()),
    }
    try:
        if task.stage == "tune":
            tune(task.setting, **common)
        else:
            seeds = None if options.seeds is None else range(1, options.seeds + 1)
            run_setting(task.setting, epsilons=options.epsilons, seeds=seeds, tuned_in=options.out, **common)
    except OutOfTime:
        return False
    return True


def gpus(device: str) -> list[str]:
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


def _work_through(tasks: Sequence[Task], options: Comparison, until: float) -> list[str]:
    """All tasks in order; the results of all are merged, also of those that are not finished, whose names return."""
    # Each process starts afresh: CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    names, numbers = gpus(options.device), context.Queue()
    for number in range(options.processes):
        numbers.put(number)
    share = None if options.device == "cpu" else memory_share(options.processes, len(names))
    left = [task.name for task in tasks]
    try:
        with ProcessPoolExecutor(
            options.processes, mp_context=context, initializer=take_gpu, initargs=(names, numbers, share)
        ) as pool:
            patience = None if until == float("inf") else max(until + RESERVE / 2.0 - time.time(), 0.1)
            begun = {pool.submit(perform, task, options, until): task for task in tasks}
            try:
                for done in as_completed(begun, timeout=patience):
                    finished, words = done.result()
                    if finished:
                        left.remove(begun[done].name)
                    print(f"{begun[done].name}: {words}", flush=True)
            except TimeoutError:
                # Those that do not end by themselves; the cells they have finished are in their parts.
                for process in multiprocessing.active_children():
                    process.kill()
    finally:  # also where a process was killed, which ends all of them
        parts = sorted((options.work / "parts").glob("*"))
        if any(any(part.glob("*/*.json")) for part in parts):
            merge_results(parts, options.out)
    return left
