"""The cohort equals the reference, client by client, whatever the group, the model and the settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from niss.learning import (
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    build_model,
)
from niss.learning.cohort import Problem
from niss.randomness import SimStream
from support.stacked import assert_as_the_reference, make_jobs, two_starts

NOWHERE = torch.zeros(1)
UNEVEN = (13, 31, 1, 20, 7, 40, 10)
PLAIN_SGD = LocalTraining(epochs=2, batch_size=10, learning_rate=0.1)
FULL_SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.05, momentum=0.9, weight_decay=0.01)


def problem(
    name: str, shape: tuple[int, int, int], count: int, hidden: tuple[int, ...] | None = None
) -> Problem:
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, *shape, generator=source, dtype=torch.float64)
    labels = torch.randint(0, 10, (count,), generator=source)
    module = build_model(
        name, samples=ImageSamples(shape), classes=10, hidden=hidden, stream=SimStream(5)
    ).double()
    return Problem(module, FlatLayout.of(module), inputs, labels)


def in_float32(task: Problem) -> Problem:
    module = task.module.float()
    return Problem(module, FlatLayout.of(module), task.inputs.float(), task.labels)


def train(task: Problem, jobs: list[Job], work: LocalTraining) -> Tensor:
    with Cohort.of(task.module, task.layout, task.inputs, task.labels, workers=1) as cohort:
        return cohort.train(jobs, work)


def relative(update: Tensor, expected: Tensor) -> float:
    return float((update - expected).norm() / expected.norm())


BOTH = (PLAIN_SGD, FULL_SGD)
MLPS = [
    (("mlp", (1, 5, 4), sum(sizes), hidden), sizes, work)
    for hidden in ((), (9,), (12, 8), (6, 5, 4))
    for sizes in ((20,) * 6, UNEVEN)
    for work in BOTH
]
CNNS = [(("cnn", shape, 44), (13, 31), work) for shape in ((1, 9, 8), (3, 4, 6)) for work in BOTH]
PAPER = [
    ((name, (1, 28, 28), sum(sizes)), sizes, LocalTraining(epochs=2))
    for name, sizes in (("mlp", (50, 50, 35)), ("cnn", (20, 15)))
]


@pytest.mark.parametrize(("given", "sizes", "work"), [*MLPS, *CNNS, *PAPER])
def test_models_of_the_package_equal_the_reference(given, sizes, work) -> None:
    task = problem(*given)
    jobs = make_jobs(task, sizes, two_starts(task))
    assert_as_the_reference(task, jobs, work, train(task, jobs, work))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_float32_agrees_for_the_median_client(name) -> None:
    task = in_float32(problem(name, (1, 8, 8), 9 * 30))
    jobs, work = make_jobs(task, (30,) * 9), LocalTraining(epochs=1)
    updates = train(task, jobs, work)
    assert updates.dtype == torch.float32
    errors = [relative(row, task.update_of(job, work)) for row, job in zip(updates, jobs, strict=True)]
    assert np.median(errors) < 1e-5


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=9).map(tuple),
    batch_size=st.integers(1, 30),
    epochs=st.integers(1, 3),
    momentum=st.sampled_from([0.0, 0.7]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
def test_any_sizes_and_settings(sizes, batch_size, epochs, momentum, weight_decay) -> None:
    task = problem("mlp", (1, 2, 3), sum(sizes), (4,))
    jobs, work = (
        make_jobs(task, sizes, two_starts(task)),
        LocalTraining(epochs, batch_size, 0.1, momentum, weight_decay),
    )
    assert_as_the_reference(task, jobs, work, train(task, jobs, work))


def test_a_large_module_is_not_stacked() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 20000), nn.Tanh(), nn.Linear(20000, 10))
    with Cohort.of(module, FlatLayout.of(module), torch.zeros(4, 6), torch.arange(4)) as cohort:
        assert "plain loop, one client at a time, because the module is too large" in cohort.engine


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_diverging_client_infects_nobody(name) -> None:
    task = problem(name, (1, 4, 4), 46, (5,) if name == "mlp" else None)
    task.inputs[5] = math.inf
    task.inputs[13 + 12] = math.nan
    jobs = make_jobs(task, (13, 13, 13, 7))
    updates = train(task, jobs, FULL_SGD)
    assert [bool(update.isfinite().all()) for update in updates] == [False, False, True, True]
    assert torch.allclose(updates[2:], train(task, jobs[2:], FULL_SGD), rtol=1e-10, atol=1e-13)


def test_blow_up_by_the_learning_rate_is_returned_not_raised() -> None:
    task = problem("mlp", (1, 2, 3), 30, (4,))
    start = task.layout.flatten(task.module)
    jobs = make_jobs(task, (10, 10, 10), [start, start * 1e200, start])
    updates = train(task, jobs, LocalTraining(epochs=5, learning_rate=1e160))
    assert not updates[1].isfinite().all()
