"""What plans cost: a `PlanForecast` of rounds that are judged one by one, a `CarriedForecast` of a committed run.

The latter is compared with what trusted servers leave in the model, at mu = 1 and sensitivity 1. They may correlate
their noise over the rounds (the matrix mechanism): with `Gamma` the covariance of the noise of T rounds and
`X = Gamma^-1`, a client with participations P has mu^2 = max over unit vectors g_t of `sum_{s,t in P} X_st <g_s, g_t>`,
which is `1' X[P, P] 1` where X has no negative entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting.calibration import CarriedSearch, TradeOff, carrying_nothing, is_drawn, noise_in_the_sum
from niss.accounting.committed import Committed
from niss.accounting.plans import Plan
from niss.claims import rounded_up
from niss.mechanism import gdp_epsilon
from niss.mechanism.noise import banded_root
from niss.methods import marginal_mu
from niss.views import WorstCase

FloatArray = NDArray[np.float64]

# Every step towards the best correlated noise costs T^3, so that longer runs would keep a reader waiting.
BEST_ROUNDS = 200
_NO_GAIN, _LITTLE_GAIN = 0.98, 0.75


@dataclass(frozen=True)
class PlanForecast:
    """A plan and what it costs. Ratios are variances of the sum of all uploads.

    plan                        calibrates tau^2 again for the graph of every round
    sigma                       deviation of the noise a client would need alone, on its upload x_k / participants
    tau2                        what a typical graph needs
    kappa                       strength of the shares
    epsilon_joint               against a server that sees all uploads, with the assumed colluders; None: no guarantee
    epsilon_marginal            of one upload looked at alone, which is what the paper counts
    effective_variance_ratio    the worst-off client's effective variance over sigma^2
    aggregate_variance_ratio_*  noise in the sum, over that of a trusted server (`to_central`) and of DP-FedAvg
                                (`to_local`); `ideal` is what secure aggregation with distributed noise would reach
    dropout_part                how much of it dropped clients leave behind
    mode, recommended_mode      what happens to dropouts, and what would leave less noise
    worst                       the client that decides, and colluders that do the most to it
    found                       the worst colluders that a search found, where one was asked for
    curve                       the noise in the sum over kappa
    notes                       what a reader has to know
    """

    plan: Plan
    participants: int
    sigma: float
    tau2: float
    kappa: float
    neighbours: float
    epsilon_joint: float | None
    epsilon_marginal: float
    effective_variance_ratio: float
    aggregate_variance_ratio_to_central: float
    aggregate_variance_ratio_to_local: float
    aggregate_variance_ratio_ideal: float
    dropout_part: float
    mode: str
    recommended_mode: str
    worst: WorstCase
    found: WorstCase | None
    curve: tuple[TradeOff, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        values = asdict(self)
        values["curve"] = [{**asdict(point), "total": point.total} for point in self.curve]
        for name in ("worst", "found"):
            if values[name] is not None:
                values[name]["colluders"] = len(values[name]["colluders"])
        # With derived seeds nothing is sent; the other two are the paper's ways of sending shares.
        values["bytes_per_client"] = {
            "shares derived from key agreement": 0,
            "shares sent as seeds": 32 * math.ceil(self.neighbours),
            "shares sent as vectors, per parameter": 4 * math.ceil(self.neighbours),
        }
        return values


def round_forecast(
    plan: Plan,
    participants: int,
    tau2: float,
    worst: WorstCase,
    found: WorstCase | None,
    dropout: float,
    modes: tuple[str, str],
    curve: tuple[TradeOff, ...],
) -> PlanForecast:
    """`modes`: the one that was asked for, and the one that leaves less noise."""
    mu = float(plan.round_mu(np.arange(1))[0])
    # Over all participations, in units of the noise a client would need alone.
    whole = mu * math.sqrt(plan.participations)
    noise = noise_in_the_sum(plan.kappa, tau2 * plan.kappa, participants, dropout, modes[0])
    local = (1.0 - dropout) * participants
    return PlanForecast(
        plan=plan,
        participants=participants,
        sigma=float(plan.sensitivity(1.0 / participants, 1.0)) / mu,
        tau2=tau2,
        kappa=plan.kappa,
        neighbours=plan.neighbours,
        epsilon_joint=_epsilon(plan, whole, worst),
        epsilon_marginal=gdp_epsilon(
            float(marginal_mu(whole, unit_variance=plan.kappa, sent=1.0, received=1.0, tau2=tau2)),
            plan.delta,
        ),
        effective_variance_ratio=worst.ratio,
        aggregate_variance_ratio_to_central=noise.total,
        aggregate_variance_ratio_to_local=noise.total / local,
        aggregate_variance_ratio_ideal=1.0 / (1.0 - plan.colluders / participants),
        dropout_part=noise.dropout,
        mode=modes[0],
        recommended_mode=modes[1],
        worst=worst,
        found=found,
        curve=curve,
        notes=tuple(_notes(plan, participants, worst, noise, local, modes, found, whole)),
    )


def _epsilon(plan: Plan, mu: float, worst: WorstCase) -> float | None:
    return gdp_epsilon(mu / math.sqrt(worst.ratio), plan.gaussian_delta) if worst.ratio > 0.0 else None


def _notes(
    plan: Plan,
    participants: int,
    worst: WorstCase,
    noise: TradeOff,
    local: float,
    modes: tuple[str, str],
    found: WorstCase | None,
    mu: float,
) -> Iterator[str]:
    if noise.total >= local:
        binding = "collusion"
        if noise.dropout > noise.residual:
            binding = "the dropout rate"
        elif worst.colluders and plan.graph == "regular":
            binding = "collusion among few neighbours"
        yield f"No gain over DP-FedAvg: {binding} leaves as much noise."
    if modes[0] != modes[1]:
        yield f"mode = {modes[1]!r} would leave less noise in the sum than {modes[0]!r} at this dropout rate."
    if not worst.exact and plan.corruption.removed:
        yield "What colluders can do is bounded by a proof that covers every placement, not searched for."
    if plan.graph != "complete" and not is_drawn(participants, plan.neighbours):
        yield (
            "For a round this large the noise is that of the graph to be expected; the graph of every round is "
            "examined when it is drawn."
        )
    if found is not None:
        reached = _epsilon(plan, mu, found)
        shown = "no bound at all" if reached is None else f"epsilon = {rounded_up(reached)}"
        yield f"The worst colluders that a search found reach {shown}."
    if plan.failure:
        where = "neighbours or members of a committee" if plan.committee else "neighbours"
        yield f"{plan.failing_delta:.2g} of delta pays for graphs on which more {where} collude than assumed."


@dataclass(frozen=True)
class CarriedForecast:
    """A plan and what it costs. Ratios are variances in the model over those of trusted servers at the same mu.

    plan                                      in units of the squared `sensitivity` of one upload
    clients, epsilon, delta, dropout, mode    as asked
    participations                            the most of one client
    separation, carried_to_residual           as in the plan
    kappa                                     shares sent within a round over the noise a client would need alone
    model_variance_ratio_to_central_mean      on average over the rounds, over independent noise of a trusted server
    model_variance_ratio_to_central_final     the same for the final model
    model_variance_ratio_to_best              mean, over the best correlated noise of a trusted server (fixed cyclic
                                              cohorts); None for long runs, where it is not computed
    noise, noise_central, noise_banded        in the model after each round: ours, a trusted server's independent noise,
                                              and its banded square root (BandMF)
    noise_best                                the same of the best correlated noise; None where it is not computed
    notes                                     what a reader has to know
    """

    plan: Committed
    sensitivity: float
    clients: int
    epsilon: float
    delta: float
    dropout: float
    mode: str
    mu: float
    participations: int
    separation: int
    carried_to_residual: float
    kappa: float
    model_variance_ratio_to_central_mean: float
    model_variance_ratio_to_central_final: float
    model_variance_ratio_to_best: float | None
    noise: tuple[float, ...]
    noise_central: tuple[float, ...]
    noise_banded: tuple[float, ...]
    noise_best: tuple[float, ...] | None
    notes: tuple[str, ...]

    @property
    def residual(self) -> float:
        """Variance of the fresh noise in the sum of a round."""
        return self.plan.noise.participants * self.plan.noise.residual * self.sensitivity**2

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        return asdict(self)


def carried_forecast(
    run: Committed,
    search: CarriedSearch,
    sensitivity: float,
    asked: dict[str, Any],
) -> CarriedForecast:
    """What the run that a search chose costs; `asked` are the fields of the forecast that were given."""
    scale, unit = sensitivity**2, (sensitivity / search.mu) ** 2
    whole = scale * run.noise_in_model(search.dropout, repaired=search.repaired)
    ours = whole[: run.horizon]
    central = unit * independent_noise(run.horizon, run.separation)
    best = unit * best_noise(run.horizon, run.separation) if run.horizon <= BEST_ROUNDS else None
    return CarriedForecast(
        plan=run,
        sensitivity=sensitivity,
        **asked,
        mu=run.mu,
        participations=math.ceil(run.horizon / run.separation),
        separation=run.separation,
        carried_to_residual=run.noise.carried / run.noise.residual,
        kappa=run.noise.spatial / (2.0 * search.alone),
        model_variance_ratio_to_central_mean=float(ours.mean() / central.mean()),
        model_variance_ratio_to_central_final=float(whole[-1] / central[-1]),
        model_variance_ratio_to_best=None if best is None else float(ours.mean() / best.mean()),
        noise=tuple(ours.tolist()),
        noise_central=tuple(central.tolist()),
        noise_banded=tuple((unit * banded_noise(run.horizon, run.separation)).tolist()),
        noise_best=None if best is None else tuple(best.tolist()),
        notes=tuple(_carried_notes(run, search)),
    )


def _carried_notes(run: Committed, search: CarriedSearch) -> list[str]:
    notes = []
    if run.separation == 1:
        notes.append("Everyone takes part in every round: carrying noise to the next round hides nothing.")
    else:
        nothing = carrying_nothing(search, run.noise.spatial / (2.0 * search.alone))
        left = search.objective(run) / search.objective(nothing)
        cause = "the run is short"
        if search.dropout:
            taken_out = search.repaired and run.noise.dropped
            cause = "repairs may reveal much of it" if taken_out else "dropouts leave it in the model"
        if left > _NO_GAIN:
            notes.append(f"Carrying noise gains less than 2 %: {cause}.")
        elif left > _LITTLE_GAIN:
            notes.append(f"Carrying noise takes only {100.0 * (1.0 - left):.0f} % of it out: {cause}.")
    if not search.repaired and search.objective(run) > 2.0 * search.objective_if_repaired(run):
        notes.append(
            "Most of the noise is what dropped clients leave of their shares within a round: repair pays."
        )
    if not run.worst.exact:
        notes.append("The budget is a safe bound on the costliest pattern, not its exact cost.")
    if run.horizon > BEST_ROUNDS:
        notes.append(f"The best correlated noise is computed for up to {BEST_ROUNDS} rounds.")
    notes.append(
        "A server that adapts its steps to what it has seen (Adam) keeps the promise but loses the gain."
    )
    return notes


def independent_noise(rounds: int, separation: int) -> FloatArray:
    """Noise variance in the model after each round: independent noise, equal in every round."""
    return np.asarray(math.ceil(rounds / separation) * np.arange(1.0, rounds + 1.0))


def banded_noise(rounds: int, separation: int) -> FloatArray:
    """The same with the truncated square root (BandMF, `mechanism.noise.BandedRoot`), `separation` bands."""
    root = banded_root(rounds, separation)
    return root.worst_client * root.model_variance


def best_noise(rounds: int, separation: int) -> FloatArray:
    """No correlated noise of a trusted server leaves less than this, on average over the rounds (fixed cyclic cohorts).

    The least `tr(S X^-1)` over X with sensitivity at most 1, `S = A'A / T` and A the sums over rounds. By duality it is
    at least

        (tr (S^1/2 U S^1/2)^1/2)^2 / sum_o lambda_o,       U = blocks lambda_o R_o, R_o a correlation matrix,

    one block for each cohort's rounds, and equal at the best U, since the problem is convex. Every U gives a bound, so
    the mean of what is returned is never above the truth; it is found by ascent over `R_o = F F'` with unit rows. The
    noise that belongs to U is `X^-1 = S^-1/2 (S^1/2 U S^1/2)^1/2 S^-1/2`.
    """
    from scipy.optimize import minimize

    sums = np.tril(np.ones((rounds, rounds)))
    values, vectors = np.linalg.eigh(sums.T @ sums / rounds)
    root = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    # A = turn S^1/2, with orthogonal columns.
    turn = sums @ (vectors / np.sqrt(values) @ vectors.T)
    cohort = np.arange(rounds) % separation
    same = cohort[:, None] == cohort
    width = math.ceil(rounds / separation)

    def spectrum_at(point: FloatArray) -> tuple[FloatArray, ...]:
        logs, rows = point[:separation], point[separation:].reshape(rounds, width)
        lengths = np.linalg.norm(rows, axis=1)
        unit = rows / lengths[:, None]
        shares = np.exp(logs - logs.max())
        shares /= shares.sum()
        blocks = np.where(same, unit @ unit.T, 0.0)
        spectrum, basis = np.linalg.eigh(root @ (shares[cohort][:, None] * blocks) @ root)
        return np.sqrt(np.maximum(spectrum, 1e-26 * spectrum[-1])), basis, shares, blocks, unit, lengths

    def dual(point: FloatArray) -> tuple[float, FloatArray]:
        spectrum, basis, shares, blocks, unit, lengths = spectrum_at(point)
        weights = shares[cohort]
        total = float(spectrum.sum())
        # Half the gradient of the trace in U; weights are constant within a block.
        slope = root @ (basis / spectrum @ basis.T) @ root / 2.0 * same
        by_row = weights[:, None] * 2.0 * (slope @ unit)
        by_row -= np.sum(by_row * unit, axis=1)[:, None] * unit
        by_cohort = np.bincount(cohort, weights=np.sum(slope * blocks, axis=1), minlength=separation)
        by_log = shares * (by_cohort - float(shares @ by_cohort))
        gradient = np.concatenate([by_log, (by_row / lengths[:, None]).reshape(-1)])
        return -math.log(total), -gradient / total

    start = np.eye(width)[np.arange(rounds) // separation] + 0.3 / math.sqrt(width)
    found = minimize(
        dual,
        np.concatenate([np.zeros(separation), start.reshape(-1)]),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 400, "ftol": 1e-9, "gtol": 1e-7},
    )
    spectrum, basis, *_ = spectrum_at(found.x)
    return np.asarray(spectrum.sum() * ((turn @ basis) ** 2 @ spectrum))
