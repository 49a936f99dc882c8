"""Every model by name is trained by every engine as by the reference, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from niss.learning import (
    ClippedStep,
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    ModelSettings,
    Samples,
    TokenSamples,
    build_model,
    clipped_gradient_step,
    train_client,
)
from niss.learning.cohort import Problem
from niss.learning.cpu.vmap import VmapGroups
from niss.learning.local import mean_loss
from niss.learning.models import MODEL_NAMES
from niss.randomness import SimStream
from support.stacked import assert_learned_alike, make_jobs, run_stacked

CLASSES = 5
PICTURES, TOKENS = ImageSamples((2, 6, 5)), TokenSamples(length=7, vocabulary=11)
CASES: dict[str, tuple[str, Samples, ModelSettings]] = {
    "mlp": ("mlp", PICTURES, ModelSettings(hidden=(6,))),
    "cnn": ("cnn", PICTURES, ModelSettings()),
    "resnet": ("resnet", PICTURES, ModelSettings(width=8, layers=1)),
    "resnet-deep": ("resnet", PICTURES, ModelSettings(width=16, layers=2)),
    "logistic": ("logistic", PICTURES, ModelSettings()),
    "gru": ("gru", TOKENS, ModelSettings(width=6, embedding=4)),
    "gru-deep": ("gru", TOKENS, ModelSettings(width=6, embedding=4, layers=2)),
    "lstm": ("lstm", TOKENS, ModelSettings(width=6, embedding=4)),
    "lstm-deep": ("lstm", TOKENS, ModelSettings(width=6, embedding=4, layers=2)),
    "transformer": ("transformer", TOKENS, ModelSettings(width=8, heads=2)),
}
WORK = LocalTraining(epochs=2, batch_size=3, learning_rate=0.1, momentum=0.5, weight_decay=0.01)


def make_inputs(samples: Samples, count: int) -> Tensor:
    source = torch.Generator().manual_seed(1)
    if isinstance(samples, ImageSamples):
        return torch.randn(count, *samples.shape, generator=source, dtype=torch.float64)
    return torch.randint(0, samples.vocabulary, (count, samples.length), generator=source)


SIZES = (8, 7, 6, 5, 5, 4, 3, 2)  # groups are in falling order


def problem(case: str, count: int = 40) -> Problem:
    name, samples, settings = CASES[case]
    module = build_model(name, samples=samples, classes=CLASSES, stream=SimStream(1), settings=settings)
    module = module.double()
    inputs = make_inputs(samples, count)
    shape = (count, samples.length) if isinstance(samples, TokenSamples) else (count,)
    labels = torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(2))
    return Problem(module, FlatLayout.of(module), inputs, labels)


def reference(task: Problem, job: Job) -> Tensor:
    rows = job.samples
    return train_client(
        task.module, task.layout, job.start, task.inputs[rows], task.labels[rows], WORK, stream=job.stream
    )


def test_every_model_is_tried() -> None:
    assert {name for name, _, _ in CASES.values()} == set(MODEL_NAMES)


@pytest.mark.parametrize("case", CASES)
def test_a_cohort_equals_the_reference(case: str) -> None:
    task = problem(case)
    jobs = make_jobs(task, SIZES)
    with Cohort(task.module, task.layout, task.inputs, task.labels, workers=1) as cohort:
        rows = torch.from_numpy(cohort.train(jobs, WORK))
    for row, job in zip(rows, jobs, strict=True):
        assert_learned_alike(row, reference(task, job))


@pytest.mark.parametrize("case", CASES)
def test_stacked_clients_equal_the_reference(case: str) -> None:
    task = problem(case)
    jobs = make_jobs(task, SIZES)
    grouped = torch.empty(len(jobs), task.layout.size, dtype=torch.float64)
    VmapGroups(task).perform(WORK, jobs, grouped)
    stacked = run_stacked(task, jobs, WORK).read() - jobs[0].start
    for number, job in enumerate(jobs):
        expected = reference(task, job)
        assert_learned_alike(grouped[number], expected)
        assert_learned_alike(stacked[number], expected)


@pytest.mark.parametrize("case", CASES)
def test_a_clipped_step_equals_a_loop_over_samples(case: str) -> None:
    task = problem(case, 9)
    module, layout = task.module, task.layout
    start = layout.flatten(module)
    gradients = []
    for number in range(9):
        module.zero_grad()
        one = slice(number, number + 1)
        mean_loss(module(task.inputs[one]), task.labels[one]).backward()
        gradients.append(
            torch.cat(
                [(part.grad if part.grad is not None else part * 0).flatten() for part in parts(module)]
            )
        )
    norms = torch.stack(gradients).norm(dim=1)
    clip = float(norms.median())  # some are clipped, some are not
    total = sum((gradient * min(1.0, clip / float(gradient.norm())) for gradient in gradients), start * 0)
    update = clipped_gradient_step(
        module, layout, start, task.inputs, task.labels, clip=clip, learning_rate=0.5, chunk=4
    )
    assert_learned_alike(update, -0.5 / 9 * total)
    with Cohort(module, layout, task.inputs, task.labels, workers=1) as cohort:
        rows = cohort.train([Job(start, torch.arange(9), SimStream(1))], ClippedStep(clip, 0.5))
    assert_learned_alike(torch.from_numpy(rows[0]), update)


def parts(module: nn.Module) -> list[Tensor]:
    """In the order of the flat vector."""
    return list(module.state_dict(keep_vars=True).values())
