"""DLG and Inverting Gradients: they succeed without noise and fail at the noise of the default plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from niss.accounting import Plan
from niss.attacks.estimates import estimate_alone, estimate_jointly
from niss.attacks.federation import AttackedFederation, load_pictures, make_federation
from niss.attacks.inversion import (
    BatchedLbfgs,
    DeepLeakage,
    Inversion,
    InvertingGradients,
    Search,
    total_variation,
)
from niss.attacks.pictures import blind_guess, score_pictures
from niss.attacks.rounds import SimulatedRound, simulate_round
from niss.randomness import SimStream

FEW = DeepLeakage(iterations=400, restarts=2, good_enough=1e-8)
BRIEF = DeepLeakage(iterations=3, restarts=1)
BARE = Plan(method="fedavg")


def search(
    scene: AttackedFederation,
    chosen: Search,
    update: np.ndarray | None = None,
    plan: Plan | None = BARE,
    **options: Any,
) -> Inversion:
    """The search on the victim's bare update, or on a guess of it."""
    seen = scene.as_gradient(scene.updates[0] if update is None else update)
    stream = SimStream(2 if isinstance(chosen, DeepLeakage) else 3)
    return chosen.invert(seen, scene.update_function(plan), scene.pictures, stream=stream, **options)


def stage(scene: AttackedFederation, plan: Plan) -> SimulatedRound:
    known = range(1, len(scene.updates))
    return simulate_round(scene.updates, plan, stream=SimStream(1), knows_updates_of=known)


def psnr(found: Inversion, scene: AttackedFederation) -> float:
    return score_pictures(found.pictures, scene.pictures.pixels).psnr


def labels_of(scene: AttackedFederation) -> list[int]:
    return sorted(scene.pictures.labels.tolist())


def scene_of(model: str, seed: int, batch: int = 1, **options: Any) -> AttackedFederation:
    pictures = load_pictures("mnist-mini:0", count=batch)
    return make_federation(pictures, model=model, clients=2, stream=SimStream(seed), **options)


@pytest.mark.parametrize("method", ["fedavg", "dp-fedavg"])
def test_noise_free_dlg_recovers_the_picture_and_its_label(
    lenet_federation: AttackedFederation, method: str
) -> None:
    """Clipped or not: the adversary imitates the clip."""
    plan = Plan(method=method)
    found = search(lenet_federation, FEW, stage(lenet_federation, plan).updates[0], plan)
    assert psnr(found, lenet_federation) > 40
    assert found.labels.tolist() == labels_of(lenet_federation)
    assert found.losses[-1] < 1e-4 * found.losses[0]


@pytest.mark.parametrize(
    ("plan", "recovered"),
    [
        (Plan(method="dp-fedavg"), {estimate_alone: False, estimate_jointly: False}),
        (Plan(), {estimate_alone: False, estimate_jointly: False}),
        (Plan(tau2=0.0), {estimate_alone: False, estimate_jointly: True}),
    ],
    ids=["dp-fedavg", "niss", "tau = 0"],
)
def test_dlg_fails_at_the_default_noise_and_at_tau_0_in_the_marginal_view_alone(
    lenet_federation: AttackedFederation, plan: Plan, recovered: dict[Callable[..., Any], bool]
) -> None:
    seen = stage(lenet_federation, plan).observation
    for estimate, succeeds in recovered.items():
        settings = FEW if succeeds else replace(FEW, iterations=120, good_enough=1e-10)
        found = psnr(search(lenet_federation, settings, estimate(seen, 0).update, plan), lenet_federation)
        assert found > 40 if succeeds else found < 10


def test_the_same_seed_gives_the_same_pictures(lenet_federation: AttackedFederation) -> None:
    runs = [search(lenet_federation, DeepLeakage(iterations=5, restarts=2)) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].pictures, runs[1].pictures)
    assert runs[0].losses == runs[1].losses
    assert len(runs[0].losses) == 5
    assert runs[0].frames[-1][0] == 5


def test_it_stops_where_nothing_moves_and_where_the_gradient_fits(
    lenet_federation: AttackedFederation,
) -> None:
    impatient = DeepLeakage(iterations=200, restarts=2, patience=10, least_progress=0.999)
    still = search(lenet_federation, impatient)
    assert still.stopped == "nothing moves any more"
    assert len(still.losses) < 100
    fits = search(lenet_federation, DeepLeakage(iterations=200, restarts=2, good_enough=0.1))
    assert fits.stopped == "the gradient fits"
    assert fits.losses[-1] < 0.1 * fits.losses[0] * 10
    assert len(fits.losses) < 200


@pytest.mark.parametrize("settings", [BRIEF, InvertingGradients(iterations=3, restarts=1)])
def test_progress_is_told_every_iteration_and_a_search_computes_with_one_thread(
    mlp_federation: AttackedFederation, settings: Search
) -> None:
    """Whatever the process may use: more threads make small steps slower."""
    heard: list[tuple[int, int, int]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        search(
            mlp_federation,
            settings,
            progress=lambda done, total, _note: heard.append((done, total, torch.get_num_threads())),
        )
        assert heard == [(1, 3, 1), (2, 3, 1), (3, 3, 1)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_two_pictures_at_once() -> None:
    scene = scene_of("lenet", 7, batch=2)
    found = search(scene, DeepLeakage(iterations=400, restarts=1))
    assert psnr(found, scene) > 25
    assert sorted(found.labels.tolist()) == labels_of(scene)


def test_inverting_a_relu_model(mlp_federation: AttackedFederation) -> None:
    settings, clipped = InvertingGradients(iterations=300, restarts=1), 0.02 * mlp_federation.updates[0]
    found = search(mlp_federation, settings, clipped, Plan())
    assert psnr(found, mlp_federation) > 30
    assert found.labels.tolist() == labels_of(mlp_federation)
    assert found.pictures.min() >= 0.0
    assert found.pictures.max() <= 1.0


def test_inverting_several_steps_on_a_batch() -> None:
    scene = scene_of("mlp", 5, batch=2, hidden=(64,), steps=3)
    found = search(scene, InvertingGradients(iterations=250, restarts=1), plan=None)
    assert psnr(found, scene) > 25
    assert found.labels.tolist() == labels_of(scene)


def test_inverting_fails_at_the_noise_of_the_default_plan(mlp_federation: AttackedFederation) -> None:
    """Total variation and the box make the noise look smooth, which is no better than an even grey."""
    guess = estimate_alone(stage(mlp_federation, Plan()).observation, 0).update
    found = search(mlp_federation, InvertingGradients(iterations=120, restarts=1), guess, Plan())
    assert psnr(found, mlp_federation) < blind_guess(mlp_federation.pictures.pixels) + 1.0


@pytest.mark.slow
def test_inverting_the_cnn() -> None:
    scene = scene_of("cnn", 5)
    assert psnr(search(scene, InvertingGradients(iterations=250, restarts=2), plan=None), scene) > 30


def test_total_variation_by_hand() -> None:
    flat, steps = torch.zeros(1, 1, 1, 4, 4), torch.arange(4.0).expand(1, 1, 1, 4, 4)
    assert total_variation(flat).tolist() == [0.0]
    assert total_variation(steps).tolist() == [1.0]


# Batched L-BFGS: each row is its own minimisation.


def rosenbrock(points: Tensor) -> tuple[Tensor, Tensor]:
    at = points.detach().requires_grad_(True)
    values = (1 - at[:, 0]) ** 2 + 100 * (at[:, 1] - at[:, 0] ** 2) ** 2
    (slopes,) = torch.autograd.grad(values.sum(), at)
    return values.detach(), slopes


STARTS = torch.tensor([[-1.2, 1.0], [3.0, -2.0], [0.0, 0.0]], dtype=torch.float64)


def minimised(starts: Tensor, steps: int) -> BatchedLbfgs:
    lbfgs = BatchedLbfgs(rosenbrock, starts)
    for _ in range(steps):
        lbfgs.step()
    return lbfgs


def test_every_row_finds_the_minimum_and_values_never_rise() -> None:
    lbfgs = BatchedLbfgs(rosenbrock, STARTS)
    last = lbfgs.values.clone()
    for _ in range(120):
        now = lbfgs.step()
        assert bool((now <= last).all())
        last = now.clone()
    torch.testing.assert_close(lbfgs.points, torch.ones_like(STARTS), atol=1e-6, rtol=0)


def test_rows_do_not_influence_each_other() -> None:
    together = minimised(STARTS, 15)
    for row in range(3):
        alone = minimised(STARTS[row : row + 1], 15)
        torch.testing.assert_close(together.points[row], alone.points[0], atol=1e-9, rtol=1e-9)


def test_a_row_without_a_finite_start_is_stuck_and_the_others_go_on() -> None:
    starts = STARTS.clone()
    starts[1] = torch.inf
    lbfgs = minimised(starts, 120)
    assert lbfgs.stuck.tolist()[1]
    torch.testing.assert_close(lbfgs.points[0], torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_row_at_its_minimum_stays() -> None:
    ones = torch.ones(1, 2, dtype=torch.float64)
    torch.testing.assert_close(minimised(ones, 2).points, ones)
