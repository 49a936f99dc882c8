"""What holds for every method: what it says of itself agrees with the noise that it adds."""

from __future__ import annotations

import numpy as np
import pytest

from niss.accounting import Plan
from niss.errors import ConfigError
from niss.mechanism import Slots
from niss.methods import (
    DISTORTIONS,
    METHODS,
    CentralDpSampled,
    CentralMf,
    Method,
    NoiseHistory,
    PlainRows,
    SecAggDdg,
    distortion_named,
    marginal_mu,
)
from niss.randomness import SimStream

SIZE, COORDINATES = 6, 4_000


def one_round(name: str, **settings: object):
    plan = Plan(**{"method": name, "neighbours": 5, "graph": "complete", "clip": 1.0, **settings})  # type: ignore[arg-type]
    return plan.for_round(range(SIZE), weights=1.0 / SIZE, records=1.0, beacon=b"b")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_found_by_its_name(name: str) -> None:
    method = METHODS[name]
    assert method.name == name
    plan = Plan(method=name, **method.defaults)
    assert plan.kind is method
    assert method.uses("kappa") == method.uses("tau2") == method.shares_noise
    assert method.trusts
    assert method.adversary(plan)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (SecAggDdg, "threshold", 0),
        (CentralMf, "bands", 0),
        (CentralMf, "strategy", "cubic"),
        (CentralDpSampled, "sampling_probability", 0.0),
        (CentralDpSampled, "sampling_probability", 1.5),
    ],
)
def test_a_methods_own_settings_are_checked(kind: type[Method], field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})
    assert caught.value.field == field
    assert Plan(method=kind()).kind == METHODS[kind.name]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"method: must be .*central-dp.*got 'fedprox'"):
        Plan(method="fedprox")
    with pytest.raises(ConfigError, match="unknown distortion"):
        distortion_named("rotated")
    assert distortion_named(DISTORTIONS["scalar"]) is DISTORTIONS["scalar"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("absent", [(), (1, 4)])
def test_the_noise_is_what_was_predicted(name: str, absent: tuple[int, ...]) -> None:
    planned = one_round(name)
    method, stream = planned.plan.kind, SimStream(7)
    rows = np.zeros((SIZE, COORDINATES))
    drawn = method.add_client_noise(PlainRows(rows), planned, stream)
    marginal = method.marginal_variance(drawn)
    assert np.mean(rows**2, axis=1) == pytest.approx(marginal, rel=0.15)
    total = np.delete(rows, absent, axis=0).sum(axis=0)
    method.add_server_noise(total, drawn, NoiseHistory(lambda number: stream.child("round", number)))
    predicted = method.left_over_variance(drawn.with_lost(absent))
    assert float(np.mean(total**2)) == pytest.approx(predicted, rel=0.15)
    if not absent:
        assert drawn.aggregate_variance == predicted


@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].private])
def test_a_calibrated_method_keeps_its_target(name: str) -> None:
    planned = one_round(name)
    # A target against those who do not know the participants is no budget.
    assert planned.plan.calibrated != planned.plan.kind.secret_draw
    assert planned.joint_mu.max() <= planned.plan.round_mu(planned.participants).max() * (1.0 + 1e-9)


@pytest.mark.parametrize("relation", ["zero-out", "replace-one"])
def test_one_upload_alone_has_one_formula(relation: str) -> None:
    planned = one_round("niss", relation=relation, tau2=0.3)
    alone = marginal_mu(
        planned.sensitivity,
        unit_variance=planned.unit_variance,
        sent=5.0,
        received=5.0,
        residual_variance=planned.residual_variance,
    )
    assert planned.marginal_mu == pytest.approx(alone, rel=1e-12)


def test_rounds_whose_noise_differs_by_rounding_are_accounted_for_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clip that moves leaves multipliers that differ in their last bit, and each of them costs seconds."""
    asked = []
    monkeypatch.setattr(Slots, "epsilon", lambda slots, *_: asked.append(slots.rounds) or 1.0)
    plan = Plan(method="central-dp-sampled")
    z = 0.555751267292031
    noise = [z, np.nextafter(z, 0.0), 2.0 * z, np.nextafter(z, 1.0)]
    METHODS["central-dp-sampled"].epsilon_of_run(plan, noise)
    (((_, one, count), (_, other, _)),) = asked
    assert count == 3
    assert z * (1.0 - 1e-11) < one < min(noise)
    assert other == 2.0 * one


WEIGHTS = (0.5, 0.1, 0.4, 0.3, 0.05, 0.5)


@pytest.mark.parametrize("strategy", ["optimised", "square-root"])
def test_clients_whose_weight_changes_are_charged_at_least_what_they_pay(strategy: str) -> None:
    """One client in every second of six rounds, with less weight at first or later; cost from the whole covariance."""
    method = CentralMf(strategy=strategy)
    plan = Plan(method=method, epsilon=3.0, participations=3, horizon=6, separation=2)
    rounds = [
        plan.for_round([0, 1], weights=[weight, 1.0 - weight], records=1.0, beacon=b"b", number=number)
        for number, weight in enumerate(WEIGHTS)
    ]
    scales = np.array([np.sqrt(method._scale2(one)) for one in rounds])
    noise = method.noise(plan)
    covariance = noise.inverse @ noise.inverse.T
    precision = np.linalg.inv(np.diag(scales) @ covariance @ np.diag(scales))
    for seat in (0, 1):
        for first in (0, 1):
            pattern = np.arange(first, 6, 2)
            moved = np.array([rounds[number].sensitivity[seat] for number in pattern])
            paid = moved @ precision[np.ix_(pattern, pattern)] @ moved
            charged = sum(rounds[number].joint_mu[seat] ** 2 for number in pattern)
            assert paid <= charged * (1.0 + 1e-12)
            assert charged <= plan.budget(1)[0] ** 2 * (1.0 + 1e-9)
