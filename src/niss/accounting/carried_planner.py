"""Planning a run with carried shares: residual, carried variance and shares within a round, chosen together.

The planner looks for the least noise in the model at the promised mu. What dropped clients had carried stays in it for
good, so it carries less where many drop out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize, minimize_scalar
from scipy.stats import binom

from niss.accounting.carried import COMPLETE, CarriedPlan, Connectivity
from niss.accounting.trusted_noise import BEST_ROUNDS, banded_noise, best_mean_noise, independent_noise
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gdp_mu
from niss.protocol.messages import MODES

FloatArray = NDArray[np.float64]

GOALS = ("mean", "final")
_KAPPAS = tuple(np.geomspace(0.5, 50.0, 17).tolist())
# Stronger shares gain little and make unforeseen dropouts dearer: the least kappa this close to the best.
_GOOD_ENOUGH = 1.01
# Carried variance over residual: from none to more than any plan has used.
_LEAST_RATIO, _MOST_RATIO = 1e-2, 1e3
_NO_GAIN = 0.98
_RARE = 1e-6


@dataclass(frozen=True)
class CarriedForecast:
    """A plan and what it costs. Ratios are variances in the model over those of trusted servers at the same mu.

    separation, carried_to_residual           as in the plan; the ratio is that of all lags together
    kappa                                     shares sent within a round over the noise a client would need alone
    model_variance_ratio_to_central_mean      on average over the rounds, over independent noise of a trusted server
    model_variance_ratio_to_central_final     the same for the final model
    model_variance_ratio_to_best              mean, over the best correlated noise of a trusted server (fixed cyclic
                                              cohorts); None for long runs, where it is not computed
    noise, noise_central, noise_banded        in the model after each round: ours, a trusted server's independent noise,
                                              and its banded square root (BandMF)
    notes                                     what a reader has to know
    """

    plan: CarriedPlan
    mu: float
    separation: int
    carried_to_residual: float
    kappa: float
    model_variance_ratio_to_central_mean: float
    model_variance_ratio_to_central_final: float
    model_variance_ratio_to_best: float | None
    noise: tuple[float, ...]
    noise_central: tuple[float, ...]
    noise_banded: tuple[float, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Numbers and settings, ready for `json.dumps`."""
        return asdict(self)


def plan_carried(
    *,
    participants: int,
    clients: int,
    rounds: int,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    sensitivity: float = 1.0,
    separation: int | None = None,
    pattern: str = "cyclic",
    collusion: float = 0.0,
    dropout: float = 0.0,
    mode: str = "tolerate",
    declared_dropped: int | None = None,
    revealed: float = 0.0,
    kappa: float | None = None,
    carried_to_residual: float | None = None,
    lags: int = 1,
    ends: float = 1.0,
    factors: tuple[float, ...] = (),
    rescaled: bool = False,
    closing: bool = False,
    connectivity: Connectivity = COMPLETE,
    goal: str = "mean",
) -> CarriedForecast:
    """The plan that leaves least noise in the model, for clients that return after `separation` rounds.

    participants, clients  of a round, and altogether; `separation` defaults to how often they fill a round
    rounds                 T, committed
    epsilon, delta         the target of every client over the whole run; `sensitivity` of one upload
    collusion, dropout     shares of the participants
    mode                   `tolerate`: dropped clients leave their shares within the round in the sum; `repair`: not
    declared_dropped       most clients of a round that may be called dropped in a repair; None: more drop out in one
                           round of a million
    revealed               share of the carried variance that repairs may reveal; 0: carried shares are not repaired
    kappa                  shares sent within a round over the noise a client would need alone; None: the cheapest
    carried_to_residual    w / r; None: the best
    lags                   rounds ahead to which noise is carried
    goal                   least noise on average over the rounds (`mean`) or in the last model (`final`)

    The other arguments are those of `CarriedPlan`.

    >>> planned = plan_carried(participants=100, clients=1000, rounds=100)
    >>> planned.separation, round(planned.model_variance_ratio_to_central_mean, 2)
    (10, 0.21)
    """
    for name, value in (("collusion", collusion), ("dropout", dropout)):
        if not 0.0 <= value < 1.0:
            raise ConfigError(
                f"must lie in [0, 1), not {value!r}", field=name, hint="a share of the participants"
            )
    if participants < 2 or clients < participants:
        raise ConfigError(f"needs at least {max(participants, 2)}, not {clients}", field="clients")
    if goal not in GOALS:
        raise ConfigError(f"unknown value {goal!r}", field="goal", hint="use one of: " + ", ".join(GOALS))
    if mode not in MODES:
        raise ConfigError(f"unknown value {mode!r}", field="mode", hint="use one of: " + ", ".join(MODES))
    if lags < 1:
        raise ConfigError(f"must be at least 1, not {lags}", field="lags")
    spread = clients // participants if separation is None else separation
    if spread < 1 or spread > clients // participants:
        raise ConfigError(
            f"{clients} clients fill {clients // participants} rounds of {participants}, so nobody can stay away for "
            f"{spread - 1}",
            field="separation",
            hint="more clients, fewer in a round, or a shorter separation",
        )
    if declared_dropped is None:
        often = min(_RARE, delta)
        declared_dropped = int(binom.isf(often, participants, dropout)) if dropout and mode == "repair" else 0
    draft = CarriedPlan(
        participants=participants,
        horizon=rounds,
        separation=spread,
        residual=1.0,
        carried_to_residual=(0.0,) * lags,
        spatial=0.0,
        pattern=pattern,
        ends=ends,
        factors=factors,
        rescaled=rescaled,
        closing=closing,
        colluders=math.ceil(collusion * participants - 1e-9),
        declared_dropped=declared_dropped,
        revealed=revealed,
        sensitivity=sensitivity,
        connectivity=connectivity,
    )
    mu = gdp_mu(epsilon, delta)
    search = _Search(draft, mu, dropout, mode == "repair", goal)
    ratios = None if carried_to_residual is None else (carried_to_residual, *(0.0,) * (lags - 1))
    chosen = search.at(kappa, ratios) if kappa else search.cheapest(ratios)
    return _forecast(chosen, search)


@dataclass(frozen=True)
class _Search:
    draft: CarriedPlan
    mu: float
    dropout: float
    repaired: bool
    goal: str

    @property
    def alone(self) -> float:
        """sigma_k^2: what a client would add if it stood alone."""
        participations = math.ceil(self.draft.horizon / self.draft.separation)
        return participations * (self.draft.sensitivity / self.mu) ** 2

    def noise(self, plan: CarriedPlan) -> FloatArray:
        return plan.noise_in_model(self.dropout, repaired=self.repaired)[: plan.horizon]

    def objective(self, plan: CarriedPlan) -> float:
        if self.goal == "mean":
            return float(self.noise(plan).mean())
        return float(plan.noise_in_model(self.dropout, repaired=self.repaired)[-1])

    def objective_if_repaired(self, plan: CarriedPlan) -> float:
        return replace(self, repaired=True).objective(plan)

    def fitted(self, kappa: float, ratios: tuple[float, ...]) -> CarriedPlan:
        """The least residual that keeps the promise, at these ratios and shares within a round."""
        shape = replace(self.draft, carried_to_residual=ratios, spatial=2.0 * kappa * self.alone)

        def excess(log_residual: float) -> float:
            return math.log(replace(shape, residual=math.exp(log_residual)).worst.cost) - 2.0 * math.log(
                self.mu
            )

        # Without carrying and without shares the residual of one client's own upload would have to do it all.
        high = math.log(2.0 * self.alone * self.draft.participants)
        low = high - 2.0
        while excess(low) < 0.0:
            low -= 3.0
        if excess(high) > 0.0:
            raise PrivacyError(
                "the shares within a round are too weak for this promise",
                hint="raise kappa, or assume fewer colluders",
            )
        root = float(brentq(excess, low, high, xtol=1e-11))
        while excess(root) > 0.0:
            root += 1e-11
        return replace(shape, residual=math.exp(root))

    def at(self, kappa: float, ratios: tuple[float, ...] | None) -> CarriedPlan:
        """The best plan at this kappa."""
        if ratios is not None:
            return self.fitted(kappa, ratios)
        nothing = self.fitted(kappa, (0.0,) * len(self.draft.carried_to_residual))
        if self.draft.separation == 1:
            return nothing
        bounds = (math.log(_LEAST_RATIO), math.log(_MOST_RATIO))
        rest = (0.0,) * (len(self.draft.carried_to_residual) - 1)

        def along(log_ratio: float) -> float:
            return math.log(self.objective(self.fitted(kappa, (math.exp(log_ratio), *rest))))

        first = float(minimize_scalar(along, bounds=bounds, method="bounded", options={"xatol": 0.02}).x)
        best = self.fitted(kappa, (math.exp(first), *rest))
        if rest:
            start = [first, *(first - 1.0 - lag for lag in range(len(rest)))]
            found = minimize(
                lambda logs: math.log(self.objective(self.fitted(kappa, tuple(np.exp(logs).tolist())))),
                start,
                method="Nelder-Mead",
                options={"xatol": 0.02, "fatol": 1e-4, "maxfev": 60 * len(start)},
            )
            best = min(best, self.fitted(kappa, tuple(np.exp(found.x).tolist())), key=self.objective)
        return min(best, nothing, key=self.objective)

    def cheapest(self, ratios: tuple[float, ...] | None) -> CarriedPlan:
        """The plan at the least kappa that is nearly the best, each with its own carried variance.

        Kappas are compared for cyclic cohorts, which is quicker and hardly matters; the plan is made for the pattern
        that is promised.
        """
        quick = replace(self, draft=replace(self.draft, pattern="cyclic"))
        points = []
        for kappa in _KAPPAS:
            try:
                points.append((kappa, self.objective(quick.at(kappa, ratios))))
            except PrivacyError:
                continue
        if not points:
            raise PrivacyError(
                "no strength of shares keeps this promise",
                hint="assume fewer colluders or fewer revealed edges, or take better connected graphs",
            )
        enough = _GOOD_ENOUGH * min(cost for _, cost in points)
        return self.at(next(kappa for kappa, cost in points if cost <= enough), ratios)


def _forecast(plan: CarriedPlan, search: _Search) -> CarriedForecast:
    scales = plan.scales[: plan.horizon]
    unit = (plan.sensitivity / search.mu) ** 2
    whole = plan.noise_in_model(search.dropout, repaired=search.repaired)
    ours = whole[: plan.horizon]
    central = unit * independent_noise(scales, plan.separation)
    mean = float(ours.mean() / central.mean())
    final = float(whole[-1] / central[-1])
    best = None
    if plan.horizon <= BEST_ROUNDS:
        best = float(ours.mean() / (unit * best_mean_noise(scales, plan.separation)))
    return CarriedForecast(
        plan=plan,
        mu=plan.mu,
        separation=plan.separation,
        carried_to_residual=float(sum(plan.carried_to_residual)),
        kappa=plan.spatial / (2.0 * search.alone),
        model_variance_ratio_to_central_mean=mean,
        model_variance_ratio_to_central_final=final,
        model_variance_ratio_to_best=best,
        noise=tuple(ours.tolist()),
        noise_central=tuple(central.tolist()),
        noise_banded=tuple((unit * banded_noise(scales, plan.separation)).tolist()),
        notes=tuple(_notes(plan, search)),
    )


def _notes(plan: CarriedPlan, search: _Search) -> list[str]:
    notes = []
    if plan.separation == 1:
        notes.append("Everyone takes part in every round: carrying noise to the next round hides nothing.")
    else:
        nothing = search.fitted(plan.spatial / (2.0 * search.alone), (0.0,) * len(plan.carried_to_residual))
        if search.objective(plan) > _NO_GAIN * search.objective(nothing):
            cause = "dropouts leave it in the model" if search.dropout else "the run is too short"
            notes.append(f"Carrying noise gains less than 2 %: {cause}.")
    if not search.repaired and search.objective(plan) > 2.0 * search.objective_if_repaired(plan):
        notes.append(
            "Most of the noise is what dropped clients leave of their shares within a round: repair pays."
        )
    if not plan.worst.exact:
        notes.append("The budget is a safe bound on the costliest pattern, not its exact cost.")
    if plan.horizon > BEST_ROUNDS:
        notes.append(f"The best correlated noise is computed for up to {BEST_ROUNDS} rounds.")
    notes.append(
        "A server that adapts its steps to what it has seen (Adam) keeps the promise but loses the gain."
    )
    return notes
