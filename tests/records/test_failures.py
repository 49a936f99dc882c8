"""One record that fails, in any way, changes the sum by what it would have added and by nothing else."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import niss.records
from niss.errors import ConfigError
from niss.records import (
    LEAST_CLIP,
    LogisticRegression,
    Records,
    batches,
    clipped_sum,
    reference_sum,
)
from records.conftest import DEVICES, IMAGES, each_of, make_records

OTHERS = np.array([0, 1, 3, 4, 6, 7])
WITH = np.array([0, 1, 3, 4, 5, 6, 7])
CLIP = 0.4


def sums(records: Records, weights: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """By every way there is."""
    return [
        clipped_sum(records, weights, rows, CLIP),
        each_of(records, weights, rows, CLIP).sum(axis=0),
        reference_sum(records, weights, rows, CLIP),
    ]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e200])
@pytest.mark.parametrize("chunk", [3, 50])
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_record_that_overflows_adds_nothing(device: str, kind: str, chunk: int, poison: float) -> None:
    records = make_records(kind, chunk=chunk, device=device)
    records.examples[0][5] *= poison
    for found, expected in zip(
        sums(records, records.weights, WITH), sums(records, records.weights, OTHERS), strict=True
    ):
        assert np.isfinite(found).all()
        moved = np.linalg.norm(found - expected)
        assert moved <= CLIP * (1 + 1e-9) if poison == 1e200 else moved <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e10, 1e30, 1e38, 1e120, 1e300])
def test_weights_that_overflow_on_one_record_move_the_sum_by_at_most_clip(
    scale: float, dtype: torch.dtype
) -> None:
    """A server may choose such weights, to learn from the upload whether the record is there."""
    generator = np.random.default_rng(1)
    inputs = np.zeros((9, 3))
    inputs[:, :2] = generator.normal(size=(9, 2))
    inputs[5, 2] = 1.0  # the only one that has anything there
    labels = generator.integers(2, size=9)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    for model in (module, LogisticRegression(3)):
        records = Records(model, (inputs, labels), chunk=4)
        weights = records.weights
        weights[2::3] = scale
        with np.errstate(over="ignore"):
            found, others = (clipped_sum(records, weights, rows, CLIP) for rows in (WITH, OTHERS))
        assert np.isfinite(found).all()
        assert np.linalg.norm(found - others) <= CLIP * (1 + 1e-5)


def test_float32_norms_whose_squares_do_not_fit_are_clipped() -> None:
    module = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(module.weight)
    records = Records(module, (torch.full((1, 1), 1e25), torch.tensor([0])))
    for found in (
        clipped_sum(records, records.weights, np.array([0]), 1.0),
        each_of(records, records.weights, np.array([0]), 1.0)[0],
    ):
        assert np.linalg.norm(found) == pytest.approx(1.0, rel=1e-6)


def test_float32_norms_whose_squares_vanish_are_below_the_least_clip() -> None:
    """What is lost of them can never be longer than a clip that is accepted."""
    count = 10_000
    module = nn.Linear(count, 2, bias=False)
    nn.init.zeros_(module.weight)
    records = Records(module, (torch.full((1, count), 3e-23), torch.tensor([0])))
    found = clipped_sum(records, records.weights, np.array([0]), LEAST_CLIP)
    assert np.linalg.norm(found) <= LEAST_CLIP
    with pytest.raises(ConfigError, match="at least 1e-12"):
        clipped_sum(records, records.weights, np.array([0]), LEAST_CLIP / 2)


def raises_at_large_values(outputs: Tensor, labels: Tensor) -> Tensor:
    """torch refuses to look at values of stacked records, so that these are always taken one by one."""
    if float(outputs.detach().abs().max()) > 50:
        raise RuntimeError("a user's own check")
    return functional.cross_entropy(outputs, labels)


def raises_where_numpy_is(outputs: Tensor, labels: Tensor) -> Tensor:
    """Fails on stacked records with a message of its own."""
    if np.abs(outputs.detach().numpy()).max() > 50:
        raise ValueError("a user's own check")
    return functional.cross_entropy(outputs, labels)


def infinite_at_large_values(outputs: Tensor, labels: Tensor) -> Tensor:
    """Not finite, even where its slope is."""
    found = functional.cross_entropy(outputs, labels)
    return found + torch.where(outputs.abs().max() > 50, torch.inf, 0.0)


@pytest.mark.parametrize("loss", [raises_at_large_values, raises_where_numpy_is, infinite_at_large_values])
def test_a_record_whose_loss_raises_or_is_infinite_adds_nothing(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    records = make_records("mlp", loss=loss)
    records.examples[0][5] *= 1e6
    plain = make_records("mlp")
    expected = reference_sum(plain, plain.weights, OTHERS, CLIP)
    for found in sums(records, records.weights, WITH):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_shape_of_a_chunk_does_not_depend_on_the_batch() -> None:
    shapes = []

    class Watched(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            value = inputs
            while torch._C._functorch.is_functorch_wrapped_tensor(value):
                value = torch._C._functorch.get_unwrapped(value)
            shapes.append(tuple(value.shape))
            return super().forward(inputs)

    generator = np.random.default_rng(2)
    records = Records(
        Watched(3, 2), (generator.normal(size=(20, 3)), generator.integers(2, size=20)), chunk=8
    )
    shapes.clear()
    for count in (0, 1, 7, 8):
        clipped_sum(records, records.weights, np.arange(count), 1.0)
    assert shapes == [(8, 1, 3)] * 4


def test_examples_in_docstrings() -> None:
    for module in (niss.records, batches):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed
