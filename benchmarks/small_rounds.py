"""Whether the cohort engine is ever slower than the plain loop: rounds of few clients with few samples, in one process.

    python benchmarks/small_rounds.py [--models NAMES] [--seconds S]

Every model of `simulation.py`, and the LSTM of the package; a cell is the median, over turns, of the CPU seconds of the
plain loop (`plain=True`, `train_client` one after another) divided by those of the engine in the same turn. Below 1:
the engine is slower.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from niss.learning import Cohort, FlatLayout, Job, LocalTraining
from niss.randomness import SimStream
from simulation import Case, make_data, make_module

ROUNDS = ((1, 10, 10), (2, 10, 10), (4, 10, 1), (4, 40, 10), (10, 10, 10), (10, 20, 64))
"""Clients, samples of each, and the batch size."""
MODELS = ("logistic", "mlp", "gru", "lstm", "torch-gru", "cnn", "transformer", "lora", "resnet")
FEWEST, MOST = 3, 41
"""Turns."""


def ratio(case: Case, batch_size: int, seconds: float) -> float:
    """How many times as long the plain loop takes, by CPU time."""
    module = make_module(case)
    layout = FlatLayout.of(module)
    inputs, labels = (torch.from_numpy(part).flatten(0, 1) for part in make_data(case))
    start, own = layout.flatten(module), torch.arange(len(labels)).view(case.clients, case.samples)
    jobs = [Job(start, own[client], SimStream(client)) for client in range(case.clients)]
    work = LocalTraining(case.epochs, batch_size, 0.01)
    with (
        Cohort(module, layout, inputs, labels, device="cpu", workers=1) as engine,
        Cohort(module, layout, inputs, labels, plain=True) as plain,
    ):

        def cpu_seconds(cohort: Cohort) -> float:
            began = time.process_time()
            cohort.train(jobs, work)
            return time.process_time() - began

        for cohort in (engine, plain):
            cpu_seconds(cohort)
        ratios: list[float] = []
        began = time.perf_counter()
        while len(ratios) < FEWEST or (time.perf_counter() - began < seconds and len(ratios) < MOST):
            ours = cpu_seconds(engine)
            ratios.append(cpu_seconds(plain) / ours)
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="some of the default: %(default)s")
    parser.add_argument("--seconds", type=float, default=1.6, help="for each cell; default: %(default)s")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| clients x samples, batch | " + " | ".join(f"{n} x {s}, {b}" for n, s, b in ROUNDS) + " |")
    print("|---" * (len(ROUNDS) + 1) + "|")
    for name in given.models.split(","):
        if name not in MODELS:
            parser.error(f"--models: no model is called {name!r}; use some of {', '.join(MODELS)}")
        cells = [
            ratio(Case(name, clients, samples, 1), batch_size, given.seconds)
            for clients, samples, batch_size in ROUNDS
        ]
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
