"""What an adversary makes of pictures: updates, what can be read from one, and scores, against values by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from niss.accounting import Plan
from niss.attacks.federation import AttackedFederation, load_pictures, make_federation
from niss.attacks.pictures import (
    best_order,
    blind_guess,
    peak_ratio,
    read_picture,
    recover_labels,
    score_pictures,
    structural_similarity,
)
from niss.attacks.rounds import clip_update
from niss.errors import ConfigError
from niss.randomness import SimStream

GENERATOR = np.random.default_rng(1)
PICTURES = GENERATOR.random((3, 3, 16, 16))
WHITE = np.ones((1, 1, 12, 12))


def federation_of(model: str, *, batch: int = 1, first: int = 0, **options: Any) -> AttackedFederation:
    pictures = load_pictures(f"mnist-mini:{first}", count=batch)
    return make_federation(pictures, model=model, hidden=(64,), clients=2, stream=SimStream(4), **options)


def computed(federation: AttackedFederation, plan: Plan | None = None) -> np.ndarray:
    held = federation.pictures
    labels = functional.one_hot(torch.from_numpy(held.labels), held.classes).float()
    return federation.update_function(plan)(held.inputs(), labels).detach().double().numpy()


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


@pytest.mark.parametrize(
    ("first", "batch", "scale"), [*((first, 1, 1.0) for first in range(6)), (0, 8, 1.0), (0, 8, 0.01)]
)
def test_labels_are_read_from_the_last_bias(first: int, batch: int, scale: float) -> None:
    """The sign rule for one picture; of a batch those that repeat too, whatever the clip."""
    federation = federation_of("mlp", first=first, batch=batch)
    labels = sorted(federation.pictures.labels.tolist())
    assert batch == 1 or len(set(labels)) < batch
    gradient = scale * federation.as_gradient(federation.updates[0])
    found = recover_labels(gradient, federation.update_function(), federation.pictures)
    assert found.tolist() == labels


def test_a_linear_first_layer_and_no_other_gives_the_picture_away(
    mlp_federation: AttackedFederation, lenet_federation: AttackedFederation
) -> None:
    gradient = mlp_federation.as_gradient(mlp_federation.updates[0])
    shown = read_picture(1e-3 * gradient, mlp_federation.update_function(), mlp_federation.pictures)
    assert score_pictures(shown, mlp_federation.pictures.pixels).psnr > 60
    other = lenet_federation
    with pytest.raises(ConfigError, match="not linear"):
        read_picture(other.updates[0], other.update_function(), other.pictures)


def test_psnr_by_hand() -> None:
    assert [peak_ratio(mse) for mse in (0.01, 1.0, 0.0)] == pytest.approx([20.0, 0.0, math.inf])
    scores = score_pictures(0.5 * WHITE, 0.0 * WHITE)
    assert scores.psnr == pytest.approx(-10 * math.log10(0.25))
    assert scores.mse == 0.25


@pytest.mark.parametrize(("value", "mse"), [(50.0, 0.0), (-50.0, 1.0), (np.nan, 0.25)])
def test_wild_values_count_as_the_edge_of_the_range(value: float, mse: float) -> None:
    assert score_pictures(value * WHITE, WHITE).mse == mse


def test_the_order_of_pictures_does_not_matter() -> None:
    turned = PICTURES[[2, 0, 1]]
    assert best_order(turned, PICTURES).tolist() == [1, 2, 0]
    assert score_pictures(turned, PICTURES).mse == 0.0
    assert score_pictures(turned, PICTURES).ssim == pytest.approx(1.0)


def test_ssim_of_even_pictures_is_the_luminance_term() -> None:
    """Without any structure the second factor is 1."""
    a, b = np.full((1, 16, 16), 0.2), np.full((1, 16, 16), 0.7)
    c1 = 0.01**2
    assert structural_similarity(a, b) == pytest.approx((2 * 0.14 + c1) / (0.04 + 0.49 + c1))


def test_ssim_is_one_for_itself_and_falls_with_noise() -> None:
    one = PICTURES[0]
    noisy = [structural_similarity(one, one + s * GENERATOR.normal(size=one.shape)) for s in (0.0, 0.05, 0.5)]
    assert noisy[0] == pytest.approx(1.0)
    assert noisy[0] > noisy[1] > noisy[2]
    assert structural_similarity(one, 1.0 - one) < -0.5


def test_ssim_of_a_negative_of_one_window() -> None:
    """On 11 x 11 there is one window; the weights are those of a Gaussian of spread 1.5."""
    a, b = PICTURES[0, :1, :11, :11], PICTURES[1, :1, :11, :11]
    places = np.arange(11) - 5
    w = np.exp(-(places[:, None] ** 2 + places[None] ** 2) / (2 * 1.5**2))
    w /= w.sum()
    m, n = np.sum(w * a), np.sum(w * b)
    s, t, c = np.sum(w * (a - m) ** 2), np.sum(w * (b - n) ** 2), np.sum(w * (a - m) * (b - n))
    expected = (2 * m * n + 1e-4) * (2 * c + 9e-4) / ((m * m + n * n + 1e-4) * (s + t + 9e-4))
    assert structural_similarity(a, b) == pytest.approx(expected)


def test_blind_guess_is_the_best_even_grey() -> None:
    original = PICTURES[:1]
    greys = [score_pictures(np.full_like(original, level), original).psnr for level in np.linspace(0, 1, 101)]
    assert max(greys) <= blind_guess(original) + 1e-12
    assert max(greys) == pytest.approx(blind_guess(original), abs=1e-3)


def test_shapes_must_agree() -> None:
    with pytest.raises(ConfigError, match="recovered"):
        score_pictures(PICTURES, PICTURES[:1])
