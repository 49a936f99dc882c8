"""`niss reproduce beyond`: all methods in all settings, in processes side by side on one machine.

They take one setting after the other: first the search of everyone, then the runs with what was chosen. When the time
is over, what is whole is kept; the same command goes on from there, and from the rounds in the working folder where
that is still there. Nothing here needs a terminal library, so that `play` runs where only the simulator does.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import Doc

from experiments.reproduce import design
from niss.settings import Count, Positive

RESULTS, RUNS = Path("results/paper"), Path("runs/reproduce")


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
    processes: Annotated[Count, Doc("Side by side, a setting in each.")] = 1
    stop_after: Annotated[Positive | None, Doc("Stop after so many seconds, ready to go on.")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Doc("Where clients train: auto, cpu or cuda.")] = "auto"
    out: Annotated[Path, Doc("Folder of the result files, figures and tables.")] = RESULTS
    work: Annotated[Path, Doc("Folder of the runs, from which an interrupted one goes on.")] = RUNS

    def settings(self) -> list[design.Setting]:
        """By name."""
        names = design.COMPARED if self.setting == ("all",) else self.setting
        return [design.find_setting(name, rounds=self.rounds) for name in names]


def play(options: Comparison) -> list[str]:
    """Work through all settings; returns the names of those that are not finished."""
    # Read where the processes load their linear algebra: each works on one thread.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    until = None if options.stop_after is None else time.monotonic() + options.stop_after
    left = []
    # Each process starts afresh: CUDA does not survive a fork.
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        begun = {pool.submit(perform, setting, options, until): setting for setting in options.settings()}
        for done in as_completed(begun):
            name, trouble = begun[done].name, done.result()
            print(f"{name}: {trouble or 'done'}", flush=True)
            left += [name] if trouble else []
    return left


def perform(setting: design.Setting, options: Comparison, until: float | None) -> str:
    """Everyone in one setting, in a process of its own; returns why it is not finished.

    It never raises, so that one that fails does not end the others.
    """
    from experiments.reproduce.beyond import run_setting, tune
    from experiments.reproduce.runner import Watch

    watch = Watch(until=until)
    common: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("out", "work", "methods", "device")},
        "progress": watch,
    }
    tuned = [name for name in options.variant if not design.VARIANTS[name].late]
    seeds = None if options.seeds is None else range(1, options.seeds + 1)
    try:
        watch()
        _share_memory(options)
        tune(setting, variants=tuned, **common)
        run_setting(setting, variants=options.variant, epsilons=options.epsilons, seeds=seeds, **common)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _share_memory(options: Comparison) -> None:
    """Take no more of a GPU than a process's share, less a twentieth for CUDA itself.

    Who is out of it trains fewer clients at once; without it the first process would leave nothing to the last.
    """
    import torch

    if options.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.95 / options.processes)
