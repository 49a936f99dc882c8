"""Scores of recovered pictures, against values known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from niss.attacks.pictures import (
    best_order,
    blind_guess,
    peak_ratio,
    score_pictures,
    structural_similarity,
)
from niss.errors import ConfigError

GENERATOR = np.random.default_rng(1)
PICTURES = GENERATOR.random((3, 3, 16, 16))


def test_psnr_by_hand() -> None:
    assert peak_ratio(0.01) == pytest.approx(20.0)
    assert peak_ratio(1.0) == 0.0
    assert peak_ratio(0.0) == math.inf
    grey, black = np.full((1, 1, 12, 12), 0.5), np.zeros((1, 1, 12, 12))
    assert score_pictures(grey, black).psnr == pytest.approx(-10 * math.log10(0.25))
    assert score_pictures(grey, black).mse == 0.25


def test_wild_values_count_as_the_edge_of_the_range() -> None:
    white = np.ones((1, 1, 12, 12))
    assert score_pictures(50.0 * white, white).mse == 0.0
    assert score_pictures(-50.0 * white, white).mse == 1.0
    assert score_pictures(np.nan * white, white).mse == 0.25


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
