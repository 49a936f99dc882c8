"""What the cohort refuses, before any work starts, by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from niss.errors import ConfigError
from niss.learning import (
    ClippedStep,
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    ModelSettings,
    build_model,
    evaluate,
)
from niss.randomness import SimStream

WORK = LocalTraining(epochs=1)


@pytest.fixture
def cohort() -> Cohort:
    module = build_model(
        "mlp",
        samples=ImageSamples((1, 2, 2)),
        classes=3,
        settings=ModelSettings(hidden=(4,)),
        stream=SimStream(5),
    )
    labels = torch.tensor([0, 1, 2, 0, 1])
    return Cohort(module, FlatLayout.of(module), torch.ones(5, 1, 2, 2), labels, workers=1)


def good(cohort: Cohort) -> Job:
    return Job(torch.zeros(cohort._layout.size), torch.tensor([0, 1]), SimStream(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": torch.tensor([0, 5])}, r"jobs\[1\]\.samples: row 5 does not exist"),
        ({"samples": torch.tensor([-1])}, r"jobs\[1\]\.samples: row -1 does not exist"),
        ({"samples": torch.tensor([], dtype=torch.int64)}, r"jobs\[1\]\.samples: no samples"),
        ({"samples": torch.tensor([0], dtype=torch.int32)}, r"jobs\[1\]\.samples: must be a 1-D int64"),
        ({"samples": torch.tensor([[0]])}, r"jobs\[1\]\.samples: must be a 1-D int64"),
        ({"start": torch.zeros(3)}, r"jobs\[1\]\.start: must be 1-D of length"),
        ({"start": torch.zeros(35, dtype=torch.float64)}, r"jobs\[1\]\.start: must be torch.float32"),
    ],
)
def test_jobs(cohort, change, message) -> None:
    jobs = [good(cohort), replace(good(cohort), **change)]
    with pytest.raises(ConfigError, match=message):
        cohort.train(jobs, WORK)
    with pytest.raises(ConfigError, match=message):
        cohort.train(jobs, ClippedStep(clip=1.0, learning_rate=1.0))


@pytest.mark.parametrize("out", [np.empty((2, 35)), np.empty((1, 35), dtype=np.float32)])
def test_out(cohort, out) -> None:
    with pytest.raises(ConfigError, match="out: must be a writable float32 array of shape"):
        cohort.train([good(cohort)] * 2, WORK, out=out)


@pytest.mark.parametrize("field", ["clip", "learning_rate"])
def test_clipped_settings(cohort, field) -> None:
    with pytest.raises(ConfigError, match=field):
        cohort.train([good(cohort)], ClippedStep(**{"clip": 1.0, "learning_rate": 1.0, field: 0.0}))


def test_labels_beyond_the_classes_are_refused_as_by_the_reference() -> None:
    module = build_model(
        "mlp",
        samples=ImageSamples((1, 2, 2)),
        classes=3,
        settings=ModelSettings(hidden=(4,)),
        stream=SimStream(5),
    )
    layout = FlatLayout.of(module)
    cohort = Cohort(module, layout, torch.ones(2, 1, 2, 2), torch.tensor([0, 3]), workers=1)
    with pytest.raises(ConfigError, match="label 3 is beyond the 3 classes"):
        cohort.train([Job(layout.flatten(module), torch.tensor([0, 1]), SimStream(1))], WORK)


def test_workers_and_devices() -> None:
    module = build_model(
        "mlp",
        samples=ImageSamples((1, 2, 2)),
        classes=3,
        settings=ModelSettings(hidden=(4,)),
        stream=SimStream(5),
    )
    common = (module, FlatLayout.of(module), torch.ones(2, 1, 2, 2), torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="workers: must be a whole number of at least 1"):
        Cohort(*common, workers=0)
    with pytest.raises(ConfigError, match="device: unknown device 'tpu'"):
        Cohort(*common, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device: torch finds no CUDA GPU here"):
            Cohort(*common, device="cuda")


def test_evaluate_is_the_reference(cohort) -> None:
    inputs, labels = torch.rand(7, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2, 2])
    weights = torch.linspace(-1.0, 1.0, cohort._layout.size)
    found = cohort.evaluate(weights, inputs, labels)
    module = cohort._engine._formulation.problem.module
    cohort._layout.load(module, weights)
    assert found == evaluate(module, inputs, labels)
