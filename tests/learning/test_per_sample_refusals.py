from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from niss.errors import ConfigError
from niss.learning import FlatLayout, ImageSamples, ModelSettings, build_model, clipped_gradient_step
from niss.randomness import SimStream

STREAM = SimStream(9)
CLASSES = 3


def samples(count: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 4, 4, dtype=torch.float64, generator=source)
    return images, torch.randint(CLASSES, (count,), generator=source)


def small_mlp() -> nn.Module:
    return build_model(
        "mlp",
        samples=ImageSamples((1, 4, 4)),
        classes=CLASSES,
        stream=STREAM,
        settings=ModelSettings(hidden=(5,)),
    ).double()


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
        ({"labels": torch.tensor([0, 1, 2, 3])}, "labels"),
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
