from __future__ import annotations

import pytest
import torch
from torch import nn

from niss.errors import ConfigError
from niss.learning import FlatLayout, clipped_gradient_step
from support.small_images import CLASSES, samples, small_mlp


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(1), nn.InstanceNorm2d(1, track_running_stats=True)])
def test_batch_statistics_are_refused(layer: nn.Module) -> None:
    module = nn.Sequential(layer, nn.Flatten(), nn.Linear(16, CLASSES)).double()
    layout = FlatLayout.of(module)
    with pytest.raises(ConfigError, match="batch statistics: 0") as caught:
        clipped_gradient_step(
            module, layout, layout.flatten(module), *samples(4), clip=1.0, learning_rate=1.0
        )
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": float("inf")}, "clip"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"chunk": 0}, "chunk"),
        ({"start": torch.zeros(3, dtype=torch.float64)}, "vector"),
        ({"labels": torch.tensor([0, 1, 2, CLASSES])}, "labels"),
        ({"labels": torch.tensor([0, 1])}, "images"),
        ({"module": small_mlp().requires_grad_(False)}, "model"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, object], field: str) -> None:
    module = small_mlp()
    layout = FlatLayout.of(module)
    images, labels = samples(4)
    arguments: dict[str, object] = {
        "module": module,
        "layout": layout,
        "start": layout.flatten(module),
        "images": images,
        "labels": labels,
        "clip": 1.0,
        "learning_rate": 0.1,
    }
    with pytest.raises(ConfigError) as caught:
        clipped_gradient_step(**(arguments | changes))  # type: ignore[arg-type]
    assert caught.value.field == field
