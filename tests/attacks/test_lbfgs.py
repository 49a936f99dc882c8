"""Batched L-BFGS: each row is its own minimisation."""

from __future__ import annotations

import torch
from torch import Tensor

from niss.attacks.inversion import BatchedLbfgs


def rosenbrock(points: Tensor) -> tuple[Tensor, Tensor]:
    at = points.detach().requires_grad_(True)
    values = (1 - at[:, 0]) ** 2 + 100 * (at[:, 1] - at[:, 0] ** 2) ** 2
    (slopes,) = torch.autograd.grad(values.sum(), at)
    return values.detach(), slopes


STARTS = torch.tensor([[-1.2, 1.0], [3.0, -2.0], [0.0, 0.0]], dtype=torch.float64)


def run(starts: Tensor, steps: int) -> BatchedLbfgs:
    search = BatchedLbfgs(rosenbrock, starts)
    for _ in range(steps):
        search.step()
    return search


def test_every_row_finds_the_minimum() -> None:
    search = run(STARTS, 120)
    torch.testing.assert_close(search.points, torch.ones_like(STARTS), atol=1e-6, rtol=0)


def test_rows_do_not_influence_each_other() -> None:
    together = run(STARTS, 15)
    for row in range(3):
        alone = run(STARTS[row : row + 1], 15)
        torch.testing.assert_close(together.points[row], alone.points[0], atol=1e-9, rtol=1e-9)


def test_values_never_rise() -> None:
    search = BatchedLbfgs(rosenbrock, STARTS)
    last = search.values.clone()
    for _ in range(40):
        now = search.step()
        assert bool((now <= last).all())
        last = now.clone()


def test_a_row_without_a_finite_start_is_stuck_and_the_others_go_on() -> None:
    starts = STARTS.clone()
    starts[1] = torch.inf
    search = run(starts, 120)
    assert search.stuck.tolist()[1]
    torch.testing.assert_close(search.points[0], torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_row_at_its_minimum_is_stuck() -> None:
    search = BatchedLbfgs(rosenbrock, torch.ones(1, 2, dtype=torch.float64))
    search.step()
    search.step()
    torch.testing.assert_close(search.points, torch.ones(1, 2, dtype=torch.float64))
