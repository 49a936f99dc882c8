from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from learning.test_stacked_modules import NAMES, problem
from niss.errors import ConfigError
from niss.records import (
    LinearRegression,
    LogisticRegression,
    Records,
    clipped_rows,
    clipped_sum,
    clipped_sums,
    reference_sum,
)
from niss.records.modules import ModuleEngine
from records.conftest import CLASSES, DEVICES, KINDS, each_of, make_records


def naive_sum(module: nn.Module, records: Records, rows: list[int], clip: float) -> np.ndarray:
    """By backward() and a loop, without a line of the package."""
    inputs, labels = (torch.as_tensor(part) for part in records.examples)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    total = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    for row in rows:
        loss = functional.cross_entropy(module(inputs[row : row + 1]).flatten(0, -2), labels[row].reshape(-1))
        slopes = torch.autograd.grad(loss, parameters)
        gradient = torch.cat([slope.reshape(-1) for slope in slopes])
        total += gradient * min(1.0, clip / float(gradient.norm()))
    return total.numpy()


@pytest.fixture
def stacked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a chunk cannot be computed together, that is no reason to compute its records one by one."""
    monkeypatch.setattr(ModuleEngine, "_one_by_one", None)


@pytest.mark.usefixtures("stacked_alone")
@pytest.mark.parametrize("clip", [0.05, 1.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_is_its_definition(device: str, kind: str, clip: float) -> None:
    records, rows = make_records(kind, chunk=5, device=device), np.array([0, 2, 3, 5, 6, 8, 11])
    expected = naive_sum(make_records(kind).model, records, rows.tolist(), clip)
    assert np.abs(expected).max() > 1e-3
    for found in (
        clipped_sum(records, records.weights, rows, clip),
        each_of(records, records.weights, rows, clip).sum(axis=0),
        reference_sum(records, records.weights, rows, clip),
    ):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    batch=st.sets(st.integers(0, 11)),
    chunk=st.integers(1, 14),
    clip=st.sampled_from([1e-3, 0.3, 5.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batch_in_any_chunks(kind: str, batch: set[int], chunk: int, clip: float, seed: int) -> None:
    records, rows = make_records(kind, seed=seed, chunk=chunk), np.array(sorted(batch), dtype=np.int64)
    weights = records.weights + 0.1 * np.random.default_rng(seed).normal(size=records.weights.size)
    found = clipped_sum(records, weights, rows, clip)
    np.testing.assert_allclose(found, reference_sum(records, weights, rows, clip), rtol=0, atol=1e-10)
    each = each_of(records, weights, rows, clip)
    assert each.shape == (len(rows), weights.size)
    assert np.all(np.linalg.norm(each, axis=1) <= clip * (1 + 1e-12))


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from([*KINDS, "regression", "one by one"]),
    batches=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=5),
    chunk=st.integers(1, 14),
)
def test_several_batches_in_one_pass(kind: str, batches: list[set[int]], chunk: int) -> None:
    """Chunks may hold records of several batches, or of none."""
    if kind == "regression":
        rng = np.random.default_rng(1)
        examples = (rng.normal(size=(12, 3)), rng.integers(0, 4, size=12))
        records = Records(LogisticRegression(3, 4), examples, chunk=chunk)
    else:
        records = make_records(KINDS[0] if kind == "one by one" else kind, chunk=chunk)
        if kind == "one by one":
            records.engine._stackable = False
    rows = [np.array(sorted(batch), dtype=np.int64) for batch in batches]
    found = clipped_sums(records, records.weights, rows, 0.3)
    expected = [reference_sum(records, records.weights, own, 0.3) for own in rows]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_near_float64(kind: str) -> None:
    """Within 1e-5 C a record: single precision has 6e-8, and these nets are a few layers deep."""
    rows = np.arange(12)
    wide, narrow = make_records(kind), make_records(kind, dtype=torch.float32)
    found = clipped_sum(narrow, wide.weights, rows, 0.5)
    error = np.linalg.norm(found - reference_sum(wide, wide.weights, rows, 0.5))
    assert error <= 1e-5 * 0.5 * len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_is_left_as_it_was(kind: str) -> None:
    records = make_records(kind)
    before = {name: value.clone() for name, value in records.model.state_dict().items()}
    clipped_sum(records, records.weights + 1.0, np.arange(5), 1.0)
    assert all(torch.equal(value, before[name]) for name, value in records.model.state_dict().items())
    assert all(parameter.grad is None for parameter in records.model.parameters())


def test_only_what_is_trained_is_in_the_vector() -> None:
    records = make_records("low-rank")
    trained = [value for value in records.model.parameters() if value.requires_grad]
    assert records.weights.size == sum(value.numel() for value in trained)
    assert records.weights.size < sum(value.numel() for value in records.model.parameters())


def test_batches_that_mix_in_the_module_do_not_mix_here() -> None:
    """Whatever else is in the batch, a record adds what it adds alone."""
    records = make_records("mixes")
    alone = clipped_sum(records, records.weights, np.array([4]), 0.7)
    with_others = clipped_sum(records, records.weights, np.array([1, 4, 9]), 0.7)
    others = clipped_sum(records, records.weights, np.array([1, 9]), 0.7)
    np.testing.assert_allclose(with_others - others, alone, rtol=0, atol=1e-13)


@settings(deadline=None, max_examples=40)
@given(
    features=st.integers(1, 5),
    outputs=st.integers(2, 4),
    count=st.integers(1, 9),
    clip=st.sampled_from([0.01, 1.0, 1e5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_regressions_are_what_torch_makes_of_them(
    features: int, outputs: int, count: int, clip: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    inputs, weights = (
        generator.normal(size=(count, features)),
        generator.normal(size=outputs * (features + 1)),
    )
    classes, targets = generator.integers(outputs, size=count), generator.normal(size=(count, outputs))
    module = nn.Linear(features, outputs).double()

    def squared(found: Tensor, wanted: Tensor) -> Tensor:
        return (found - wanted).square().sum() / 2

    rows = np.flatnonzero(generator.random(count) < 0.7)
    for own, labels, loss in (
        (LogisticRegression(features, outputs), classes, None),
        (LinearRegression(features, outputs), targets, squared),
    ):
        records = Records(own, (inputs, labels), chunk=4)
        found = clipped_sum(records, weights, rows, clip)
        other = Records(module, (inputs, labels), loss)
        np.testing.assert_allclose(found, reference_sum(other, weights, rows, clip), rtol=0, atol=1e-10)
        np.testing.assert_allclose(found, reference_sum(records, weights, rows, clip), rtol=0, atol=1e-10)
        each = each_of(records, weights, rows, clip)
        np.testing.assert_allclose(found, each.sum(axis=0), rtol=0, atol=1e-10)


def test_a_silo_without_records_sums_to_zero() -> None:
    records = Records(nn.Linear(3, 2), (np.zeros((0, 3)), np.zeros(0, dtype=np.int64)))
    nothing = np.zeros(0, dtype=np.int64)
    assert not clipped_sum(records, records.weights, nothing, 1.0).any()
    assert list(clipped_rows(records, records.weights, nothing, 1.0)) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rows": np.array([3, 3])}, "rows"),
        ({"rows": np.array([12])}, "rows"),
        ({"rows": np.array([-1])}, "rows"),
        ({"rows": np.array([0.5])}, "rows"),
        ({"clip": 0.0}, "clip"),
        ({"clip": np.inf}, "clip"),
        ({"weights": np.zeros(3)}, "weights"),
    ],
)
@pytest.mark.parametrize("function", [clipped_sum, reference_sum, lambda *given: list(clipped_rows(*given))])
def test_refuses_bad_arguments(function: object, change: dict[str, object], field: str) -> None:
    records = make_records("mlp")
    given = {"weights": records.weights, "rows": np.array([1]), "clip": 1.0} | change
    with pytest.raises(ConfigError, match=field):
        function(records, *given.values())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", NAMES)
def test_modules_of_many_kinds(name: str) -> None:
    """Those that cohorts are tested with: recurrent, shared, partly unused, partly frozen, with buffers."""
    task = problem(name)
    records = Records(task.module, (task.inputs, task.labels), chunk=7)
    rows = np.arange(0, len(task.labels), 3)
    found, expected = (
        function(records, records.weights, rows, 0.2) for function in (clipped_sum, reference_sum)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    assert np.linalg.norm(expected) > 0.1


def parametrised() -> nn.Module:
    """A weight that is computed from another, beside a bias that is not."""
    layer = nn.Linear(24, CLASSES)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh())
    return nn.Sequential(nn.Flatten(), layer)


class OneTable(nn.Module):
    """A table that is read and also multiplied with; a bias alone; a layer that nothing of the record reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(24, 24))
        self.places, self.mixing = nn.Embedding(24, 24), nn.Linear(24, 24)
        self.output = nn.Linear(24, CLASSES)
        self.output.weight.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        numbers = (images.flatten(1).abs() * 10).long() % 24
        constant = self.mixing(self.places(torch.arange(24, device=images.device)[None]))
        values = (
            functional.embedding(numbers, self.table)
            + functional.linear(images.flatten(1), self.table)[:, None]
        )
        found: Tensor = self.output(torch.tanh(values + constant).mean(1))
        return found


@pytest.mark.usefixtures("stacked_alone")
@pytest.mark.parametrize("build", [parametrised, OneTable])
def test_weights_that_are_used_in_several_ways(build: Callable[[], nn.Module]) -> None:
    """No slope may get lost on its way to a weight that another is computed from."""
    plain = make_records("mlp")
    records = Records(build().double(), plain.examples, chunk=5)
    rows = np.arange(12)
    found, expected = (
        function(records, records.weights, rows, 0.3) for function in (clipped_sum, reference_sum)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(deadline=None, max_examples=60)
@given(
    channels=st.sampled_from([(1, 2, 1), (2, 4, 2), (4, 4, 4), (3, 5, 1)]),
    side=st.integers(3, 9),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.sampled_from([0, 1, "same", "valid"]),
    dilation=st.integers(1, 2),
    axes=st.integers(1, 2),
    pictures=st.integers(1, 2),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_convolutions_of_all_kinds(
    channels: tuple[int, int, int],
    side: int,
    kernel: int,
    stride: int,
    padding: int | str,
    dilation: int,
    axes: int,
    pictures: int,
    bias: bool,
    seed: int,
) -> None:
    assume(side >= dilation * (kernel - 1) + 1)
    inputs, outputs, groups = channels
    kind = nn.Conv1d if axes == 1 else nn.Conv2d
    layer = kind(
        inputs, outputs, kernel, 1 if padding == "same" else stride, padding, dilation, groups, bias
    ).double()

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, values: Tensor) -> Tensor:
            found = torch.tanh(self.layer(values.flatten(0, 1)))
            return found.flatten(1).cumsum(1)[:, -CLASSES:].reshape(len(values), pictures, -1).sum(1)

    generator = np.random.default_rng(seed)
    values = generator.normal(size=(5, pictures, inputs, *[side] * axes))
    width = layer(torch.zeros(1, inputs, *[side] * axes).double()).flatten(1).shape[1]
    assume(width >= CLASSES)
    records = Records(Frames(), (values, generator.integers(CLASSES, size=5)), chunk=3)
    assert records.engine._stackable
    found, expected = (
        function(records, records.weights, np.arange(5), 0.5) for function in (clipped_sum, reference_sum)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
