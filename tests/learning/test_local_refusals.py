from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning import FlatLayout, LocalTraining, train_client
from support.small_images import CLASSES, STREAM, samples, small_mlp, with_batchnorm


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", True),
        ("batch_size", 0),
        ("batch_size", "10"),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", None),
        ("momentum", -0.1),
        ("momentum", 1.0),
        ("weight_decay", -1e-9),
        ("weight_decay", float("inf")),
    ],
)
def test_settings_are_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        LocalTraining(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("images", "labels", "field"),
    [
        (torch.zeros(0, 1, 4, 4).double(), torch.zeros(0, dtype=torch.int64), "images"),
        (torch.zeros(3, 1, 4, 4).double(), torch.zeros(2, dtype=torch.int64), "images"),
        (torch.zeros(2, 1, 4, 4).double(), torch.zeros(2), "labels"),
        (torch.zeros(2, 1, 4, 4).double(), torch.zeros(2, 1, dtype=torch.int64), "model"),
        (torch.zeros(2, 1, 4, 4).double(), torch.zeros(2, 1, 1, dtype=torch.int64), "labels"),
        (torch.zeros(2, 1, 4, 4).double(), torch.tensor([0, CLASSES]), "labels"),
        (torch.zeros(2, 1, 4, 4).double(), torch.tensor([0, -100]), "labels"),
    ],
)
def test_unusable_samples_are_refused(images: Tensor, labels: Tensor, field: str) -> None:
    module = small_mlp()
    layout = FlatLayout.of(module)
    with pytest.raises(ConfigError) as caught:
        train_client(module, layout, layout.flatten(module), images, labels, LocalTraining(), stream=STREAM)
    assert caught.value.field == field


def test_unusable_modules_are_refused() -> None:
    frozen = small_mlp().requires_grad_(False)
    wrong_output = nn.Conv2d(1, CLASSES, 1).double()
    for module, message in ((frozen, "no trainable parameters"), (wrong_output, "forward must return")):
        layout = FlatLayout.of(module)
        with pytest.raises(ConfigError, match=message) as caught:
            train_client(module, layout, layout.flatten(module), *samples(), LocalTraining(), stream=STREAM)
        assert caught.value.field == "model"


def test_batchnorm_on_a_batch_of_one_says_what_to_do() -> None:
    module = with_batchnorm()
    layout = FlatLayout.of(module)
    with pytest.raises(ConfigError, match="batch of one sample") as caught:
        train_client(
            module,
            layout,
            layout.flatten(module),
            *samples(count=11),
            LocalTraining(batch_size=10),
            stream=STREAM,
        )
    assert caught.value.field == "batch_size"
