"""Planning a run with carried shares: residual, carried variance and shares within a round, chosen together.

The planner looks for the least noise in the model at the promised mu. Unless it is repaired, what dropped clients had
carried stays in it for good, so it carries less where many drop out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from niss.accounting.carried import COMPLETE, CarriedPlan, Connectivity
from niss.accounting.carried_fit import ResidualFit, safely_within
from niss.accounting.targets import GRID_SHARE, RELATIONS, check_target, client_sensitivity, most_dropped
from niss.accounting.trusted_noise import BEST_ROUNDS, banded_noise, best_noise, independent_noise
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gdp_mu

FloatArray = NDArray[np.float64]

GOALS = ("mean", "final")
_KAPPAS = tuple(np.geomspace(0.5, 50.0, 17).tolist())
# Stronger shares gain little and make unforeseen dropouts dearer: the least kappa this close to the best.
_GOOD_ENOUGH = 1.01
# Carried variance over residual: from none to more than any plan has used.
_LEAST_RATIO, _MOST_RATIO = 1e-2, 1e3
_NO_GAIN, _LITTLE_GAIN = 0.98, 0.75


@dataclass(frozen=True)
class CarriedForecast:
    """A plan and what it costs. Ratios are variances in the model over those of trusted servers at the same mu.

    clients, epsilon, delta, dropout, mode    as asked
    participations                            the most of one client
    separation, carried_to_residual           as in the plan; the ratio is that of all lags together
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

    plan: CarriedPlan
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
    progress: Callable[[str], None] | None = None,
) -> CarriedForecast:
    """The plan that leaves least noise in the model, for clients that return after `separation` rounds.

    participants, clients  of a round, and altogether; `separation` defaults to how often they fill a round
    rounds                 T, committed
    epsilon, delta         the target of every client over the whole run; `sensitivity` of one upload
    collusion, dropout     shares of the participants
    mode                   `tolerate`: dropped clients leave their shares in the sum; `repair`: they are taken out again
    declared_dropped       most clients of a round that may be called dropped in a repair; None: more drop out in one
                           round of a million; 0: carried shares are not repaired
    revealed               share of the carried variance that repairs may reveal besides
    kappa                  shares sent within a round over the noise a client would need alone; None: the cheapest
    carried_to_residual    w / r; None: the best
    lags                   rounds ahead to which noise is carried
    goal                   least noise on average over the rounds (`mean`) or in the last model (`final`)

    progress               is told in a few words what is being computed

    The other arguments are those of `CarriedPlan`.

    >>> planned = plan_carried(participants=100, clients=1000, rounds=100)
    >>> planned.separation, round(planned.model_variance_ratio_to_central_mean, 2)
    (10, 0.21)
    """
    say = progress or (lambda _: None)
    check_target(
        participants=participants,
        epsilon=epsilon,
        collusion=collusion,
        dropout=dropout,
        mode=mode,
        kappa=kappa,
    )
    for name, count in (("rounds", rounds), ("lags", lags)):
        if count < 1:
            raise ConfigError(f"must be at least 1, not {count}", field=name)
    if goal not in GOALS:
        raise ConfigError(f"unknown value {goal!r}", field="goal", hint="use one of: " + ", ".join(GOALS))
    spread = _separation(participants, clients, separation, pattern)
    if declared_dropped is None:
        declared_dropped = most_dropped(participants, dropout, delta) if mode == "repair" else 0
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
    chosen = search.at(kappa, ratios) if kappa else search.cheapest(ratios, say)
    say("comparing with trusted servers")
    asked = {"clients": clients, "epsilon": epsilon, "delta": delta, "dropout": dropout, "mode": mode}
    return _forecast(safely_within(chosen, mu**2), search, asked)


def forecast_carried(
    *,
    participants: int,
    clients: int,
    rounds: int,
    clip: float = 1.0,
    epsilon: float = 3.0,
    delta: float = 1e-5,
    collusion: float = 0.0,
    dropout: float = 0.0,
    mode: str = "tolerate",
    kappa: float | None = None,
    relation: str = "zero-out",
    lags: int = 1,
    pattern: str = "cyclic",
    progress: Callable[[str], None] | None = None,
) -> CarriedForecast:
    """`plan_carried` for what a user knows: the clip on updates, what is hidden, and the whole of delta.

    An upload is `x_k / participants`, so variances are those of the average. As in every plan that a protocol can run,
    a part of delta is kept for noise on a grid. The other arguments are those of `plan_carried` and of `forecast`.

    >>> planned = forecast_carried(participants=100, clients=1000, rounds=100, collusion=0.2)
    >>> planned.plan.colluders, round(planned.model_variance_ratio_to_central_mean, 2)
    (20, 0.3)
    """
    if relation not in RELATIONS:
        raise ConfigError(
            f"unknown value {relation!r}", field="relation", hint="use one of: " + ", ".join(RELATIONS)
        )
    if not (math.isfinite(clip) and clip > 0.0):
        raise ConfigError(f"must be a finite number above 0, not {clip!r}", field="clip")
    # What is no target is refused in the caller's own numbers.
    gdp_mu(epsilon, delta)
    planned = plan_carried(
        participants=participants,
        clients=clients,
        rounds=rounds,
        epsilon=epsilon,
        delta=(1.0 - GRID_SHARE) * delta,
        sensitivity=float(client_sensitivity(1.0 / max(participants, 1), clip, relation)),
        pattern=pattern,
        collusion=collusion,
        dropout=dropout,
        mode=mode,
        kappa=kappa,
        lags=lags,
        progress=progress,
    )
    return replace(planned, delta=delta)


def _separation(participants: int, clients: int, asked: int | None, pattern: str) -> int:
    """How many rounds clients stay away for, and one more."""
    if clients < participants:
        raise ConfigError(
            f"{clients} clients cannot fill a round of {participants}",
            field="clients",
            hint="more clients, or fewer in a round",
        )
    filled = clients // participants
    if asked is None and pattern == "cyclic" and clients % participants:
        raise ConfigError(
            f"{clients} clients do not make whole cohorts of {participants}",
            field="clients",
            hint=f"plan for {filled * participants} or {(filled + 1) * participants} clients, or let them come back "
            f'in any pattern at least {filled} rounds apart (pattern "any")',
        )
    spread = filled if asked is None else asked
    if not 1 <= spread <= filled:
        raise ConfigError(
            f"{clients} clients fill {filled} rounds of {participants}, so nobody can stay away for {spread - 1}",
            field="separation",
            hint="more clients, fewer in a round, or a shorter separation",
        )
    return spread


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
        fit = ResidualFit(replace(self.draft, carried_to_residual=ratios))
        # Without carrying and without shares the residual of one client's own upload would have to do it all.
        highest = 2.0 * self.alone * self.draft.participants
        return fit.fitted(self.mu**2, 2.0 * kappa * self.alone, highest)

    def at(self, kappa: float, ratios: tuple[float, ...] | None) -> CarriedPlan:
        """The best plan at this kappa.

        The carried variance is chosen for cyclic cohorts, which is quick. For any pattern at that separation another
        choice gained less than 0.1 % in the eight settings in which both were computed.
        """
        if ratios is not None:
            return self.fitted(kappa, ratios)
        nothing = _carrying_nothing(self, kappa)
        if self.draft.separation == 1:
            return nothing
        best = self.cyclic._carrying(kappa)
        if self.draft.pattern != "cyclic":
            best = self.fitted(kappa, best.carried_to_residual)
        return min(best, nothing, key=self.objective)

    def _carrying(self, kappa: float) -> CarriedPlan:
        lags = len(self.draft.carried_to_residual)
        bounds = (math.log(_LEAST_RATIO), math.log(_MOST_RATIO))
        best = self._along(kappa, lambda log: math.exp(log) * (np.arange(lags) == 0), bounds)
        if lags == 1:
            return best
        # Imported here and below because it takes longer than other plans do.
        from scipy.optimize import minimize

        first = math.log(best.carried_to_residual[0])
        found = minimize(
            lambda logs: math.log(self.objective(self.fitted(kappa, tuple(np.exp(logs).tolist())))),
            [first, *(first - 1.0 - lag for lag in range(lags - 1))],
            method="Nelder-Mead",
            options={"xatol": 0.02, "fatol": 1e-4, "maxfev": 60 * lags},
        )
        return min(best, self.fitted(kappa, tuple(np.exp(found.x).tolist())), key=self.objective)

    def _along(
        self, kappa: float, ratios: Callable[[float], FloatArray], bounds: tuple[float, float]
    ) -> CarriedPlan:
        """The best plan on a line of ratios."""
        from scipy.optimize import minimize_scalar

        def plan(log_ratio: float) -> CarriedPlan:
            return self.fitted(kappa, tuple(ratios(log_ratio).tolist()))

        found = minimize_scalar(
            lambda log: math.log(self.objective(plan(log))),
            bounds=bounds,
            method="bounded",
            options={"xatol": 0.02},
        )
        return plan(float(found.x))

    @property
    def cyclic(self) -> _Search:
        return replace(self, draft=replace(self.draft, pattern="cyclic"))

    def cheapest(self, ratios: tuple[float, ...] | None, say: Callable[[str], None]) -> CarriedPlan:
        """The plan at the least kappa that is nearly the best, each with its own carried variance.

        Kappas are compared for cyclic cohorts and one lag, which is quicker and hardly matters; the plan is made for
        the pattern and the lags that were asked for.
        """
        quick = self.cyclic
        if ratios is None:
            quick = replace(quick, draft=replace(quick.draft, carried_to_residual=(0.0,)))
        points = []
        for kappa in _KAPPAS:
            say(f"trying shares of strength {kappa:.3g}")
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
        chosen = next(kappa for kappa, cost in points if cost <= enough)
        say(f"choosing what to carry at strength {chosen:.3g}")
        return self.at(chosen, ratios)


@lru_cache(maxsize=2)
def _carrying_nothing(search: _Search, kappa: float) -> CarriedPlan:
    """The plan at this kappa that carries no noise on; asked for again when the gain is stated."""
    return search.fitted(kappa, (0.0,) * len(search.draft.carried_to_residual))


def _forecast(plan: CarriedPlan, search: _Search, asked: dict[str, Any]) -> CarriedForecast:
    scales = plan.scales[: plan.horizon]
    unit = (plan.sensitivity / search.mu) ** 2
    whole = plan.noise_in_model(search.dropout, repaired=search.repaired)
    ours = whole[: plan.horizon]
    central = unit * independent_noise(scales, plan.separation)
    best = unit * best_noise(scales, plan.separation) if plan.horizon <= BEST_ROUNDS else None
    return CarriedForecast(
        plan=plan,
        **asked,
        mu=plan.mu,
        participations=math.ceil(plan.horizon / plan.separation),
        separation=plan.separation,
        carried_to_residual=float(sum(plan.carried_to_residual)),
        kappa=plan.spatial / (2.0 * search.alone),
        model_variance_ratio_to_central_mean=float(ours.mean() / central.mean()),
        model_variance_ratio_to_central_final=float(whole[-1] / central[-1]),
        model_variance_ratio_to_best=None if best is None else float(ours.mean() / best.mean()),
        noise=tuple(ours.tolist()),
        noise_central=tuple(central.tolist()),
        noise_banded=tuple((unit * banded_noise(scales, plan.separation)).tolist()),
        noise_best=None if best is None else tuple(best.tolist()),
        notes=tuple(_notes(plan, search)),
    )


def _notes(plan: CarriedPlan, search: _Search) -> list[str]:
    notes = []
    if plan.separation == 1:
        notes.append("Everyone takes part in every round: carrying noise to the next round hides nothing.")
    else:
        nothing = _carrying_nothing(search, plan.spatial / (2.0 * search.alone))
        left = search.objective(plan) / search.objective(nothing)
        cause = "the run is short"
        if search.dropout:
            taken_out = search.repaired and plan.declared_dropped
            cause = "repairs may reveal much of it" if taken_out else "dropouts leave it in the model"
        if left > _NO_GAIN:
            notes.append(f"Carrying noise gains less than 2 %: {cause}.")
        elif left > _LITTLE_GAIN:
            notes.append(f"Carrying noise takes only {100.0 * (1.0 - left):.0f} % of it out: {cause}.")
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
