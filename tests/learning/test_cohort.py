"""The cohort equals the reference, client by client, whatever the group, the model and the settings."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from niss.learning import (
    ClippedStep,
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    Mlp,
    build_model,
    clipped_gradient_step,
    train_client,
)
from niss.learning.cpu import make_groups
from niss.randomness import SimStream

UNEVEN = (13, 31, 1, 20, 7, 40, 10)
PLAIN_SGD = LocalTraining(epochs=2, batch_size=10, learning_rate=0.1)
FULL_SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.05, momentum=0.9, weight_decay=0.01)


def data(count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(0, 10, (count,), generator=generator)


def model(name: str, shape: tuple[int, int, int], hidden: tuple[int, ...] | None = None) -> nn.Module:
    return build_model(
        name,
        samples=ImageSamples(shape),
        classes=10,
        hidden=hidden,
        stream=SimStream(5),
    ).double()


def deal(sizes: tuple[int, ...], starts: list[Tensor]) -> list[Job]:
    ends = np.cumsum([0, *sizes])
    return [
        Job(starts[number % len(starts)], torch.arange(ends[number], ends[number + 1]), SimStream(number))
        for number in range(len(sizes))
    ]


def assert_equal(module: nn.Module, inputs: Tensor, labels: Tensor, jobs: list[Job], work: LocalTraining):
    layout = FlatLayout.of(module)
    with Cohort(module, layout, inputs, labels, workers=1) as cohort:
        updates = cohort.train(jobs, work)
    for update, job in zip(updates, jobs, strict=True):
        own = (inputs[job.samples], labels[job.samples])
        expected = train_client(module, layout, job.start, *own, work, stream=job.stream)
        assert relative(update, expected) < 1e-10


def relative(update: Tensor, expected: Tensor) -> float:
    return float((update - expected).norm() / expected.norm())


def two_starts(module: nn.Module) -> list[Tensor]:
    start = FlatLayout.of(module).flatten(module)
    return [start, start * 1.5]


@pytest.mark.parametrize("hidden", [(), (9,), (12, 8), (6, 5, 4)])
@pytest.mark.parametrize("work", [PLAIN_SGD, FULL_SGD], ids=["plain", "momentum and decay"])
@pytest.mark.parametrize("sizes", [(20,) * 6, UNEVEN], ids=["even", "uneven"])
def test_mlp_equals_the_reference(hidden, work, sizes) -> None:
    module = model("mlp", (1, 5, 4), hidden)
    inputs, labels = data(sum(sizes), (1, 5, 4))
    assert_equal(module, inputs, labels, deal(sizes, two_starts(module)), work)


@pytest.mark.parametrize("shape", [(1, 9, 8), (3, 4, 6)])
@pytest.mark.parametrize("work", [PLAIN_SGD, FULL_SGD], ids=["plain", "momentum and decay"])
def test_cnn_equals_the_reference(shape, work) -> None:
    module = model("cnn", shape)
    inputs, labels = data(44, shape)
    assert_equal(module, inputs, labels, deal((13, 31), two_starts(module)), work)


@pytest.mark.parametrize(("name", "sizes"), [("mlp", (50, 50, 35)), ("cnn", (20, 15))])
def test_paper_models_equal_the_reference(name, sizes) -> None:
    module = model(name, (1, 28, 28))
    inputs, labels = data(sum(sizes), (1, 28, 28))
    assert_equal(module, inputs, labels, deal(sizes, two_starts(module)), LocalTraining(epochs=2))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_float32_agrees_for_the_median_client(name) -> None:
    module = model(name, (1, 8, 8)).float()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    inputs, labels = data(9 * 30, (1, 8, 8), torch.float32)
    jobs = deal((30,) * 9, [start])
    work = LocalTraining(epochs=1)
    with Cohort(module, layout, inputs, labels, workers=1) as cohort:
        updates = cohort.train(jobs, work)
    assert updates.dtype == torch.float32
    errors = [
        relative(
            update,
            train_client(
                module, layout, start, inputs[job.samples], labels[job.samples], work, stream=job.stream
            ),
        )
        for update, job in zip(updates, jobs, strict=True)
    ]
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
    module = model("mlp", (1, 2, 3), (4,))
    inputs, labels = data(sum(sizes), (1, 2, 3))
    work = LocalTraining(epochs, batch_size, 0.1, momentum, weight_decay)
    assert_equal(module, inputs, labels, deal(sizes, two_starts(module)), work)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.inner.weight
        self.last = nn.Linear(6, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.inner(images.flatten(1))))))


class Shared(Tied):
    """With a layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.inner


class Idle(Tied):
    """With a layer the loss does not reach: weight decay must not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Mixing(Tied):
    """Samples of a batch meet: padding a batch would change what it does."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images - images.mean(0))


def frozen() -> nn.Module:
    module = Mlp(6, (5,), 10)
    module.layers[1].weight.requires_grad_(False)
    return module


def hooked() -> nn.Module:
    module = Mlp(6, (5,), 10)
    module.layers[1].register_forward_hook(lambda _layer, _images, output: output * 2.0)
    return module


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (Tied, "vmap groups"),
    "layer norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 10)),
        "vmap groups",
    ),
    "shared": (Shared, "vmap groups"),
    "idle": (Idle, "stacked, it trains differently"),
    "mixing": (Mixing, "stacked, it trains differently"),
    "dropout": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 10)),
        "Dropout",
    ),
    "batch norm": (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 10)), "BatchNorm1d"),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 10)),
        "Conv2d",
    ),
    "frozen": (frozen, "vmap groups"),
    "hooked": (hooked, ""),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_module_equals_the_reference(kind) -> None:
    build, engine = OTHERS[kind]
    module = build().double()
    sizes = (12, 31, 20, 2, 6, 8, 23, 16, 10)
    inputs, labels = data(sum(sizes), (1, 2, 3))
    with Cohort(module, FlatLayout.of(module), inputs, labels) as cohort:
        assert engine in cohort.engine
    assert_equal(module, inputs, labels, deal(sizes, two_starts(module)), FULL_SGD)
    assert_equal(module, inputs, labels, deal(sizes[:2], two_starts(module)), FULL_SGD)


def test_a_large_module_is_not_stacked() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 20000), nn.Tanh(), nn.Linear(20000, 10))
    with Cohort(module, FlatLayout.of(module), *data(4, (1, 2, 3), torch.float32)) as cohort:
        assert "plain loop, one client at a time, because the module is too large" in cohort.engine


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_diverging_client_infects_nobody(name) -> None:
    module = model(name, (1, 4, 4), (5,) if name == "mlp" else None)
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    sizes = (13, 13, 13, 7)
    inputs, labels = data(sum(sizes), (1, 4, 4))
    inputs[5] = math.inf
    inputs[13 + 12] = math.nan
    jobs = deal(sizes, [start])
    with Cohort(module, layout, inputs, labels, workers=1) as cohort:
        updates = cohort.train(jobs, FULL_SGD)
        assert [bool(update.isfinite().all()) for update in updates] == [False, False, True, True]
        assert torch.allclose(updates[2:], cohort.train(jobs[2:], FULL_SGD), rtol=1e-10, atol=1e-13)


def test_blow_up_by_the_learning_rate_is_returned_not_raised() -> None:
    module = model("mlp", (1, 2, 3), (4,))
    layout = FlatLayout.of(module)
    inputs, labels = data(30, (1, 2, 3))
    start = layout.flatten(module)
    jobs = deal((10, 10, 10), [start, start * 1e200, start])
    with Cohort(module, layout, inputs, labels, workers=1) as cohort:
        updates = cohort.train(jobs, LocalTraining(epochs=5, learning_rate=1e160))
    assert not bool(updates[1].isfinite().all())


@pytest.mark.parametrize("hidden", [(), (12, 8)])
@pytest.mark.parametrize("clip", [1e-3, 0.7, 1e6])
def test_clipped_steps_equal_the_reference(hidden, clip) -> None:
    module = model("mlp", (1, 5, 4), hidden)
    layout = FlatLayout.of(module)
    sizes = (300, 5, 1)
    inputs, labels = data(sum(sizes), (1, 5, 4))
    inputs[1] = math.inf
    inputs[2] = 1e160
    inputs[3] = 0.0
    jobs = deal(sizes, two_starts(module))
    with Cohort(module, layout, inputs, labels, workers=1) as cohort:
        updates = cohort.train(jobs, ClippedStep(clip=clip, learning_rate=0.5))
    for update, job in zip(updates, jobs, strict=True):
        own = (inputs[job.samples], labels[job.samples])
        expected = clipped_gradient_step(module, layout, job.start, *own, ClippedStep(clip, 0.5))
        assert relative(update, expected) < 1e-10


def test_clipped_steps_leave_out_what_overflows_in_float32() -> None:
    module = model("mlp", (1, 5, 4), (6,)).float()
    layout = FlatLayout.of(module)
    start = layout.flatten(module)
    inputs, labels = data(8, (1, 5, 4), torch.float32)
    inputs[2:4] *= 1e37
    jobs = deal((8,), [start * 10.0])
    with Cohort(module, layout, inputs, labels, workers=1) as cohort:
        update = cohort.train(jobs, ClippedStep(clip=1.0, learning_rate=1.0))[0]
    expected = clipped_gradient_step(module, layout, start * 10.0, inputs, labels, ClippedStep(1.0, 1.0))
    assert relative(update, expected) < 1e-5


def test_clipped_steps_of_other_modules_use_the_reference() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 10)).double()
    layout = FlatLayout.of(module)
    inputs, labels = data(12, (1, 2, 3))
    jobs = deal((7, 5), two_starts(module))
    with Cohort(module, layout, inputs, labels, workers=1) as cohort:
        updates = cohort.train(jobs, ClippedStep(clip=0.1, learning_rate=0.5))
    for update, job in zip(updates, jobs, strict=True):
        own = (inputs[job.samples], labels[job.samples])
        expected = clipped_gradient_step(module, layout, job.start, *own, ClippedStep(0.1, 0.5))
        assert relative(update, expected) < 1e-12


@given(
    sizes=st.lists(st.integers(1, 50), max_size=40),
    largest=st.integers(1, 16),
    workers=st.integers(1, 8),
    at_least=st.integers(1, 4),
)
def test_groups_hold_everyone_once_largest_first(sizes, largest, workers, at_least) -> None:
    jobs = deal(tuple(sizes), [torch.zeros(1)])
    groups = make_groups(jobs, largest, workers, lambda some: len(some) >= at_least)
    rows = [row for numbers, _ in groups for row in numbers]
    assert sorted(rows) == list(range(len(sizes)))
    assert [sizes[row] for row in rows] == sorted(sizes, reverse=True)
    assert all(0 < len(numbers) <= largest for numbers, _ in groups)
    assert all(len(numbers) in (1, *range(at_least, largest + 1)) for numbers, _ in groups)
