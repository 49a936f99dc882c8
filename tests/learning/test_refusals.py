"""What learning refuses, before any work starts, and the field that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning import (
    Cohort,
    FlatLayout,
    ImageSamples,
    Job,
    LocalTraining,
    TokenSamples,
    build_model,
    evaluate,
    train_client,
)
from support.small_images import CLASSES, SHAPE, STREAM, samples, small_mlp, with_batchnorm

LABELS = torch.tensor([0, 1, 2, 0, 1])
LOGITS = torch.zeros(5, 3)


def train(module: nn.Module | None = None, **changes: Any) -> Tensor:
    """`train_client`, with four samples unless told otherwise."""
    module = small_mlp() if module is None else module
    layout = FlatLayout.of(module)
    images, labels = samples(4)
    given = {"start": layout.flatten(module), "images": images, "labels": labels}
    return train_client(module, layout, **given | {"settings": LocalTraining(), "stream": STREAM} | changes)


def cohort(labels: Tensor = LABELS, **options: Any) -> Cohort:
    module = build_model("mlp", samples=ImageSamples((1, 2, 2)), classes=3, stream=STREAM)
    inputs = torch.ones(len(labels), 1, 2, 2)
    return Cohort.of(module, FlatLayout.of(module), inputs, labels, **{"workers": 1} | options)


def train_on(labels: Tensor) -> None:
    some = cohort(labels)
    job = Job(torch.zeros(some._problem.layout.size), torch.tensor([0, 1]), STREAM)
    some.train([job], LocalTraining(epochs=1))


def build(name: str = "mlp", samples: Any = SHAPE, classes: int = 3, **sizes: Any) -> nn.Module:
    return build_model(name, samples=samples, classes=classes, stream=STREAM, **sizes)


def frozen() -> nn.Module:
    return small_mlp().requires_grad_(False)


def whole(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


REFUSED: list[tuple[Callable[[], object], str, str]] = [
    # Samples that do not fit each other, or the model.
    (lambda: train(images=samples(0)[0], labels=whole(0)), "images", "no samples"),
    (lambda: train(labels=whole(2)), "images", "one sample for each of 2 labels"),
    (lambda: train(labels=torch.zeros(4)), "labels", "must be int64"),
    (lambda: train(labels=whole(4, 1)), "model", "forward must return logits"),
    (lambda: train(labels=whole(4, 1, 1)), "labels", "must be int64 of shape"),
    (lambda: train(labels=torch.tensor([0, 1, 2, CLASSES])), "labels", "is beyond"),
    (lambda: train(labels=torch.tensor([0, 1, 2, -100])), "labels", "start at 0"),
    (lambda: train(start=torch.zeros(3).double()), "vector", "must be 1-D of length"),
    (lambda: train(frozen()), "model", "no trainable parameters"),
    (lambda: train(nn.Conv2d(1, CLASSES, 1).double()), "model", "forward must return"),
    (lambda: train(with_batchnorm(), settings=LocalTraining(batch_size=3)), "batch_size", "batch of one"),
    (lambda: evaluate(nn.Identity(), LOGITS[:0], LABELS[:0]), "images", "no samples"),
    (lambda: evaluate(nn.Identity(), LOGITS, LABELS[:4]), "images", "one sample for each"),
    (lambda: evaluate(nn.Identity(), LOGITS, LABELS + 1), "labels", "beyond the 3 classes"),
    (lambda: evaluate(nn.Identity(), LOGITS, LABELS.float()), "labels", "must be int64"),
    (lambda: evaluate(nn.Identity(), LOGITS[:, 0], LABELS), "model", r"logits of shape \[5, classes\]"),
    (lambda: evaluate(nn.Identity(), LOGITS[:, None], LABELS), "model", r"logits of shape \[5, classes\]"),
    (lambda: train_on(torch.tensor([0, 3])), "labels", "label 3 is beyond the 3 classes"),
    (lambda: cohort(device="tpu"), "device", "unknown device 'tpu'"),
    # Models and their samples.
    (lambda: build("cnn", hidden=(3,)), "model.hidden", "no such setting"),
    (lambda: build(width=8), "model.width", "no such setting"),
    (lambda: build("logistic", layers=1), "model.layers", "no such setting"),
    (lambda: build("resnet", ImageSamples((1, 8, 8)), width=10), "model.width", "whole groups of 4"),
    (lambda: build("resnet", heads=4), "model.heads", "no such setting"),
    (lambda: build("transformer", TokenSamples(5, 7), heads=7), "model.heads", "cannot share a width"),
    (lambda: build("cnn", ImageSamples((1, 3, 28))), "samples.shape", "at least 4x4"),
    (lambda: build("resnet", ImageSamples((1, 28, 4))), "samples.shape", "at least 5x5"),
]


@pytest.mark.parametrize(("refused", "field", "message"), REFUSED)
def test_refusals_name_the_field(refused: Callable[[], object], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        refused()
    assert caught.value.field == field
    assert caught.value.hint or not field.startswith("model.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device: torch finds no CUDA GPU here"):
        cohort(device="cuda")
