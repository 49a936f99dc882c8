from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import nn

from niss.errors import ConfigError
from niss.learning import (
    Cnn,
    FlatLayout,
    ImageSamples,
    Mlp,
    ModelSettings,
    Samples,
    TokenSamples,
    build_model,
)
from niss.learning.models import MODEL_NAMES, accepts, recognise
from niss.randomness import SimStream
from niss.settings import described
from niss.simulation.sections import ModelConfig

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
    module = build_model(
        name,
        samples=ImageSamples(image_shape),
        classes=classes,
        stream=STREAM,
        settings=ModelSettings(hidden=hidden),
    )
    assert parameter_count(module) == count
    assert module(torch.zeros(3, *image_shape)).shape == (3, classes)


def test_mlp_is_affine_relu_affine() -> None:
    module = build_model(
        "mlp", samples=ImageSamples((1, 2, 2)), classes=3, stream=STREAM, settings=ModelSettings(hidden=(5,))
    )
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


@pytest.mark.parametrize(
    ("name", "samples", "classes", "settings", "count"),
    [
        ("resnet", ImageSamples((3, 32, 32)), 10, {}, 177_178),
        ("resnet", ImageSamples((3, 32, 32)), 10, {"layers": 1}, 79_962),
        ("logistic", ImageSamples((1, 28, 28)), 10, {}, 7_850),
        ("gru", TokenSamples(80, 80), 80, {}, 67_664),
        ("lstm", TokenSamples(80, 80), 80, {}, 86_352),
        ("transformer", TokenSamples(80, 80), 80, {}, 115_536),
    ],
)
def test_other_parameter_counts(
    name: str, samples: Samples, classes: int, settings: dict[str, int], count: int
) -> None:
    chosen = ModelSettings(**settings)  # type: ignore[arg-type]
    module = build_model(name, samples=samples, classes=classes, stream=STREAM, settings=chosen)
    assert parameter_count(module) == count


def test_logistic_regression_on_images_is_recognised_as_an_mlp() -> None:
    module = build_model("logistic", samples=ImageSamples((1, 4, 4)), classes=3, stream=STREAM)
    labels = torch.tensor([0, 2])
    assert recognise(module, FlatLayout.of(module), torch.zeros(2, 1, 4, 4), labels) is Mlp


KINDS: dict[str, Samples] = {
    "mlp": ImageSamples((1, 8, 8)),
    "cnn": ImageSamples((1, 8, 8)),
    "resnet": ImageSamples((1, 8, 8)),
    "logistic": ImageSamples((1, 8, 8)),
    "gru": TokenSamples(5, 7),
    "lstm": TokenSamples(5, 7),
    "transformer": TokenSamples(5, 7),
}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_initial_weights_depend_on_the_stream_alone(name: str) -> None:
    def weights(stream: SimStream) -> torch.Tensor:
        module = build_model(name, samples=KINDS[name], classes=3, stream=stream)
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
        build_model(typo, samples=ImageSamples((1, 8, 8)), classes=3, stream=STREAM)
    assert caught.value.field == "model.name"
    assert f"did you mean {meant!r}" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "cnn", "settings": ModelSettings(hidden=(3,))}, "model.hidden"),
        ({"name": "mlp", "settings": ModelSettings(width=8)}, "model.width"),
        ({"name": "logistic", "settings": ModelSettings(layers=1)}, "model.layers"),
        ({"name": "resnet", "settings": ModelSettings(width=10)}, "model.width"),
        ({"name": "resnet", "settings": ModelSettings(heads=4)}, "model.heads"),
        (
            {"name": "transformer", "samples": KINDS["gru"], "settings": ModelSettings(heads=7)},
            "model.heads",
        ),
        ({"classes": 1}, "classes"),
        ({"classes": True}, "classes"),
        ({"name": "cnn", "samples": ImageSamples((1, 3, 28))}, "samples.shape"),
        ({"name": "resnet", "samples": ImageSamples((1, 28, 4))}, "samples.shape"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, object], field: str) -> None:
    arguments: dict[str, object] = {
        "name": "mlp",
        "samples": ImageSamples((1, 8, 8)),
        "classes": 3,
        "stream": STREAM,
    }
    with pytest.raises(ConfigError) as caught:
        build_model(**(arguments | changes))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert field in ("classes", "model.name") or caught.value.hint


@pytest.mark.parametrize("values", [{"hidden": (3, 0)}, {"width": 0}, {"layers": True}, {"heads": 1.5}])
def test_sizes_are_whole_numbers(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelSettings(**values)  # type: ignore[arg-type]
    assert caught.value.field == f"model.{next(iter(values))}"


@pytest.mark.parametrize("shape", [(28, 28), (1, 0, 28)])
def test_images_have_three_extents(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        ImageSamples(shape)
    assert caught.value.field == "samples.shape"


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
    assert set(settings) == {"name"} | {field.name for field in fields(ModelSettings)}
