from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from niss.errors import ConfigError
from niss.records import (
    LinearRegression,
    LogisticRegression,
    Records,
    clipped_rows,
    clipped_sum,
    reference_sum,
)
from niss.records.modules import ModuleEngine
from records.conftest import KINDS, make_records


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
def test_the_sum_is_its_definition(kind: str, clip: float) -> None:
    records, rows = make_records(kind, chunk=5), np.array([0, 2, 3, 5, 6, 8, 11])
    expected = naive_sum(records.model, records, rows.tolist(), clip)
    assert np.abs(expected).max() > 1e-3
    for found in (
        clipped_sum(records, records.weights, rows, clip),
        np.concatenate(list(clipped_rows(records, records.weights, rows, clip))).sum(axis=0),
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
    each = np.concatenate(list(clipped_rows(records, weights, rows, clip)))
    assert each.shape == (len(rows), weights.size)
    assert np.all(np.linalg.norm(each, axis=1) <= clip * (1 + 1e-12))


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
        each = np.concatenate(list(clipped_rows(records, weights, rows, clip)))
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
