"""The update an adversary computes is what the client computes; labels and pictures can be read from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from niss.accounting import Plan
from niss.attacks.federation import AttackedFederation, make_federation
from niss.attacks.gradients import read_picture, recover_labels
from niss.attacks.pictures import Pictures, load_pictures, score_pictures
from niss.attacks.rounds import clip_update
from niss.errors import ConfigError
from niss.randomness import SimStream


def computed(federation: AttackedFederation, plan: Plan | None = None) -> np.ndarray:
    held = federation.pictures
    labels = functional.one_hot(torch.from_numpy(held.labels), held.classes).float()
    return federation.update_function(plan)(held.inputs(), labels).detach().double().numpy()


def federation_of(
    model: str, *, batch: int = 1, steps: int = 1, first: int = 0, rate: float = 0.1
) -> AttackedFederation:
    return make_federation(
        load_pictures(f"mnist-mini:{first}", count=batch),
        model=model,
        hidden=(64,),
        clients=2,
        stream=SimStream(4),
        steps=steps,
        learning_rate=rate,
    )


@pytest.mark.parametrize(
    ("model", "batch", "steps"), [("mlp", 1, 1), ("mlp", 3, 4), ("lenet", 2, 2), ("cnn", 1, 1)]
)
def test_the_update_function_is_what_local_training_does(model: str, batch: int, steps: int) -> None:
    federation = federation_of(model, batch=batch, steps=steps)
    truth = federation.as_gradient(federation.updates[0])
    assert np.linalg.norm(truth) > 0.1
    np.testing.assert_allclose(computed(federation), truth, atol=2e-5 * np.abs(truth).max())


def test_the_update_function_clips_as_the_plan_says() -> None:
    federation = federation_of("mlp")
    for plan in (Plan(clip=0.01), Plan(clip=1e6), Plan(unit="nbafl", clip=1e-3), Plan(method="fedavg")):
        clipped = federation.as_gradient(clip_update(federation.updates[0], plan))
        np.testing.assert_allclose(computed(federation, plan), clipped, atol=1e-5 * np.abs(clipped).max())


@pytest.mark.parametrize("first", range(6))
def test_the_sign_rule_finds_the_label_of_one_picture(first: int) -> None:
    federation = federation_of("mlp", first=first)
    found = recover_labels(
        federation.as_gradient(federation.updates[0]), federation.update_function(), federation.pictures
    )
    assert found.tolist() == federation.pictures.labels.tolist()


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_labels_of_a_batch_with_repeats_whatever_the_clip(scale: float) -> None:
    federation = federation_of("mlp", batch=8)
    labels = sorted(federation.pictures.labels.tolist())
    assert len(set(labels)) < 8
    gradient = scale * federation.as_gradient(federation.updates[0])
    found = recover_labels(gradient, federation.update_function(), federation.pictures)
    assert found.tolist() == labels


def test_a_linear_first_layer_gives_the_picture_away(mlp_federation: AttackedFederation) -> None:
    gradient = mlp_federation.as_gradient(mlp_federation.updates[0])
    shown = read_picture(1e-3 * gradient, mlp_federation.update_function(), mlp_federation.pictures)
    assert score_pictures(shown, mlp_federation.pictures.pixels).psnr > 60


def test_only_a_linear_first_layer_can_be_read(lenet_federation: AttackedFederation) -> None:
    with pytest.raises(ConfigError, match="not linear"):
        read_picture(
            lenet_federation.updates[0], lenet_federation.update_function(), lenet_federation.pictures
        )


def test_federations_are_checked() -> None:
    pictures: Pictures = load_pictures("mnist-mini:0")
    for changes, field in (
        ({"clients": 1}, "--clients"),
        ({"model": "vgg"}, "--model"),
        ({"steps": 0}, "--steps"),
    ):
        options = {"model": "mlp", "clients": 2, **changes}
        with pytest.raises(ConfigError) as caught:
            make_federation(pictures, stream=SimStream(1), **options)  # type: ignore[arg-type]
        assert caught.value.field == field
