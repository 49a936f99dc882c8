from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.learning import Cohort, Evaluation, FlatLayout, evaluate
from niss.learning.local import mean_loss, sample_losses
from support.small_images import samples, small_mlp

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.5], [1.0, 0.0]])
LABELS = torch.tensor([0, 1, 1, 0, 0])


def hand_loss() -> float:
    """Mean of log(1 + exp(other - own)) over the five rows."""
    margins = [2.0, 1.0, -3.0, -0.5, 1.0]
    return sum(math.log1p(math.exp(-margin)) for margin in margins) / 5


@pytest.mark.parametrize("batch_size", [1, 2, 5, 1000])
def test_equals_hand_computation(batch_size: int) -> None:
    result = evaluate(nn.Identity(), LOGITS, LABELS, batch_size=batch_size)
    assert result == Evaluation(accuracy=3 / 5, loss=result.loss, examples=5)
    assert result.loss == pytest.approx(hand_loss(), rel=1e-12)


def test_runs_in_eval_mode_without_grad_and_restores_every_mode() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watching(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            seen.append((self.training, torch.is_grad_enabled()))
            return logits

    module = nn.Sequential(Watching(), nn.Dropout(0.9), nn.BatchNorm1d(2))
    module[1].eval()
    counter = module[2].num_batches_tracked
    before = torch.random.get_rng_state()
    evaluate(module, LOGITS, LABELS, batch_size=3)
    assert seen == [(False, False)] * 2
    assert [part.training for part in module.modules()] == [True, True, False, True]
    assert int(counter) == 0
    assert torch.equal(before, torch.random.get_rng_state())


def test_modes_are_restored_after_an_error() -> None:
    module = nn.Sequential(nn.Identity(), nn.Linear(7, 2))
    with pytest.raises(RuntimeError):
        evaluate(module, LOGITS, LABELS)
    assert all(part.training for part in module.modules())


def test_infinite_loss_is_reported_as_it_is() -> None:
    logits = LOGITS.clone()
    logits[2] = torch.tensor([0.0, -math.inf])
    result = evaluate(nn.Identity(), logits, LABELS)
    assert result.loss == math.inf
    assert result.accuracy == 3 / 5


def test_nan_logits_count_as_wrong() -> None:
    logits = LOGITS.clone()
    logits[0, 0] = math.nan
    result = evaluate(nn.Identity(), logits, LABELS)
    assert math.isnan(result.loss)
    assert result.accuracy == 2 / 5


def test_the_mean_is_over_samples_not_batches_and_in_float64() -> None:
    count = 100_001
    logits = torch.zeros(count, 2)
    logits[-1, 0] = -1000.0
    result = evaluate(nn.Identity(), logits, torch.zeros(count, dtype=torch.int64), batch_size=1000)
    assert result.loss == pytest.approx(((count - 1) * math.log(2) + 1000.0) / count, rel=1e-12)


def test_the_loss_of_a_sequence_is_the_mean_over_its_positions() -> None:
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 4, 5, generator=source, dtype=torch.float64)
    labels = torch.randint(0, 5, (3, 4), generator=source)
    chances = functional.log_softmax(logits, -1)
    by_hand = [-sum(float(chances[i, t, labels[i, t]]) for t in range(4)) / 4 for i in range(3)]
    assert sample_losses(logits, labels).tolist() == pytest.approx(by_hand)
    assert float(mean_loss(logits, labels)) == pytest.approx(sum(by_hand) / 3)


def test_the_accuracy_is_over_positions() -> None:
    logits = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = logits.argmax(-1)
    labels[0, 0] = (labels[0, 0] + 1) % 5
    result = evaluate(nn.Identity(), logits, labels, batch_size=4)
    expected = Evaluation(accuracy=1 - 1 / 24, loss=float(mean_loss(logits, labels)), examples=6)
    assert vars(result) == pytest.approx(vars(expected))


def test_a_cohort_evaluates_as_the_reference() -> None:
    module = small_mlp()
    layout = FlatLayout.of(module)
    weights = torch.linspace(-1.0, 1.0, layout.size, dtype=torch.float64)
    found = Cohort.of(module, layout, *samples(), workers=1).evaluate(weights, *samples(7, seed=1))
    layout.load(module, weights)
    assert found == evaluate(module, *samples(7, seed=1))
