"""`niss reproduce beyond`: all methods in all settings, in processes side by side on one machine.

The work falls into parts: a method at an epsilon in a setting, tuned and then run with what was chosen. Where a search
begins from that of another epsilon, its part waits for that one. When the time is over, what is whole is kept; the same
command goes on from there, and from the rounds in the working folder where that is still there. Nothing here needs a
terminal library, so that `play` runs where only the simulator does.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import Doc

from experiments.reproduce import design
from niss.errors import ConfigError
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
    processes: Annotated[Count, Doc("Side by side, a method at an epsilon in each.")] = 1
    stop_after: Annotated[Positive | None, Doc("Stop after so many seconds, ready to go on.")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Doc("Where clients train: auto, cpu or cuda.")] = "auto"
    out: Annotated[Path, Doc("Folder of the result files, figures and tables.")] = RESULTS
    work: Annotated[Path, Doc("Folder of the runs, from which an interrupted one goes on.")] = RUNS

    def settings(self) -> list[design.Setting]:
        """By name."""
        names = design.COMPARED if self.setting == ("all",) else self.setting
        return [design.find_setting(name, rounds=self.rounds) for name in names]


@dataclass(frozen=True)
class Part:
    """A method at an epsilon in a setting; at None where it promises nothing."""

    setting: design.Setting
    method: str
    epsilon: float | None

    @property
    def name(self) -> str:
        at = "" if self.epsilon is None else f" at epsilon {self.epsilon:g}"
        return f"{self.setting.name}: {self.method}{at}"


def parts_of(options: Comparison) -> dict[Part, Part | None]:
    """All parts, the first epsilon of each method before the others, which wait for it."""
    found: dict[Part, Part | None] = {}
    for setting in options.settings():
        for method in options.methods or [one.name for one in design.methods_of(setting)]:
            if method not in design.METHODS:
                raise ConfigError(f"unknown name {method!r}", hint="use one of: " + ", ".join(design.METHODS))
            at = setting.search.epsilons[0] if design.METHODS[method].private else None
            first = Part(setting, method, at)
            found[first] = None
            for epsilon in (options.epsilons or setting.epsilons) if at else ():
                found.setdefault(Part(setting, method, epsilon), first)
    return found


def play(options: Comparison) -> list[str]:
    """Work through all parts; returns the names of the settings that are not finished."""
    # Read where the processes load their linear algebra: each works on one thread.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    until = None if options.stop_after is None else time.monotonic() + options.stop_after
    waiting, left = parts_of(options), list[str]()
    # Each process starts afresh: CUDA does not survive a fork.
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        begun: dict[Future[str], Part] = {}
        done: set[Part | None] = {None}
        while True:
            for part in [part for part, first in waiting.items() if first in done]:
                del waiting[part]
                begun[pool.submit(perform, part, options, until)] = part
            if not begun:
                break
            for ended in wait(begun, return_when=FIRST_COMPLETED).done:
                part, trouble = begun.pop(ended), ended.result()
                print(f"{part.name}: {trouble or 'done'}", flush=True)
                left += [part.setting.name] if trouble else []
                done |= set() if trouble else {part}
    return list(dict.fromkeys([*left, *(part.setting.name for part in waiting)]))


def perform(part: Part, options: Comparison, until: float | None) -> str:
    """Tune and run one part, in a process of its own; returns why it is not finished.

    It never raises, so that one that fails does not end the others.
    """
    from experiments.reproduce.beyond import run_setting, tune
    from experiments.reproduce.runner import Watch

    watch, setting = Watch(until=until), part.setting
    common: dict[str, Any] = {
        **{name: getattr(options, name) for name in ("out", "work", "device")},
        "methods": (part.method,),
        "progress": watch,
    }
    tuned = [name for name in options.variant if name in setting.search.variants]
    seeds = None if options.seeds is None else range(1, options.seeds + 1)
    epsilons = None if part.epsilon is None else (part.epsilon,)
    try:
        watch()
        _share_memory(options)
        if part.epsilon is None or part.epsilon in setting.search.epsilons:
            tune(setting, variants=tuned, epsilons=epsilons, **common)
        if part.epsilon is None or options.epsilons is None or part.epsilon in options.epsilons:
            run_setting(setting, variants=options.variant, epsilons=epsilons, seeds=seeds, **common)
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
