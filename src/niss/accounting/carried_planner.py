"""Planning a run with carried shares: residual, carried variance and shares within a round, chosen together.

The planner looks for the least noise in the model at the promised mu. Unless it is repaired, what dropped clients had
carried stays in it for good, so it carries less where many drop out.

The least residual that keeps a promise is found without inverting anything twice. With the ratio w / r fixed, the
covariance of the sums is `r Gamma_1` and that of deviations `D = r d + s c` (s the shares within a round), so what
fixed cyclic cohorts o pay is

    max_o  A_o / r + sum_{t in o} (1 - 1/h) / (r d_t + s c),     A_o = 1_o' Gamma_1^-1 1_o,

one banded system for all r and s. Plans for any pattern at a separation start from there; a single pattern P is a
cohort like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solveh_banded

from niss.accounting.committed import Committed
from niss.accounting.question import PlanQuestion
from niss.accounting.targets import GRID_SHARE, client_sensitivity, most_dropped
from niss.accounting.trusted_noise import BEST_ROUNDS, banded_noise, best_noise, independent_noise
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import gdp_mu
from niss.mechanism.noise import Noise
from niss.settings import check
from niss.views.roots import find_root

if TYPE_CHECKING:
    from niss.accounting.plans import Plan

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

GOALS = ("mean", "final")
_KAPPAS = tuple(np.geomspace(0.5, 50.0, 17).tolist())
# Stronger shares gain little and make unforeseen dropouts dearer: the least kappa this close to the best.
_GOOD_ENOUGH = 1.01
# Carried variance over residual: from none to more than any plan has used.
_LEAST_RATIO, _MOST_RATIO = 1e-2, 1e3
_NO_GAIN, _LITTLE_GAIN = 0.98, 0.75
_PRECISION, _MOST_STEPS = 1e-11, 50


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
    kappa: float | None = None,
    carried_to_residual: float | None = None,
    closing: bool = False,
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
    kappa                  shares sent within a round over the noise a client would need alone; None: the cheapest
    carried_to_residual    w / r; None: the best
    goal                   least noise on average over the rounds (`mean`) or in the last model (`final`)
    progress               is told in a few words what is being computed

    `pattern` and `closing` are those of `Committed`.

    >>> planned = plan_carried(participants=100, clients=1000, rounds=100)
    >>> planned.separation, round(planned.model_variance_ratio_to_central_mean, 2)
    (10, 0.21)
    """
    say = progress or (lambda _: None)
    check(
        PlanQuestion,
        {
            "participants": participants,
            "epsilon": epsilon,
            "collusion": collusion,
            "dropout": dropout,
            "mode": mode,
            "kappa": kappa,
            "rounds": rounds,
        },
    )
    if goal not in GOALS:
        raise ConfigError(f"unknown value {goal!r}", field="goal", hint="use one of: " + ", ".join(GOALS))
    if carried_to_residual is not None and not 0.0 <= carried_to_residual < math.inf:
        raise ConfigError("must be finite and not negative", field="carried_to_residual")
    if not 0.0 < sensitivity < math.inf:
        raise ConfigError(f"must be a finite number above 0, not {sensitivity!r}", field="sensitivity")
    if declared_dropped is None:
        declared_dropped = most_dropped(participants, dropout, delta) if mode == "repair" else 0
    noise = Noise(
        participants=participants,
        neighbours=participants - 1.0,
        unit=0.0,
        residual=1.0 / participants,
        colluders=math.ceil(collusion * participants - 1e-9),
        dropped=declared_dropped,
    )
    draft = Committed(
        noise=noise,
        horizon=rounds,
        separation=_separation(participants, clients, separation, pattern),
        pattern=pattern,
        closing=closing,
    )
    search = _Search(draft, gdp_mu(epsilon, delta), dropout, mode == "repair", goal)
    ratio = carried_to_residual
    chosen = search.at(kappa, ratio) if kappa else search.cheapest(ratio, say)
    say("comparing with trusted servers")
    asked = {"clients": clients, "epsilon": epsilon, "delta": delta, "dropout": dropout, "mode": mode}
    return _forecast(_safely_within(chosen, search.mu**2), search, sensitivity, asked)


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
    pattern: str = "cyclic",
    progress: Callable[[str], None] | None = None,
) -> CarriedForecast:
    """`plan_carried` for what a user knows: the clip on updates, what is hidden, and the whole of delta.

    An upload is `x_k / participants`, so variances are those of the average. As in every plan that a protocol can run,
    a part of delta is kept for noise on a grid. The other arguments are those of `plan_carried` and of `forecast`.

    >>> planned = forecast_carried(participants=100, clients=1000, rounds=100, collusion=0.2)
    >>> planned.plan.noise.colluders, round(planned.model_variance_ratio_to_central_mean, 2)
    (20, 0.3)
    """
    # What is no target is refused in the caller's own numbers.
    check(
        PlanQuestion,
        {
            "participants": participants,
            "relation": relation,
            "clip": clip,
            "delta": delta,
        },
    )
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
        progress=progress,
    )
    return replace(planned, delta=delta)


@lru_cache(maxsize=64)
def committed_run(plan: Plan, participants: int) -> Committed:
    """What a plan that carries noise commits to for rounds of that size: the run that leaves least noise in the model.

    With tau^2 given there is that much fresh noise instead of what the promise needs, over the shares sent.
    """
    assert not isinstance(plan.epsilon, tuple)
    assert not isinstance(plan.tau2, tuple)
    planned = plan_carried(
        participants=participants,
        clients=participants * plan.separation,
        rounds=plan.planned_rounds,
        epsilon=plan.epsilon,
        delta=plan.gaussian_delta,
        pattern=plan.pattern,
        collusion=plan.colluders / participants,
        dropout=plan.dropout,
        mode="repair" if plan.dropped else "tolerate",
        declared_dropped=plan.dropped,
        kappa=plan.kappa,
        carried_to_residual=plan.carried_to_residual,
        closing=plan.closing,
    ).plan
    if plan.tau2 is None:
        return planned
    return replace(planned, noise=replace(planned.noise, residual=plan.tau2 * planned.noise.spatial / 2.0))


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
class _Fit:
    """The least residual of runs like `shape` at one ratio of carried noise, for any shares within a round.

    pattern  the participations that have to stay within the budget; (): those of all fixed cyclic cohorts
    """

    shape: Committed
    ratio: float
    pattern: tuple[int, ...] = ()

    @cached_property
    def _rounds(self) -> IntArray:
        """The rounds in which anybody takes part."""
        return np.array(self.pattern) if self.pattern else np.arange(self.shape.horizon)

    @cached_property
    def _cohort(self) -> IntArray:
        """Who does, in each of them."""
        return np.zeros_like(self._rounds) if self.pattern else self._rounds % self.shape.separation

    @cached_property
    def _sums(self) -> FloatArray:
        """A_o for each cohort."""
        shift = np.zeros((self.shape.rounds, int(self._cohort.max()) + 1))
        shift[self._rounds, self._cohort] = 1.0
        return np.asarray(np.sum(shift * solveh_banded(self.shape.view.bands, shift, lower=True), axis=0))

    def cost(self, residual: float, spatial: float) -> float:
        """`mu^2` of the costliest of the cohorts."""
        view = self.shape.view
        spread = ((1.0 - 1.0 / view.honest) / view.deviations(residual, spatial))[self._rounds]
        return float(np.max(self._sums / residual + np.bincount(self._cohort, weights=spread)))

    def fitted(self, budget: float, spatial: float, highest: float) -> Committed:
        """The run with the least residual whose worst pattern stays within `budget`, at most `highest`.

        For any pattern that takes a search for every residual, so few are tried. Where the costliest pattern is known
        exactly, the least residual for it is the next one: it is too small as long as there is a costlier pattern, and
        often there is none.
        """
        run = self._at(self._least(budget, spatial, highest), spatial)
        if run.pattern == "cyclic":
            return run
        for _ in range(_MOST_STEPS):
            worst = run.worst
            if not worst.rounds or worst.cost <= budget * (1.0 + _PRECISION):
                break
            residual = replace(self, pattern=worst.rounds)._least(budget, spatial, highest)
            if residual <= run.noise.participants * run.noise.residual:
                break
            run = self._at(residual, spatial)
        return run

    def _at(self, residual: float, spatial: float) -> Committed:
        return self.shape.with_residual(residual, ratio=self.ratio, spatial=spatial)

    def _least(self, budget: float, spatial: float, highest: float) -> float:
        """The least residual with which the cohorts stay within the budget."""

        def excess(log_residual: float) -> float:
            return math.log(self.cost(math.exp(log_residual), spatial) / budget)

        # The deviations only add to what the sums cost.
        low = math.log(float(self._sums.max()) / budget) - _PRECISION
        high = math.log(highest)
        if low >= high or excess(high) > 0.0:
            raise PrivacyError(
                "the shares within a round are too weak for this promise",
                hint="raise kappa, or assume fewer colluders",
            )
        return math.exp(find_root(excess, low, high, xtol=_PRECISION))


def _safely_within(run: Committed, budget: float) -> Committed:
    """The run with as little more residual as it takes: rounding, or what merged patterns add to a bound."""
    ratio, spatial = run.noise.carried / run.noise.residual, run.noise.spatial
    while (excess := run.worst.cost / budget) > 1.0:
        residual = run.noise.participants * run.noise.residual * max(excess, 1.0 + _PRECISION)
        run = run.with_residual(residual, ratio=ratio, spatial=spatial)
    return run


@dataclass(frozen=True)
class _Search:
    draft: Committed
    mu: float
    dropout: float
    repaired: bool
    goal: str

    @property
    def alone(self) -> float:
        """sigma_k^2: what a client would add if it stood alone."""
        return math.ceil(self.draft.horizon / self.draft.separation) / self.mu**2

    def noise(self, run: Committed) -> FloatArray:
        return run.noise_in_model(self.dropout, repaired=self.repaired)[: run.horizon]

    def objective(self, run: Committed) -> float:
        if self.goal == "mean":
            return float(self.noise(run).mean())
        return float(run.noise_in_model(self.dropout, repaired=self.repaired)[-1])

    def objective_if_repaired(self, run: Committed) -> float:
        return replace(self, repaired=True).objective(run)

    def fitted(self, kappa: float, ratio: float) -> Committed:
        """The least residual that keeps the promise, at this ratio and shares within a round."""
        size, spatial = self.draft.noise.participants, 2.0 * kappa * self.alone
        shape = self.draft.with_residual(1.0, ratio=ratio, spatial=spatial)
        # Without carrying and without shares the residual of one client's own upload would have to do it all.
        return _Fit(shape, ratio).fitted(self.mu**2, spatial, 2.0 * self.alone * size)

    def at(self, kappa: float, ratio: float | None) -> Committed:
        """The best plan at this kappa.

        The carried variance is chosen for cyclic cohorts, which is quick. For any pattern at that separation another
        choice gained less than 0.1 % in the eight settings in which both were computed.
        """
        if ratio is not None:
            return self.fitted(kappa, ratio)
        nothing = _carrying_nothing(self, kappa)
        if self.draft.separation == 1:
            return nothing
        best = self.cyclic._carrying(kappa)
        if self.draft.pattern != "cyclic":
            best = self.fitted(kappa, best.noise.carried / best.noise.residual)
        return min(best, nothing, key=self.objective)

    def _carrying(self, kappa: float) -> Committed:
        """The best plan over all ratios."""
        # Imported here because it takes longer than other plans do.
        from scipy.optimize import minimize_scalar

        found = minimize_scalar(
            lambda log: math.log(self.objective(self.fitted(kappa, math.exp(log)))),
            bounds=(math.log(_LEAST_RATIO), math.log(_MOST_RATIO)),
            method="bounded",
            options={"xatol": 0.02},
        )
        return self.fitted(kappa, math.exp(float(found.x)))

    @property
    def cyclic(self) -> _Search:
        return replace(self, draft=replace(self.draft, pattern="cyclic"))

    def cheapest(self, ratio: float | None, say: Callable[[str], None]) -> Committed:
        """The plan at the least kappa that is nearly the best, each with its own carried variance.

        Kappas are compared for cyclic cohorts, which is quicker and hardly matters; the plan is made for the pattern
        that was asked for.
        """
        points = []
        for kappa in _KAPPAS:
            say(f"trying shares of strength {kappa:.3g}")
            try:
                points.append((kappa, self.objective(self.cyclic.at(kappa, ratio))))
            except PrivacyError:
                continue
        if not points:
            raise PrivacyError(
                "no strength of shares keeps this promise",
                hint="assume fewer colluders, or fewer that drop out",
            )
        enough = _GOOD_ENOUGH * min(cost for _, cost in points)
        chosen = next(kappa for kappa, cost in points if cost <= enough)
        say(f"choosing what to carry at strength {chosen:.3g}")
        return self.at(chosen, ratio)


@lru_cache(maxsize=2)
def _carrying_nothing(search: _Search, kappa: float) -> Committed:
    """The plan at this kappa that carries no noise on; asked for again when the gain is stated."""
    return search.fitted(kappa, 0.0)


def _forecast(run: Committed, search: _Search, sensitivity: float, asked: dict[str, Any]) -> CarriedForecast:
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
        notes=tuple(_notes(run, search)),
    )


def _notes(run: Committed, search: _Search) -> list[str]:
    notes = []
    if run.separation == 1:
        notes.append("Everyone takes part in every round: carrying noise to the next round hides nothing.")
    else:
        nothing = _carrying_nothing(search, run.noise.spatial / (2.0 * search.alone))
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
