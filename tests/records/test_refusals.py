"""What mixes records, remembers them or draws is refused by name, with what to use instead."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.errors import ConfigError
from niss.records import LinearRegression, LogisticRegression, Records, clipped_sum

IMAGES = (np.zeros((4, 2, 6, 6)), np.zeros(4, dtype=np.int64))
ROWS = (np.zeros((4, 6)), np.zeros(4, dtype=np.int64))


def after(layer: nn.Module, examples: tuple[np.ndarray, np.ndarray]) -> nn.Module:
    width = int(np.prod(examples[0].shape[1:]))
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(width, 2))


class Draws(nn.Linear):
    """Augments in its forward pass, in any mode."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + torch.randn_like(inputs))


class Jitters(nn.Linear):
    """Draws from a generator of its own."""

    generator = np.random.default_rng(3)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + float(self.generator.normal()))


class Forgets(nn.Linear):
    """Dropout as a function, which no layer shows."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(functional.dropout(inputs, 0.5))


@pytest.mark.parametrize(
    ("layer", "examples", "words"),
    [
        (nn.BatchNorm1d(6), ROWS, "GroupNorm or LayerNorm"),
        (nn.BatchNorm2d(2), IMAGES, "GroupNorm or LayerNorm"),
        (nn.SyncBatchNorm(2), IMAGES, "GroupNorm or LayerNorm"),
        (nn.BatchNorm2d(2, track_running_stats=False).eval(), IMAGES, "GroupNorm or LayerNorm"),
        (nn.InstanceNorm2d(2, track_running_stats=True), IMAGES, "track_running_stats=False"),
        (nn.Dropout(0.1), ROWS, "model.eval()"),
        (nn.Dropout2d(0.1), IMAGES, "model.eval()"),
        (nn.AlphaDropout(0.1), ROWS, "model.eval()"),
        (nn.RReLU(), ROWS, "model.eval()"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers(layer: nn.Module, examples: tuple[np.ndarray, np.ndarray], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Records(after(layer, examples), examples)
    assert type(layer).__name__ in str(caught.value)
    assert words in str(caught.value.hint)


@pytest.mark.parametrize(
    ("layer", "examples"),
    [
        (nn.BatchNorm2d(2).eval(), IMAGES),
        (nn.GroupNorm(1, 2), IMAGES),
        (nn.LayerNorm(6), ROWS),
        (nn.InstanceNorm2d(2), IMAGES),
        (nn.Dropout(0.5).eval(), ROWS),
        (nn.Dropout(0.0), ROWS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_keep_records_apart(layer: nn.Module, examples: tuple[np.ndarray, np.ndarray]) -> None:
    records = Records(after(layer, examples), examples)
    alone, together = (clipped_sum(records, records.weights, np.arange(count), 0.2) for count in (1, 4))
    np.testing.assert_allclose(together, 4 * alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("module", [Draws(6, 2), Draws(6, 2).eval(), Jitters(6, 2), Forgets(6, 2)])
def test_a_module_that_draws_is_found_by_running_it(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match="draws random numbers"):
        Records(module, ROWS)


def test_losses() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    with pytest.raises(ConfigError, match="cancel") as caught:
        Records(nn.Linear(6, 2), ROWS, weighted)
    assert 'reduction="sum"' in str(caught.value.hint)
    Records(nn.Linear(6, 2), ROWS, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]), reduction="sum"))
    with pytest.raises(ConfigError, match="one number for a batch of one"):
        Records(nn.Linear(6, 2), ROWS, lambda outputs, _: outputs)
    with pytest.raises(ConfigError, match="nobody would train"):
        Records(nn.Linear(6, 2), ROWS, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="loss: a regression has its own"):
        Records(LogisticRegression(6), ROWS, nn.CrossEntropyLoss())


def test_a_mean_over_the_batch_is_a_mean_over_one_record() -> None:
    """A loss with reduction="mean" gives what one with "sum" does: it never sees two records."""
    generator = np.random.default_rng(1)
    examples = (generator.normal(size=(5, 6)), generator.integers(2, size=5))
    module = nn.Linear(6, 2)
    found = [
        clipped_sum(records, records.weights, np.arange(5), 0.3)
        for loss in ("mean", "sum", "none")
        for records in [Records(module, examples, nn.CrossEntropyLoss(reduction=loss))]
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Records(nn.Linear(5, 2), ROWS), "fail on a made-up record"),
        (lambda: Records(nn.Linear(6, 2).requires_grad_(False), ROWS), "no trainable parameters"),
        (lambda: Records("mlp", ROWS), "must be a torch.nn.Module"),
        (lambda: Records(nn.Linear(6, 2), ROWS, chunk=0), "chunk"),
        (lambda: Records(nn.Linear(6, 2), (ROWS[0], ROWS[1][:3])), "4 inputs for 3 labels"),
        (lambda: Records(nn.Linear(6, 2), list(ROWS)), "pair"),
        (lambda: Records(LinearRegression(5), ROWS), "inputs"),
        (lambda: Records(LinearRegression(6, 2), ROWS), "labels"),
        (lambda: Records(LogisticRegression(6), (ROWS[0], ROWS[1] + 2)), "class numbers are 0 to 1"),
        (lambda: Records(LogisticRegression(6), (ROWS[0], ROWS[1] + 0.5)), "whole numbers"),
        (lambda: LogisticRegression(6, 1), "outputs"),
    ],
)
def test_what_cannot_be_used(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_nothing_of_the_records_is_shown() -> None:
    records = Records(nn.Linear(6, 2), (ROWS[0] + 77.5, ROWS[1]))
    assert repr(records) == "Records(Linear, name='records')"
