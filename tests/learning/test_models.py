from __future__ import annotations

import pytest
import torch
from torch import nn

from niss.errors import ConfigError
from niss.learning import Cnn, Mlp, build_model
from niss.randomness import SimStream

STREAM = SimStream(7)


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "image_shape", "classes", "hidden", "count"),
    [
        # McMahan et al. (2017), section 3: the CNN has 1,663,370 and the "2NN" 199,210 parameters.
        ("cnn", (1, 28, 28), 10, None, 1_663_370),
        ("mlp", (1, 28, 28), 10, None, 199_210),
        ("cnn", (3, 32, 32), 10, None, 2_432 + 51_264 + (64 * 8 * 8 + 1) * 512 + 5_130),
        ("mlp", (3, 32, 32), 100, (32,), 3073 * 32 + 33 * 100),
        ("mlp", (1, 2, 3), 4, (), 7 * 4),
    ],
)
def test_parameter_counts(
    name: str, image_shape: tuple[int, int, int], classes: int, hidden: tuple[int, ...] | None, count: int
) -> None:
    module = build_model(name, image_shape=image_shape, classes=classes, stream=STREAM, hidden=hidden)
    assert parameter_count(module) == count
    assert module(torch.zeros(3, *image_shape)).shape == (3, classes)


def test_mlp_is_affine_relu_affine() -> None:
    module = build_model("mlp", image_shape=(1, 2, 2), classes=3, stream=STREAM, hidden=(5,))
    assert isinstance(module, Mlp)
    first_weight, first_bias, last_weight, last_bias = module.parameters()
    images = torch.randn(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    hidden = (images.reshape(4, 4) @ first_weight.T + first_bias).clamp(min=0)
    torch.testing.assert_close(module(images), hidden @ last_weight.T + last_bias)


def test_cnn_layers_are_in_the_stated_order() -> None:
    module = build_model("cnn", image_shape=(1, 7, 9), classes=3, stream=STREAM)
    assert isinstance(module, Cnn)
    kinds = [type(layer).__name__ for layer in module.layers]
    convolution = ["Conv2d", "MaxPool2d", "ReLU"]
    assert kinds == [*convolution, *convolution, "Flatten", "Linear", "ReLU", "Linear"]
    assert module(torch.zeros(2, 1, 7, 9)).shape == (2, 3)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_initial_weights_depend_on_the_stream_alone(name: str) -> None:
    def weights(stream: SimStream) -> torch.Tensor:
        module = build_model(name, image_shape=(1, 8, 8), classes=3, stream=stream)
        return nn.utils.parameters_to_vector(module.parameters())

    before = torch.random.get_rng_state()
    first = weights(STREAM)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(3)
    assert torch.equal(first, weights(STREAM))
    assert not torch.equal(first, weights(STREAM.child(1)))


@pytest.mark.parametrize(("typo", "meant"), [("mpl", "mlp"), ("CNN2", "cnn"), ("cnnn", "cnn")])
def test_unknown_name_names_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(typo, image_shape=(1, 8, 8), classes=3, stream=STREAM)
    assert caught.value.field == "model.name"
    assert f"did you mean {meant!r}" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "cnn", "hidden": (3,)}, "model.hidden"),
        ({"hidden": (3, 0)}, "model.hidden"),
        ({"classes": 1}, "classes"),
        ({"classes": True}, "classes"),
        ({"image_shape": (28, 28)}, "image_shape"),
        ({"image_shape": (1, 0, 28)}, "image_shape"),
        ({"name": "cnn", "image_shape": (1, 3, 28)}, "image_shape"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, object], field: str) -> None:
    arguments: dict[str, object] = {"name": "mlp", "image_shape": (1, 8, 8), "classes": 3, "stream": STREAM}
    with pytest.raises(ConfigError) as caught:
        build_model(**(arguments | changes))  # type: ignore[arg-type]
    assert caught.value.field == field
