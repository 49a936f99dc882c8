"""DLG and Inverting Gradients: they succeed without noise and fail at the noise of the default plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niss.accounting import Plan
from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.federation import AttackedFederation, make_federation
from niss.attacks.inversion import (
    DlgSettings,
    Inversion,
    InvertSettings,
    deep_leakage,
    invert_update,
    total_variation,
)
from niss.attacks.pictures import blind_guess, load_pictures, score_pictures
from niss.attacks.rounds import simulate_round
from niss.errors import ConfigError
from niss.randomness import SimStream

FEW = DlgSettings(iterations=400, restarts=2, good_enough=1e-8)


def leak(scene: AttackedFederation, update: np.ndarray, plan: Plan, settings: DlgSettings = FEW) -> Inversion:
    return deep_leakage(
        scene.as_gradient(update), scene.update_function(plan), scene.pictures, settings, stream=SimStream(2)
    )


def psnr(found: Inversion, scene: AttackedFederation) -> float:
    return score_pictures(found.pictures, scene.pictures.pixels).psnr


@pytest.mark.parametrize("method", ["fedavg", "dp-fedavg"])
def test_noise_free_dlg_recovers_the_picture_and_its_label(
    lenet_federation: AttackedFederation, method: str
) -> None:
    """Clipped or not: the adversary imitates the clip."""
    plan = Plan(method=method)
    staged = simulate_round(
        lenet_federation.updates, lenet_federation.weights.numpy(), plan, stream=SimStream(1)
    )
    found = leak(lenet_federation, staged.updates[0], plan)
    assert psnr(found, lenet_federation) > 40
    assert found.labels.tolist() == lenet_federation.pictures.labels.tolist()
    assert found.losses[-1] < 1e-4 * found.losses[0]


@pytest.mark.parametrize("method", ["dp-fedavg", "niss"])
def test_dlg_fails_at_the_noise_of_the_default_plan(
    lenet_federation: AttackedFederation, method: str
) -> None:
    plan = Plan(method=method)
    staged = simulate_round(
        lenet_federation.updates,
        lenet_federation.weights.numpy(),
        plan,
        stream=SimStream(1),
        knows_updates_of=range(1, 12),
    )
    brief = DlgSettings(iterations=120, restarts=2)
    for guess in (estimate_alone, estimate_jointly):
        found = leak(lenet_federation, guess(staged.observation, 0).update, plan, brief)
        assert psnr(found, lenet_federation) < 10


def test_at_tau_0_the_joint_view_recovers_what_the_marginal_view_hides(
    lenet_federation: AttackedFederation,
) -> None:
    plan = Plan(tau2=0.0)
    staged = simulate_round(
        lenet_federation.updates,
        lenet_federation.weights.numpy(),
        plan,
        stream=SimStream(1),
        knows_updates_of=range(1, 12),
    )
    brief = DlgSettings(iterations=60, restarts=2)
    alone = leak(lenet_federation, estimate_alone(staged.observation, 0).update, plan, brief)
    jointly = leak(lenet_federation, estimate_jointly(staged.observation, 0).update, plan)
    assert psnr(alone, lenet_federation) < 10
    assert psnr(jointly, lenet_federation) > 40


def test_the_same_seed_gives_the_same_pictures(lenet_federation: AttackedFederation) -> None:
    short = DlgSettings(iterations=5, restarts=2)
    runs = [
        leak(lenet_federation, lenet_federation.updates[0], Plan(method="fedavg"), short) for _ in range(2)
    ]
    np.testing.assert_array_equal(runs[0].pictures, runs[1].pictures)
    assert runs[0].losses == runs[1].losses
    assert len(runs[0].losses) == 5
    assert runs[0].frames[-1][0] == 5


def test_it_stops_where_nothing_moves_and_where_the_gradient_fits(
    lenet_federation: AttackedFederation,
) -> None:
    plan = Plan(method="fedavg")
    impatient = DlgSettings(iterations=200, restarts=2, patience=10, least_progress=0.999)
    still = leak(lenet_federation, lenet_federation.updates[0], plan, impatient)
    assert still.stopped == "nothing moves any more"
    assert len(still.losses) < 100
    content = DlgSettings(iterations=200, restarts=2, good_enough=0.1)
    fits = leak(lenet_federation, lenet_federation.updates[0], plan, content)
    assert fits.stopped == "the gradient fits"
    assert fits.losses[-1] < 0.1 * fits.losses[0] * 10
    assert len(fits.losses) < 200


def test_progress_is_told_every_iteration(lenet_federation: AttackedFederation) -> None:
    heard: list[tuple[int, int]] = []
    deep_leakage(
        lenet_federation.as_gradient(lenet_federation.updates[0]),
        lenet_federation.update_function(),
        lenet_federation.pictures,
        DlgSettings(iterations=3, restarts=1),
        stream=SimStream(2),
        progress=lambda done, total, _note: heard.append((done, total)),
    )
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_two_pictures_at_once() -> None:
    scene = make_federation(
        load_pictures("mnist-mini:0", count=2), model="lenet", clients=2, stream=SimStream(7)
    )
    found = leak(scene, scene.updates[0], Plan(method="fedavg"), DlgSettings(iterations=400, restarts=1))
    assert psnr(found, scene) > 25
    assert sorted(found.labels.tolist()) == sorted(scene.pictures.labels.tolist())


def test_inverting_a_relu_model(mlp_federation: AttackedFederation) -> None:
    settings = InvertSettings(iterations=300, restarts=1)
    clipped = 0.02 * mlp_federation.updates[0]
    found = invert_update(
        mlp_federation.as_gradient(clipped),
        mlp_federation.update_function(Plan()),
        mlp_federation.pictures,
        settings,
        stream=SimStream(3),
    )
    assert psnr(found, mlp_federation) > 30
    assert found.labels.tolist() == mlp_federation.pictures.labels.tolist()
    assert found.pictures.min() >= 0.0
    assert found.pictures.max() <= 1.0


def test_inverting_several_steps_on_a_batch() -> None:
    scene = make_federation(
        load_pictures("mnist-mini:0", count=2),
        model="mlp",
        hidden=(64,),
        clients=2,
        stream=SimStream(5),
        steps=3,
    )
    found = invert_update(
        scene.as_gradient(scene.updates[0]),
        scene.update_function(),
        scene.pictures,
        InvertSettings(iterations=250, restarts=1),
        stream=SimStream(3),
    )
    assert psnr(found, scene) > 25
    assert found.labels.tolist() == sorted(scene.pictures.labels.tolist())


def test_inverting_fails_at_the_noise_of_the_default_plan(mlp_federation: AttackedFederation) -> None:
    """Total variation and the box make the noise look smooth, which is no better than an even grey."""
    staged = simulate_round(
        mlp_federation.updates, mlp_federation.weights.numpy(), Plan(), stream=SimStream(1)
    )
    found = invert_update(
        mlp_federation.as_gradient(estimate_alone(staged.observation, 0).update),
        mlp_federation.update_function(Plan()),
        mlp_federation.pictures,
        InvertSettings(iterations=120, restarts=1),
        stream=SimStream(3),
    )
    assert psnr(found, mlp_federation) < blind_guess(mlp_federation.pictures.pixels) + 1.0


@pytest.mark.slow
def test_inverting_the_cnn() -> None:
    scene = make_federation(load_pictures("mnist-mini:0"), model="cnn", clients=2, stream=SimStream(5))
    found = invert_update(
        scene.as_gradient(scene.updates[0]),
        scene.update_function(),
        scene.pictures,
        InvertSettings(iterations=250, restarts=2),
        stream=SimStream(3),
    )
    assert psnr(found, scene) > 30


def test_total_variation_by_hand() -> None:
    flat, steps = torch.zeros(1, 1, 1, 4, 4), torch.arange(4.0).expand(1, 1, 1, 4, 4)
    assert total_variation(flat).tolist() == [0.0]
    assert total_variation(steps).tolist() == [1.0]


@pytest.mark.parametrize("name", ["iterations", "restarts"])
def test_settings_are_checked(name: str) -> None:
    for kind in (DlgSettings, InvertSettings):
        with pytest.raises(ConfigError, match=f"--{name}"):
            kind(**{"iterations": 1, "restarts": 1, name: 0})
