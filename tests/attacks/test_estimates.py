"""The adversary's estimates are as good as the accountant says, and no better.

Errors of thousands of independent Gaussian coordinates are compared with chi-square limits; every test states the
rate at which it would fail by chance.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from niss.accounting import Plan
from niss.attacks.estimates import (
    Observation,
    best_coordinates,
    estimate_alone,
    estimate_jointly,
    projected_out,
)
from niss.attacks.rounds import SimulatedRound, recovered_fraction, relative_error, simulate_round
from niss.errors import ConfigError
from niss.randomness import SimStream

FALSE_ALARM = 1e-6
CLIENTS, COORDINATES = 12, 8000
PLAN = Plan(neighbours=4.0)
GENERATOR = np.random.default_rng(3)
UPDATES = GENERATOR.normal(size=(CLIENTS, COORDINATES)) / np.sqrt(COORDINATES)
OTHERS = range(1, CLIENTS)
EXAMPLE = Path(__file__).parents[2] / "examples" / "attack_upload.py"


def stage(plan: Plan, colluders: tuple[int, ...] = (), seed: int = 5, **known: object) -> SimulatedRound:
    told: dict[str, object] = {"knows_updates_of": OTHERS, **known}
    return simulate_round(UPDATES, plan, stream=SimStream(seed), colluders=colluders, **told)  # type: ignore[arg-type]


def neighbours_of_victim(plan: Plan, seed: int = 5) -> list[int]:
    return [int(seat) for seat in stage(plan, seed=seed).plan.graph.neighbours(0)]


def assert_variance(errors: np.ndarray, variance: float) -> None:
    """False-alarm rate 1e-6."""
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], errors.size)
    assert low < float(np.sum(errors**2)) / variance < high


def test_updates_are_clipped_before_they_are_hidden() -> None:
    staged = stage(PLAN)
    assert np.linalg.norm(staged.updates, axis=1).max() <= PLAN.clip
    assert np.linalg.norm(UPDATES, axis=1).min() > PLAN.clip
    np.testing.assert_array_equal(stage(replace(PLAN, method="fedavg")).updates, UPDATES)


@pytest.mark.parametrize("method", ["fedavg", "central-dp", "central-dp-sampled", "central-mf"])
def test_a_server_that_is_trusted_sees_everything(method: str) -> None:
    staged = stage(replace(PLAN, method=method))
    guess = estimate_jointly(staged.observation, 0)
    np.testing.assert_allclose(guess.update, staged.updates[0], rtol=1e-9)
    if method == "fedavg":
        alone = estimate_alone(staged.observation, 0)
        np.testing.assert_allclose(alone.update, staged.updates[0], rtol=1e-12)
        assert alone.variance.max() == 0.0


def test_masked_uploads_are_nothing_a_server_sees() -> None:
    with pytest.raises(ConfigError, match="no single one"):
        stage(replace(PLAN, method="secagg-ddg"))


def test_a_prediction_needs_the_factors_that_were_drawn() -> None:
    plan = replace(PLAN, distortion="coordinate", tau2=1.0)
    with pytest.raises(ConfigError, match="not kept"):
        stage(plan).predicted_variance(0)
    assert stage(plan, keep_factors=True).predicted_variance(0) > 0.0


def test_at_tau_0_all_uploads_together_give_the_update_away() -> None:
    staged = stage(replace(PLAN, tau2=0.0))
    assert relative_error(estimate_jointly(staged.observation, 0).update, staged.updates[0]) < 1e-9
    assert relative_error(estimate_alone(staged.observation, 0).update, staged.updates[0]) > 50
    assert staged.predicted_variance(0) == 0.0


def test_updates_that_are_not_known_end_up_in_the_estimate() -> None:
    staged = stage(replace(PLAN, tau2=0.0), knows_updates_of=())
    np.testing.assert_allclose(
        estimate_jointly(staged.observation, 0).update, staged.updates.sum(axis=0), atol=1e-9
    )


@pytest.mark.parametrize(
    ("method", "count"), [("niss", 0), ("dp-fedavg", 0), ("niss", 1), ("niss", 3), ("niss", 6)]
)
def test_both_estimates_have_the_accountants_variances(method: str, count: int) -> None:
    """Rate 2e-6 each, jointly and alone; calibrated, it is the variance the target needs, and colluders lower it."""
    plan = replace(PLAN, method=method)
    staged = stage(plan, tuple(neighbours_of_victim(plan)[:count]))
    guess, alone = (estimate(staged.observation, 0) for estimate in (estimate_jointly, estimate_alone))
    variance = staged.predicted_variance(0) * CLIENTS**2
    np.testing.assert_allclose(guess.variance, variance, rtol=1e-9)
    assert_variance(guess.update - staged.updates[0], variance)
    assert_variance(alone.update - staged.updates[0], float(alone.variance[0]))
    if count:
        assert variance < stage(plan).predicted_variance(0) * CLIENTS**2
    else:
        # Alone, an upload has the paper's 2 sigma_k^2 + eta^2.
        np.testing.assert_allclose(alone.variance, staged.plan.marginal_variance[0] * CLIENTS**2)
        assert variance >= (PLAN.clip / PLAN.round_mu(np.zeros(1, dtype=np.int64))[0]) ** 2 * (1 - 5e-3)


def test_projection_breaks_the_scalar_distortion() -> None:
    """rho = 1, tau = 1: error within 20 % of sqrt(v / h). 30 rounds of 4 shares: 3.6 standard deviations, rate 3e-4."""
    plan = replace(PLAN, distortion="scalar", tau2=1.0)
    squares = []
    for seed in range(30):
        staged = stage(plan, tuple(neighbours_of_victim(plan, seed)), seed)
        guess = estimate_jointly(staged.observation, 0)
        squares.append(relative_error(guess.update, staged.updates[0]) ** 2)
    known = sum(receiver == 0 for _, receiver in staged.observation.known_shares)
    assert known == 4
    assert np.sqrt(np.mean(squares)) == pytest.approx(np.sqrt(known / COORDINATES), rel=0.2)
    plainly = estimate_jointly(staged.observation, 0, exploit=False)
    assert relative_error(plainly.update, staged.updates[0]) > 10


@pytest.mark.parametrize("distortion", ["coordinate", "additive"])
def test_projection_does_nothing_to_the_others(distortion: str) -> None:
    plan = replace(PLAN, distortion=distortion, tau2=1.0)
    staged = stage(plan, tuple(neighbours_of_victim(plan)))
    guess = estimate_jointly(staged.observation, 0)
    assert relative_error(guess.update, staged.updates[0]) > 10
    known = [share for (_, receiver), share in staged.observation.known_shares.items() if receiver == 0]
    projected = projected_out(guess.update, known)
    assert relative_error(projected, staged.updates[0]) > 10


def test_small_known_shares_betray_coordinates_of_the_coordinate_distortion() -> None:
    """Two shares: the trusted 1 % err a tenth as much; sum of two squares, mean of the lowest 1 % is 0.005 of all."""
    sparse = replace(PLAN, neighbours=2.0, tau2=1.0)
    found = {}
    for distortion in ("coordinate", "additive"):
        plan = replace(sparse, distortion=distortion)
        staged = stage(plan, tuple(neighbours_of_victim(plan)))
        guess = estimate_jointly(staged.observation, 0)
        found[distortion] = best_coordinates(guess, staged.updates[0])
        # The adversary knows how wrong it is, coordinate by coordinate (rate 1e-6).
        assert_variance((guess.update - staged.updates[0]) / np.sqrt(guess.variance), 1.0)
    assert found["coordinate"] < 0.15
    assert found["additive"] == pytest.approx(1.0, abs=0.4)


def test_an_observation_holds_no_drawn_factors_and_no_strangers_shares() -> None:
    plan = replace(PLAN, distortion="scalar", tau2=1.0)
    staged = stage(plan)
    seen = staged.observation
    assert staged.plan.scales is not None
    assert seen.plan.scales is None
    with pytest.raises(ConfigError, match="secret"):
        replace(seen, plan=staged.plan)
    with pytest.raises(ConfigError, match="no colluder"):
        replace(seen, known_shares={(0, 1): np.zeros(COORDINATES)})


def test_what_colluders_know_is_what_was_drawn() -> None:
    """At tau = 0 with all neighbours colluding nothing is left but p_k x_k."""
    plan = replace(PLAN, tau2=0.0)
    staged = stage(plan, tuple(neighbours_of_victim(plan)))
    guess = estimate_alone(staged.observation, 0)
    np.testing.assert_allclose(guess.update, staged.updates[0], atol=1e-9)
    ends = staged.observation.known_shares
    assert all(set(pair) & set(staged.observation.colluders) for pair in ends)


def test_victims_must_be_honest_and_there() -> None:
    seen: Observation = stage(PLAN, (3,)).observation
    for victim in (3, -1, CLIENTS):
        with pytest.raises(ConfigError, match="victim"):
            estimate_jointly(seen, victim)


def test_recovered_fraction() -> None:
    truth = GENERATOR.normal(size=40_000)
    assert recovered_fraction(-3.0 * truth, truth) == pytest.approx(1.0)
    noise = GENERATOR.normal(size=truth.size)
    assert recovered_fraction(truth + 2.0 * noise, truth) == pytest.approx(0.2, abs=0.01)
    assert recovered_fraction(np.zeros(truth.size), truth) == 0.0
    assert relative_error(truth + 2.0 * noise, truth) == pytest.approx(2.0, rel=0.02)


def test_the_predicted_fraction_is_what_is_reached() -> None:
    staged = stage(replace(PLAN, tau2=1e-5))
    guess = estimate_jointly(staged.observation, 0)
    reached = recovered_fraction(guess.update, staged.updates[0])
    assert 0.2 < reached < 0.999
    assert reached == pytest.approx(staged.predicted_fraction(0), abs=0.02)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, and prints what the guide says it shows."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    values = {line[:28].strip(): line[28:].split() for line in lines[1:]}
    assert values["tau = 0, all uploads"][2] == "100.0%"
    for hidden in ("tau = 0, one upload alone", "calibrated, all uploads"):
        assert float(values[hidden][2].rstrip("%")) <= 0.1
    for error, predicted, _ in list(values.values())[::2]:
        assert float(error) == pytest.approx(float(predicted), rel=0.05)
