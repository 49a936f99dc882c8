from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from niss.errors import ConfigError
from niss.learning import (
    Cnn,
    FlatLayout,
    ImageSamples,
    Mlp,
    Samples,
    TokenSamples,
    build_model,
    to_tensor,
)
from niss.learning.cohort import Problem
from niss.learning.models import _RECIPES, MODEL_NAMES, accepts
from niss.randomness import SimStream
from niss.settings import described
from niss.simulation.sections import ModelConfig

STREAM = SimStream(7)


IMAGES = ImageSamples((1, 28, 28))
COLOURED = ImageSamples((3, 32, 32))
PLAYS = TokenSamples(80, 80)


@pytest.mark.parametrize(
    ("name", "samples", "classes", "sizes", "count"),
    [
        # McMahan et al. (2017), section 3: the CNN has 1,663,370 and the "2NN" 199,210 parameters.
        ("cnn", IMAGES, 10, {}, 1_663_370),
        ("mlp", IMAGES, 10, {}, 199_210),
        ("cnn", COLOURED, 10, {}, 2_432 + 51_264 + (64 * 8 * 8 + 1) * 512 + 5_130),
        # Papernot et al. (2021), table 1.
        ("cnn", IMAGES, 10, {"activation": "tanh"}, 26_010),
        ("cnn", ImageSamples((1, 14, 15)), 3, {"activation": "tanh"}, 1_040 + 8_224 + 33 * 32 + 99),
        # The same, table 2.
        ("cnn", COLOURED, 10, {"activation": "tanh"}, 550_570),
        ("mlp", COLOURED, 100, {"hidden": (32,)}, 3073 * 32 + 33 * 100),
        ("mlp", ImageSamples((1, 2, 3)), 4, {"hidden": ()}, 7 * 4),
        ("resnet", COLOURED, 10, {}, 177_178),
        ("resnet", COLOURED, 10, {"layers": 1}, 79_962),
        ("logistic", IMAGES, 10, {}, 7_850),
        ("gru", PLAYS, 80, {}, 67_664),
        ("lstm", PLAYS, 80, {}, 86_352),
        ("transformer", PLAYS, 80, {}, 115_536),
    ],
)
def test_parameter_counts(name: str, samples: Samples, classes: int, sizes: Any, count: int) -> None:
    module = build_model(name, samples=samples, classes=classes, stream=STREAM, **sizes)
    assert sum(parameter.numel() for parameter in module.parameters()) == count
    if isinstance(samples, ImageSamples):
        assert module(torch.zeros(3, *samples.shape)).shape == (3, classes)
    else:
        assert module(torch.zeros(3, samples.length, dtype=torch.int64)).shape == (3, 80, classes)


def test_mlp_is_affine_relu_affine() -> None:
    module = build_model("mlp", samples=ImageSamples((1, 2, 2)), classes=3, stream=STREAM, hidden=(5,))
    assert isinstance(module, Mlp)
    first_weight, first_bias, last_weight, last_bias = module.parameters()
    images = torch.randn(4, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    hidden = (images.reshape(4, 4) @ first_weight.T + first_bias).clamp(min=0)
    torch.testing.assert_close(module(images), hidden @ last_weight.T + last_bias)


def test_cnn_layers_are_in_the_stated_order() -> None:
    module = build_model("cnn", samples=ImageSamples((1, 7, 9)), classes=3, stream=STREAM)
    assert isinstance(module, Cnn)
    kinds = [type(layer).__name__ for layer in module.layers]
    convolution = ["Conv2d", "MaxPool2d", "ReLU"]
    assert kinds == [*convolution, *convolution, "Flatten", "Linear", "ReLU", "Linear"]
    assert module(torch.zeros(2, 1, 7, 9)).shape == (2, 3)


def test_logistic_regression_on_images_is_recognised_as_an_mlp() -> None:
    module = build_model("logistic", samples=ImageSamples((1, 4, 4)), classes=3, stream=STREAM)
    labels = torch.tensor([0, 2])
    assert Problem(module, FlatLayout.of(module), torch.zeros(2, 1, 4, 4), labels).built is Mlp


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_initial_weights_depend_on_the_stream_alone(name: str) -> None:
    def weights(stream: SimStream) -> torch.Tensor:
        samples = next(some for some in (ImageSamples((1, 8, 8)), TokenSamples(5, 7)) if accepts(name, some))
        module = build_model(name, samples=samples, classes=3, stream=stream)
        return nn.utils.parameters_to_vector(module.parameters())

    before = torch.random.get_rng_state()
    first = weights(STREAM)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(3)
    assert torch.equal(first, weights(STREAM))
    assert not torch.equal(first, weights(STREAM.child(1)))


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("samples", [ImageSamples((1, 8, 8)), TokenSamples(5, 7)])
def test_a_model_takes_its_samples_and_names_the_models_for_others(name: str, samples: Samples) -> None:
    if accepts(name, samples):
        assert next(build_model(name, samples=samples, classes=3, stream=STREAM).parameters()).numel()
        return
    with pytest.raises(ConfigError, match=f"'{name}' takes") as caught:
        build_model(name, samples=samples, classes=3, stream=STREAM)
    assert caught.value.field == "model.name"
    named = str(caught.value.hint).removeprefix("choose one of: ").split(";")[0].split(", ")
    assert named == [other for other in MODEL_NAMES if accepts(other, samples)]


def test_the_settings_of_a_run_are_those_of_the_models() -> None:
    settings = {setting.name: setting for setting in described(ModelConfig)}
    assert settings["name"].choices == MODEL_NAMES
    assert set(settings) == {"name"} | {size for recipe in _RECIPES.values() for size in recipe.sizes}


PIXELS = SimStream(2).generator().integers(0, 256, size=(3, 2, 4, 5), dtype=np.uint8)


def test_normalises_each_channel() -> None:
    result = to_tensor(PIXELS, [0.5, 0.25], (0.5, 2.0))
    expected = PIXELS.astype(np.float64) / 255
    expected[:, 0] = (expected[:, 0] - 0.5) / 0.5
    expected[:, 1] = (expected[:, 1] - 0.25) / 2.0
    assert result.dtype == torch.float32
    assert result.shape == (3, 2, 4, 5)
    assert float(np.abs(result.double().numpy() - expected).max()) <= 1e-6


def test_one_number_serves_all_channels() -> None:
    assert torch.equal(to_tensor(PIXELS, 0.1, 0.3), to_tensor(PIXELS, [0.1, 0.1], [0.3, 0.3]))


def test_read_only_and_strided_arrays_are_read_without_being_changed() -> None:
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    assert torch.equal(to_tensor(frozen, 0.0, 1.0), to_tensor(PIXELS, 0.0, 1.0))
    assert torch.equal(
        to_tensor(PIXELS[::-1, :, :, ::2], 0.0, 1.0), to_tensor(PIXELS, 0.0, 1.0).flip(0)[..., ::2]
    )
    assert to_tensor(PIXELS.transpose(0, 1, 3, 2), 0.0, 1.0).is_contiguous()
    assert np.array_equal(frozen, PIXELS)
