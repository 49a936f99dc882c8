"""A round of the paper on a CUDA device: training of all clients, 30 or 120, and evaluation, float32 and TF32.

The work: m clients x 600 samples x E = 5 epochs x batches of 10, then the mean of the updates and its
evaluation on 10,000 images, all on the device; images are synthetic, of MNIST's shape. Contestants take
turns, and medians over the repeats are printed. `one by one` is the plain PyTorch loop on the device; it
runs before the others and for fewer clients, as its line says, and ratios compare seconds per client.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from harness import Report, Row, command_line, in_turns, seconds
from torch import Tensor

from niss.learning import Cnn, Cohort, FlatLayout, ImageSamples, Job, LocalTraining, Mlp, build_model
from niss.learning.cuda import CudaEngine, Formulation
from niss.learning.cuda.program import stacked_module
from niss.randomness import SimStream

SHAPE, SAMPLES = (1, 28, 28), 600
ALONE = 2
"""Clients of the plain loop."""


def images(count: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1)
    centres = torch.rand(10, *SHAPE, generator=source)
    labels = torch.randint(0, 10, (count,), generator=source)
    return 0.5 * centres[labels] + 0.5 * torch.rand(count, *SHAPE, generator=source), labels


def formulation(kind: str, module: Mlp | Cnn) -> Formulation | None:
    if kind == "vmap":
        return Formulation("vmap in a CUDA graph", stacked_module(module))
    if kind == "one by one":
        return Formulation("one client after another", None)
    return None


class Round:
    """One contestant: a cohort, its jobs, and what is repeated."""

    def __init__(self, name: str, kind: str, clients: int, *, tf32: bool) -> None:
        module = build_model(name, samples=ImageSamples(SHAPE), classes=10, stream=SimStream(3))
        layout = FlatLayout.of(module)
        assert isinstance(module, Mlp | Cnn)
        inputs, labels = images(clients * SAMPLES)
        self.start = layout.flatten(module)
        self.jobs = [
            Job(self.start, torch.arange(k * SAMPLES, (k + 1) * SAMPLES), SimStream(k))
            for k in range(clients)
        ]
        self.cohort = Cohort.of(module, layout, inputs, labels, device="cuda", tf32=tf32)
        engine = self.cohort._engine
        assert isinstance(engine, CudaEngine)
        if (chosen := formulation(kind, engine._problem.module)) is not None:
            engine._formulation = chosen
        self.test = images(10_000)

    def play(self) -> None:
        updates = self.cohort.train(self.jobs, LocalTraining())
        self.cohort.evaluate(self.start.cuda() + updates.mean(dim=0), *self.test)


def on_device(work: Callable[[], object]) -> float:
    """Seconds until the device has done it."""

    def finished() -> None:
        work()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return seconds(finished, time.perf_counter)


def rounds(name: str, repeats: int, *, quick: bool) -> list[Row]:
    """Every contestant in turns; the plain loop, which takes long, twice."""
    contestants = [("niss", 30, False), ("niss", 30, True), ("vmap", 30, False)]
    contestants += [] if quick else [("vmap", 30, True), ("niss", 120, False), ("niss", 120, True)]
    alone = ("one by one", ALONE, False)
    made = {one: Round(name, *one[:2], tf32=one[2]) for one in [*contestants, alone]}
    found: dict[tuple[str, int, bool], list[float]] = {}
    for turns, several in (([alone], 2), (contestants, repeats)):
        plays = {one: lambda one=one: on_device(made[one].play) for one in turns}
        found |= in_turns(plays, several, warm_up=True)
    reference = median(found[alone]) / ALONE
    rows = []
    for (kind, clients, tf32), times in found.items():
        cohort = made[kind, clients, tf32].cohort
        row = {"contestant": kind, "clients": clients, "digits": "TF32" if tf32 else "float32"}
        row |= {"s": median(times), "lowest": min(times), "highest": max(times)}
        rows.append(row | {"x per client": reference / (median(times) / clients), "engine": cohort.engine})
        cohort.close()
    return rows


def main() -> None:
    """Measure, print, write."""
    options = command_line(__doc__, only=("mlp", "cnn"), repeats=7)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing to measure")
    report = Report(options, "torch", "triton")
    for name in options.only:
        found = rounds(name, options.repeats, quick=options.quick)
        report.add(f"{name} on {torch.cuda.get_device_name()}", found)


if __name__ == "__main__":
    main()
