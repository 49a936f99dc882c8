"""Labels for every position of a sequence: one loss and one accuracy, the same in all engines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from niss.errors import ConfigError
from niss.learning import ClippedStep, Cohort, FlatLayout, LocalTraining, evaluate, train_client
from niss.learning.cohort import Problem
from niss.learning.cpu.vmap import VmapGroups
from niss.learning.local import mean_loss, sample_losses
from support.stacked import make_jobs, run_stacked

CLASSES, LENGTH = 5, 4
SIZES = (8, 7, 6, 5, 5, 4, 3, 2)


class Positions(nn.Module):
    """Logits for each position from a sequence of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 6)
        self.outer = nn.Linear(6, CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        logits: Tensor = self.outer(torch.tanh(self.inner(sequences[..., None])))
        return logits


def problem(samples: int = 40) -> Problem:
    source = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = Positions().double()
    inputs = torch.randn(samples, LENGTH, generator=source, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (samples, LENGTH), generator=source)
    return Problem(module, FlatLayout.of(module), inputs, labels)


def test_the_loss_of_a_sequence_is_the_mean_over_its_positions() -> None:
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(3, LENGTH, CLASSES, generator=source, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (3, LENGTH), generator=source)
    chances = functional.log_softmax(logits, -1)
    by_hand = torch.tensor(
        [-sum(float(chances[i, t, labels[i, t]]) for t in range(LENGTH)) / LENGTH for i in range(3)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(sample_losses(logits, labels), by_hand)
    torch.testing.assert_close(mean_loss(logits, labels), by_hand.mean())


@pytest.mark.parametrize(
    "work", [LocalTraining(epochs=2, batch_size=3, learning_rate=0.3), ClippedStep(0.1, 1.0)]
)
def test_a_cohort_of_sequences_equals_the_reference(work: LocalTraining | ClippedStep) -> None:
    task = problem()
    each = make_jobs(task, SIZES)
    with Cohort(task.module, task.layout, task.inputs, task.labels, workers=1) as cohort:
        rows = torch.from_numpy(cohort.train(each, work))
    for row, job in zip(rows, each, strict=True):
        torch.testing.assert_close(row, task.update_of(job, work), rtol=1e-10, atol=1e-12)


def test_stacked_sequences_equal_the_reference() -> None:
    task = problem()
    settings = LocalTraining(epochs=2, batch_size=3, learning_rate=0.3)
    start = task.layout.flatten(task.module)
    each = make_jobs(task, SIZES)
    grouped = torch.empty(len(each), task.layout.size, dtype=torch.float64)
    VmapGroups(task).perform(settings, each, grouped)
    stacked = run_stacked(task, each, settings).read() - start
    for number, job in enumerate(each):
        rows = job.samples
        expected = train_client(
            task.module, task.layout, start, task.inputs[rows], task.labels[rows], settings, stream=job.stream
        )
        torch.testing.assert_close(grouped[number], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(stacked[number], expected, rtol=1e-10, atol=1e-12)


def test_the_accuracy_is_over_positions() -> None:
    task = problem(6)
    predicted = task.module(task.inputs).argmax(-1)
    labels = predicted.clone()
    labels[0, 0] = (labels[0, 0] + 1) % CLASSES
    result = evaluate(task.module, task.inputs, labels, batch_size=4)
    assert result.accuracy == pytest.approx(1 - 1 / (6 * LENGTH))
    assert result.examples == 6
    assert result.loss == pytest.approx(mean_loss(task.module(task.inputs), labels).item())


def test_logits_that_do_not_match_the_labels_are_refused() -> None:
    task = problem(6)
    with pytest.raises(ConfigError, match=r"logits of shape \[6, classes\]"):
        evaluate(task.module, task.inputs, task.labels[:, 0])
    with pytest.raises(ConfigError, match=r"shape \[samples\] or \[samples, positions\]"):
        evaluate(task.module, task.inputs, task.labels[..., None])
