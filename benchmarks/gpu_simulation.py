"""A round of the paper on a CUDA device: training of all clients, 30 or 120, and evaluation, float32 and TF32.

The work: m clients x 600 samples x E = 5 epochs x batches of 10, then the mean of the updates and its
evaluation on 10,000 images, all on the device; images are synthetic, of MNIST's shape. Contestants take
turns, and medians over the repeats are printed. `one by one` is the plain PyTorch loop on the device; it
runs before the others and for fewer clients, as its line says, and ratios compare seconds per client.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from harness import Report, Row, command_line, in_turns, seconds
from torch import Tensor

from niss.learning import Cnn, Cohort, FlatLayout, ImageSamples, Job, LocalTraining, Mlp, build_model
from niss.learning.cohort import BatchTable
from niss.learning.cuda import CudaEngine, Formulation
from niss.learning.cuda.program import stacked_module
from niss.randomness import SimStream
from records import in_jax

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
        inputs, labels = self.data = images(clients * SAMPLES)
        self.module = module
        self.start = layout.flatten(module)
        self.jobs = [
            Job(self.start, torch.arange(k * SAMPLES, (k + 1) * SAMPLES), SimStream(k))
            for k in range(clients)
        ]
        self.cohort = Cohort.of(module, layout, inputs, labels, device="cuda", tf32=tf32)
        engine = self.cohort
        assert isinstance(engine, CudaEngine)
        if (chosen := formulation(kind, engine._problem.module)) is not None:
            engine._formulation = chosen
        self.test = images(10_000)

    @property
    def engine(self) -> str:
        """How it is computed."""
        return self.cohort.engine

    def play(self) -> None:
        updates = self.cohort.train(self.jobs, LocalTraining())
        self.cohort.evaluate(self.start.cuda() + updates.mean(dim=0), *self.test)


class InJax(Round):
    """The same work in JAX: `vmap` over clients of a `scan` over their batches, which are drawn beforehand."""

    def __init__(self, name: str, kind: str, clients: int, *, tf32: bool) -> None:
        import jax
        from jax import numpy as jnp

        super().__init__(name, kind, clients, tf32=tf32)
        work, table, forward = LocalTraining(), BatchTable(self.jobs, LocalTraining()), in_jax(self.module)
        for _ in table.fill():
            pass
        scores = jax.vmap(forward, in_axes=(None, 0))

        def loss(weights: Any, inputs: Any, labels: Any) -> Any:
            chances = jax.nn.log_softmax(scores(weights, inputs))
            return -jnp.take_along_axis(chances, labels[:, None], axis=1).mean()

        def play(start: Any, rows: Any, data: Any, tests: Any) -> Any:
            def step(weights: Any, own: Any) -> Any:
                slopes = jax.grad(loss)(weights, data[0][own], data[1][own])
                return {k: weights[k] - work.learning_rate * slopes[k] for k in weights}, None

            ends = jax.vmap(lambda own: jax.lax.scan(step, start, own)[0])(rows)
            mean = {k: end.mean(0) for k, end in ends.items()}
            return mean, (scores(mean, tests[0]).argmax(1) == tests[1]).mean()

        start = {k: v.detach().numpy() for k, v in self.module.named_parameters()}
        parts = [tuple(part.numpy() for part in pair) for pair in (self.data, self.test)]
        self._arguments = jax.device_put((start, table.rows.swapaxes(0, 1), *parts))
        with jax.default_matmul_precision("tensorfloat32" if tf32 else "highest"):
            compiled = jax.jit(play).lower(*self._arguments).compile()
        self._play = lambda: jax.block_until_ready(compiled(*self._arguments))

    @property
    def engine(self) -> str:
        import jax

        return f"JAX {jax.__version__}: vmap over clients, scan over steps"

    def play(self) -> Any:
        return self._play()


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
    contestants += [("jax", 30, tf32) for tf32 in (False, True) if find_spec("jax")]
    alone = ("one by one", ALONE, False)
    kinds = {"jax": InJax}
    made = {one: kinds.get(one[0], Round)(name, *one[:2], tf32=one[2]) for one in [*contestants, alone]}
    found: dict[tuple[str, int, bool], list[float]] = {}
    for turns, several in (([alone], 2), (contestants, repeats)):
        plays = {one: lambda one=one: on_device(made[one].play) for one in turns}
        found |= in_turns(plays, several, warm_up=True)
    reference = median(found[alone]) / ALONE
    rows = []
    for (kind, clients, tf32), times in found.items():
        contestant = made[kind, clients, tf32]
        row = {"contestant": kind, "clients": clients, "digits": "TF32" if tf32 else "float32"}
        row |= {"s": median(times), "lowest": min(times), "highest": max(times)}
        rows.append(
            row | {"x per client": reference / (median(times) / clients), "engine": contestant.engine}
        )
        contestant.cohort.close()
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
