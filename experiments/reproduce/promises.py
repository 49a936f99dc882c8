"""The epsilon of every run in the result files, computed again from clip, variance, participations, delta and graph.

What the run recorded of its mechanism has to agree: labels, sampling probability, exchange, predicted variance, delta.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from experiments.reproduce.design import DELTA, EVERYONE, VARIANTS, Method, Variant
from experiments.reproduce.paper import Setup, find_panel, find_reading
from experiments.reproduce.recompute import (
    CarriedNoise,
    FloatArray,
    RecordRound,
    Round,
    banded_noise,
    dearest_cohort,
    epsilon_at,
    mu_at,
    protection,
    sampled_epsilon,
    uncancelled,
)
from experiments.reproduce.results import Attempt, Cell, Leaks, Result

TRAINING_IMAGES = {"mnist": 60_000, "cifar10": 50_000}
CLOSE = 0.01
"""Measured variances are means over some hundred thousand coordinates: in the committed results within 0.4 %."""
ROUNDING = 1e-12
DEVIATIONS = 6.0
"""By so many a mean over fewer coordinates may be off."""
SCATTER = 0.4
"""Against colluders the residual differs from graph to graph, and the marginal view is that of the least."""
LUCK = 0.08
"""Who drops out is drawn each round: of 30 clients in 100 rounds, four deviations."""

Wrong = Iterator[tuple[str, str, str]]
"""The cell, the kind of fault, and what is wrong."""


@dataclass(frozen=True)
class Run:
    """A cell with what is around it."""

    result: Result
    cell: Cell

    @property
    def method(self) -> Method:
        return EVERYONE[self.cell.labels["method"]]

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.cell.labels["variant"]]

    @property
    def facts(self) -> dict[str, Any]:
        """What its noise was made of, as recorded."""
        return self.cell.mechanism

    @property
    def close(self) -> float:
        """How far a measured variance may be from the true one."""
        base = self.result.base
        drawn = base["rounds"] * base.get("parameters", math.inf)
        return max(CLOSE, DEVIATIONS * math.sqrt(2.0 / drawn))

    @cached_property
    def promise(self) -> Round:
        """What its rounds have in common; all of delta pays for the noise."""
        labels, base = self.cell.labels, self.result.base
        if base["unit"] == "record":
            sensitivity = labels["clip"] / (base["batch"] * base["records"])
            sizes = base["rounds"], labels["epsilon"], base["delta"], base["participants"], base["batch"]
            return RecordRound(sensitivity, *sizes)
        participations = math.ceil(base["rounds"] / (base["clients"] // base["participants"]))
        sensitivity = labels["clip"] / base["participants"]
        return Round(sensitivity, participations, labels["epsilon"], base["delta"], base["participants"])

    @property
    def noise(self) -> Round:
        """The same with the part of delta that pays for the noise."""
        return replace(self.promise, delta=self.facts["gaussian_delta"])


def promise_faults(result: Result) -> Wrong:
    """What is wrong with the epsilons of a setting."""
    if result.base["dataset"] not in TRAINING_IMAGES and "model" not in result.base:
        return
    for cell in result.cells:
        run = Run(result, cell)
        if run.method.private and not cell.mechanism:
            yield cell.id, "epsilon", "does not say what its noise was made of"
            continue
        for check in (_PROMISES[run.method.noise], _recorded):
            for kind, detail in check(run):
                yield cell.id, kind, detail


Found = Iterator[tuple[str, str]]


def _recorded(run: Run) -> Found:
    """What a run recorded agrees with its labels, composes to its epsilon, and spends no more than its delta."""
    recorded, labels, base = run.facts, run.cell.labels, run.result.base
    if not recorded:
        return
    drawn = base["participants"] / base["clients"] if run.method.noise == "sampled" else 1.0
    wanted = {"exchange": "simulated", "sampling_probability": drawn}
    wanted |= {name: labels.get(name) for name in ("kappa", "neighbours", "participations")}
    for name, value in wanted.items():
        if value is not None and recorded.get(name, value) != value:
            yield (
                "settings",
                f"ran with {name} = {recorded[name]}, by its labels and its setting it is {value}",
            )
    measured, predicted = run.cell.aggregate_variance, recorded["predicted_variance"]
    if not math.isclose(measured, predicted, rel_tol=run.close, abs_tol=1e-14):
        detail = f"{predicted:.5g} was predicted, measured {measured:.5g}"
        yield "noise", detail
    spent = recorded["gaussian_delta"] + recorded["grid_delta"]
    if max(spent, recorded["delta"]) > base["delta"] * (1.0 + 1e-9):
        yield "epsilon", f"spends delta {max(spent, recorded['delta']):.3g}, {base['delta']:g} was promised"
    # mu is the most that one round cost anybody, so nobody has spent more than all rounds at that price.
    if recorded["mu_joint"] is not None and run.cell.epsilon_joint is not None:
        most = replace(run.noise, participations=recorded["participations"]).composed(recorded["mu_joint"])
        if run.cell.epsilon_joint > most * (1.0 + 1e-6):
            yield (
                "epsilon",
                f"states epsilon {run.cell.epsilon_joint}, its rounds compose to at most {most:.4f}",
            )


def _without_noise(run: Run) -> Found:
    cell = run.cell
    if cell.aggregate_variance != 0.0 or cell.epsilon_joint is not None or cell.epsilon_marginal is not None:
        yield "epsilon", "a run without noise has no variance and no epsilon"


def _cancelled(run: Run) -> Found:
    """Nothing is left in the sum, so nothing is promised against whoever sees all uploads."""
    if abs(run.cell.aggregate_variance) > ROUNDING or run.cell.epsilon_joint is not None:
        yield "epsilon", "noise that cancels promises nothing in the joint view"


def _own_noise(run: Run) -> Found:
    """Each upload is as well hidden alone as with all the others."""
    yield from _stated(run, run.promise, run.cell.aggregate_variance / run.promise.size)
    if run.result.base["unit"] != "record" and run.cell.epsilon_marginal != run.cell.epsilon_joint:
        yield "epsilon", "both views are one where every client has its own noise"


def _noise_in_sum(run: Run) -> Found:
    """What is in the sum protects everyone, less the part that colluders know."""
    yield from _stated(run, run.promise, run.cell.aggregate_variance * (1.0 - run.variant.rho))


def _noise_alone(run: Run) -> Found:
    """The largest silo is a curator of its own records."""
    base = run.result.base
    parts = base["records"] / math.ceil(base["records"] / base["clients"])
    own = replace(run.promise, sensitivity=run.promise.sensitivity * parts)
    yield from _stated(run, own, run.cell.aggregate_variance)


def _stated(run: Run, promise: Round, variance: float) -> Found:
    stated = run.cell.epsilon_joint
    yield from _participations_said(run)
    if not math.isclose(variance, promise.own_variance, rel_tol=run.close):
        held = promise.epsilon_of(variance) if variance > 0.0 else math.inf
        yield "noise", f"its noise is worth epsilon {held:.3f}, {promise.epsilon:g} was promised"
    # Where images do not divide by the clients, those with one more are hidden a little better.
    least = promise.epsilon * (1.0 - 0.5 * CLOSE)
    if stated is None or not least <= stated <= promise.epsilon * (1.0 + 1e-6):
        yield "epsilon", f"states epsilon {stated}, its noise is made for {promise.epsilon:g}"


def _participations_said(run: Run) -> Found:
    counted = run.promise.participations
    said = run.cell.labels.get("participations", counted)
    if said != counted:
        yield "epsilon", f"composed over {said} participations, a client has {counted}"


def _shared_noise(run: Run) -> Found:
    """The residual follows from the marginal view; with the shares it must protect every client of a graph.

    An upload alone carries 2 S + eta^2 for S = kappa sigma_k^2, so its marginal epsilon says what eta^2 is; where
    records are hidden, tau^2 does. The sum carries m eta^2, and what dropouts leave; the joint view is the inverse of
    the covariance matrix.
    """
    cell, promise, facts, variant = run.cell, run.promise, run.facts, run.variant
    yield from _participations_said(run)
    if cell.epsilon_marginal is None and not isinstance(promise, RecordRound):
        yield "epsilon", "an upload alone is hidden by its shares; no epsilon is stated for that"
        return
    noise = run.noise
    own, size, strength = noise.own_variance, noise.size, facts["kappa"] * noise.own_variance
    if cell.epsilon_marginal is not None:
        residual = promise.variance_for(cell.epsilon_marginal, promise.delta) - 2.0 * strength
    else:  # Slots are composed to a thousandth, of which a small difference of large variances leaves nothing.
        residual = facts["tau2"] * strength
        alone = (promise.sensitivity / facts["mu_marginal"]) ** 2
        if not math.isclose(alone, 2.0 * strength + residual, rel_tol=CLOSE):
            yield (
                "noise",
                f"an upload alone carries {alone:.5g}, by its shares {2.0 * strength + residual:.5g}",
            )
    if not 0.0 < residual < 2.0 * own:
        yield (
            "epsilon",
            f"states epsilon {cell.epsilon_marginal:.6g} for one upload; its shares say otherwise",
        )
        return
    predicted = (1.0 - variant.dropout) * size * residual
    if variant.mode == "tolerate":
        predicted += uncancelled(size, variant.dropout, strength)
    near = LUCK if variant.dropout else run.close
    least, most = 1.0 - near, 1.0 + near
    if variant.rho:
        most = 1.0 + SCATTER
    if not least * predicted <= cell.aggregate_variance <= most * predicted:
        yield "noise", f"the sum carries {cell.aggregate_variance:.5g}, by its epsilons {predicted:.5g}"
    gone = math.ceil(variant.rho * size - 1e-9)
    # Against colluders it differs from sparse graph to graph: the sum has its mean, the marginal view the least of it.
    drawn = variant.rho and facts["neighbours"] < size - 1
    share = float(f"{(cell.aggregate_variance / size if drawn else residual) / own:.5g}")
    held = noise.epsilon_of(own * protection(size, int(facts["neighbours"]), facts["kappa"], share, gone))
    exact = not variant.rho and not variant.dropout
    yield from _held(cell, held, exact=exact)


def _held(cell: Cell, held: float, *, exact: bool) -> Found:
    """`held` is what our own graph has; where nothing is reserved for faults the run must state just that."""
    stated, promised = cell.epsilon_joint, cell.labels["epsilon"]
    if held > promised * (1.0 + CLOSE):
        yield "epsilon", f"on a graph like its own epsilon {held:.3f} holds, {promised:g} was promised"
    most = min(promised * (1.0 + 1e-6), held * (1.0 + 2 * CLOSE) if exact else math.inf)
    if stated is None or not held * (1.0 - 2 * CLOSE) <= stated <= most:
        yield "epsilon", f"states epsilon {stated}, on a graph like its own {held:.4f} holds"


def _sampled_noise(run: Run) -> Found:
    """Noise of z sensitivities in every sum, amplified by a draw that nobody learns of."""
    cell, base, promise = run.cell, run.result.base, run.promise
    if run.cell.aggregate_variance <= 0.0:
        yield "noise", "the sums carry no noise"
        return
    measured = math.sqrt(cell.aggregate_variance) / promise.sensitivity
    multiplier = float(f"{1.0 / run.facts['mu_joint']:.6g}")
    if not math.isclose(measured, multiplier, rel_tol=CLOSE):
        yield "noise", f"its noise is {measured:.4f} sensitivities, recorded are {multiplier:.4f}"
    probability = base["participants"] / base["clients"]
    held = sampled_epsilon(multiplier, probability, base["rounds"], base["delta"])
    yield from _held(cell, held, exact=True)
    if cell.labels.get("participations", base["rounds"]) != base["rounds"]:
        yield "epsilon", "a client may be drawn into every round"


def _banded_noise(run: Run) -> Found:
    """The scale of the noise follows from what the rounds carry on average; a participation costs its column."""
    base, promise, facts = run.result.base, run.promise, run.facts
    separation = base["clients"] // base["participants"]
    spent, by_round, _ = banded_noise(
        base["rounds"], facts["bands"] or separation, separation, facts.get("strategy", "square-root")
    )
    if facts["separation"] != separation or (facts["bands"] or 1) > separation:
        yield "epsilon", f"clients return after {separation} rounds, not {facts['separation']}"
        return
    scale = run.cell.aggregate_variance / by_round.mean()
    cost = dearest_cohort(spent, separation) * promise.sensitivity**2
    held = epsilon_at(math.sqrt(cost / scale), promise.delta) if scale > 0.0 else math.inf
    yield from _participations_said(run)
    yield from _held(run.cell, held, exact=True)


def _masked_noise(run: Run) -> Found:
    """Of the fewest uploads that are opened, those of the honest have to carry what one client alone would need."""
    cell, promise, facts, variant = run.cell, run.promise, run.facts, run.variant
    yield from _participations_said(run)
    colluders = math.ceil(variant.rho * promise.size - 1e-9)
    opened = promise.size if facts["threshold"] is None else facts["threshold"]
    if facts["colluders"] != colluders or not colluders < opened <= promise.size:
        yield "settings", f"{facts['colluders']} colluders and {opened} uploads do not fit its variant"
        return
    own = cell.aggregate_variance / (promise.size * (1.0 - variant.dropout))
    least = own * (opened - colluders)
    if not math.isclose(least, promise.own_variance, rel_tol=LUCK if variant.dropout else CLOSE):
        held = promise.epsilon_of(least) if least > 0.0 else math.inf
        yield "noise", f"its noise is worth epsilon {held:.3f}, {promise.epsilon:g} was promised"
    if cell.epsilon_joint is None or not math.isclose(cell.epsilon_joint, promise.epsilon, rel_tol=1e-6):
        yield "epsilon", f"states epsilon {cell.epsilon_joint}, its noise is made for {promise.epsilon:g}"


def _carried_noise(run: Run) -> Found:
    """The whole run at once, from the variances recorded, which the sums must bear out."""
    cell, base, facts, promise, variant = run.cell, run.result.base, run.facts, run.noise, run.variant
    separation = base["clients"] // base["participants"]
    yield from _participations_said(run)
    colluders = math.ceil(variant.rho * promise.size - 1e-9)
    if facts["graph"] != "complete" or facts["colluders"] != colluders or facts["separation"] != separation:
        yield "settings", "was not planned for its cohorts, its colluders, or not on complete graphs"
        return
    noise = CarriedNoise(
        base["rounds"],
        promise.size,
        facts["spatial"],
        facts["carried"],
        facts["residual"],
        colluders + facts["dropped"],
    )
    held = epsilon_at(math.sqrt(dearest_cohort(noise.spent(), separation)), promise.delta)
    yield from _held(cell, held, exact=True)
    square = promise.sensitivity**2
    if variant.dropout:
        # What the lost leave behind comes on top; the fresh noise of the others is there at least.
        least, most = (1.0 - LUCK) * (1.0 - variant.dropout) * noise.residual, math.inf
    else:
        least, most = (1.0 - CLOSE) * noise.round_variance, (1.0 + CLOSE) * noise.round_variance
    if not least <= cell.aggregate_variance / square <= most:
        yield (
            "noise",
            f"the sums carry {cell.aggregate_variance:.5g}, planned {noise.round_variance * square:.5g}",
        )


_PROMISES: dict[str, Callable[[Run], Found]] = {
    "none": _without_noise,
    "own": _own_noise,
    "sum": _noise_in_sum,
    "shares": _shared_noise,
    "sampled": _sampled_noise,
    "banded": _banded_noise,
    "masked": _masked_noise,
    "carried": _carried_noise,
    "alone": _noise_alone,
    "cancelled": _cancelled,
}
"""By `Method.noise` in the design."""


def noise_in_model(result: Result, cell: Cell, *, predicted: bool = False) -> FloatArray:
    """Variance after each round, in squared sensitivities, from what the run recorded: measured, or predicted."""
    run = Run(result, cell)
    rounds, facts, kind = result.base["rounds"], run.facts, run.method.noise
    measured = facts["predicted_variance"] if predicted else cell.aggregate_variance
    measured /= run.promise.sensitivity**2
    if kind == "carried":
        noise = CarriedNoise(rounds, run.promise.size, facts["spatial"], facts["carried"], facts["residual"])
        return noise.model_variance()
    if kind == "banded":
        apart, strategy = facts["separation"], facts.get("strategy", "square-root")
        _, by_round, model = banded_noise(rounds, facts["bands"] or apart, apart, strategy)
        return np.asarray(measured / by_round.mean() * model)
    return np.asarray(measured * np.arange(1.0, rounds + 1.0))


def panel_faults(result: Result) -> Wrong:
    """sigma_k is that of its reading, the sum carries m X sigma_k^2, and the marginal epsilon follows from both."""
    if result.base["dataset"] not in TRAINING_IMAGES:
        return
    setup = find_panel(result.name).setup
    counts: dict[int, set[int]] = defaultdict(set)
    for cell in result.cells:
        sigma, x, reading = (cell.labels[name] for name in ("sigma_k", "x", "reading"))
        wanted = find_reading(reading.removeprefix("sigma-")).sigma(setup)
        if not math.isclose(sigma, wanted, rel_tol=5e-3 if reading.startswith("sigma-") else 1e-9):
            yield cell.id, "noise", f"sigma_k is {sigma:.6g}, by its reading {wanted:.6g}"
        predicted = setup.participants * x * sigma**2
        if abs(cell.aggregate_variance - predicted) > 0.05 * predicted + 1e-12:
            yield cell.id, "noise", f"variance {cell.aggregate_variance:.4g}, predicted {predicted:.4g}"
        if cell.epsilon_joint is not None:
            yield cell.id, "epsilon", "one scalar a share has no epsilon in the joint view"
        count = _participations(cell, setup, sigma, x)
        if count is None:
            yield cell.id, "epsilon", f"epsilon {cell.epsilon_marginal} is that of no number of rounds"
        else:
            counts[cell.labels["seed"]].add(count)
    for seed, found in counts.items():
        if len(found) > 1:
            yield f"seed-{seed}", "epsilon", f"took part in {sorted(found)} rounds, by its epsilons"


def _participations(cell: Cell, setup: Setup, sigma: float, x: float) -> int | None:
    """In how many rounds the busiest client took part, so that its marginal epsilon is the one stated."""
    if cell.epsilon_marginal is None:
        return None
    mu = 2.0 * setup.clip / setup.records / (sigma * math.sqrt(2.0 + x))
    count = (mu_at(cell.epsilon_marginal, setup.delta) / mu) ** 2
    return round(count) if math.isclose(count, round(count), rel_tol=1e-6) and count < cell.rounds else None


def attack_faults(leaks: Leaks) -> Wrong:
    """One round: noise for epsilon 3 at delta 1e-5, or the paper's, whose exact epsilon is larger than its 10."""
    for cell in leaks.cells:
        # The residual of a calibrated round is in the marginal view too.
        near = 0.03 if cell.labels["level"].endswith("calibrated") else 1e-5
        stated = cell.epsilon_joint, cell.epsilon_marginal
        for view, said, right in zip(("joint", "marginal"), stated, _attack_epsilons(cell), strict=True):
            same = (said is None) == (right is None) and math.isclose(said or 1.0, right or 1.0, rel_tol=near)
            if not same:
                yield cell.id, "epsilon", f"states epsilon {said} in the {view} view, not {right}"


def _attack_epsilons(cell: Attempt) -> tuple[float | None, float | None]:
    """In the joint and in the marginal view."""
    labels, paper = cell.labels, Setup()
    if labels["noise"] == "none":
        return None, None
    if labels["sigma_k"] is None:
        mu, delta = mu_at(3.0, DELTA), DELTA
    else:
        mu, delta = 2.0 * paper.clip / (paper.records * labels["sigma_k"]), paper.delta
    level, own = labels["level"].removeprefix("client-"), epsilon_at(mu, delta)
    if level == "dp-fedavg":
        return own, own
    alone = epsilon_at(mu / math.sqrt(2.0), delta)
    return (own if level == "niss-calibrated" else None), alone
