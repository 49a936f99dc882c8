"""Whether the cohort engine is ever slower than the plain loop: rounds of few clients with few samples, in one process.

Every model of `simulation.py`, and the LSTM of the package; a cell is the median, over turns, of the CPU seconds of the
plain loop (`plain=True`, `train_client` one after another) divided by those of the engine in the same turn. Below 1:
the engine is slower.
"""

from __future__ import annotations

import statistics

import torch
from harness import Report, Row, command_line, in_turns, seconds

from niss.learning import Cohort, LocalTraining
from simulation import Case, make_jobs

ROUNDS = ((1, 10, 10), (2, 10, 10), (4, 10, 1), (4, 40, 10), (10, 10, 10), (10, 20, 64))
"""Clients, samples of each, and the batch size."""
MODELS = ("logistic", "mlp", "gru", "lstm", "torch-gru", "cnn", "transformer", "lora", "resnet")


def ratio(case: Case, batch_size: int, repeats: int) -> float:
    """How many times as long the plain loop takes, by CPU time."""
    problem, jobs = make_jobs(case)
    work = LocalTraining(case.epochs, batch_size, 0.01)
    with Cohort.of(*problem, device="cpu", workers=1) as engine, Cohort.of(*problem, plain=True) as plain:
        turns = {
            "engine": lambda: seconds(lambda: engine.train(jobs, work)),
            "plain": lambda: seconds(lambda: plain.train(jobs, work)),
        }
        found = in_turns(turns, repeats, warm_up=True)
    return statistics.median(a / b for a, b in zip(found["plain"], found["engine"], strict=True))


def main() -> None:
    """Measure, print, write."""
    options = command_line(__doc__, only=MODELS, repeats=21)
    torch.set_num_threads(1)
    report = Report(options, "torch")
    for name in options.only:
        row: Row = {"model": name}
        for clients, samples, batch_size in ROUNDS[:1] if options.quick else ROUNDS:
            found = ratio(Case(name, clients, samples, 1), batch_size, options.repeats)
            row[f"{clients} x {samples}, {batch_size}"] = found
        report.add("times the plain loop; clients x samples, batch", [row])


if __name__ == "__main__":
    main()
