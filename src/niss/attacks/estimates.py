"""What the adversary holds, and nothing else; and its best guess of one client's update from that.

The adversary is the server, perhaps with some clients on its side. It has every upload, what everyone may
know (the plan of the round with its graph and variances), what it knows or guesses
of other clients' updates, and every share that one of its colluders sent or received.

Write r_j for upload j less everything the adversary knows of it (update, shares of colluders). Then

    r_k = p_k x_k + noise,    r_j = noise,    Cov(noise) = Sigma = sigma^2 L_H + diag(residual),

and the best linear unbiased estimate is w . r / (p_k w_k) with w = Sigma^-1 e_k (Gauss and Markov). Its variance,
1 / (Sigma^-1)_kk, is the accountant's effective variance: this attack is as good as the joint view allows. Where
noise cancels (tau = 0) Sigma has a null space, and the sum over it gives the update away exactly.

What a multiplicative distortion leaves of known shares is attacked before that:

- `scalar`: sum_e (1 - s_e) n_e lies in the span of the known n_e and is projected out, at the price of the
  part of the update that lies in the span too, a relative error of about sqrt(v / h) for v known shares;
- `coordinate`: its variance tau^2 sum_e n_e,i^2 is known in every coordinate i, and small in some;
- `additive`: it is fresh noise of even variance, and neither helps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from niss.accounting import RoundPlan
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism import distortion_named

FloatArray = NDArray[np.float64]
_NULL = 1e-12


@dataclass(frozen=True)
class Observation:
    """One round as the adversary sees it.

    uploads           one row per participant: what really left the devices
    plan              the public numbers of the round; the drawn distortion factors are not among them
    share             the public aggregation weights p_k
    colluders         seats on the adversary's side
    known_updates     updates x_j the adversary knows or guesses, by seat; the others it takes to be zero
    known_shares      the shares (sender, receiver) that a colluder sent or received
    """

    uploads: FloatArray
    plan: RoundPlan
    share: FloatArray
    colluders: tuple[int, ...] = ()
    known_updates: Mapping[int, FloatArray] = field(default_factory=dict)
    known_shares: Mapping[tuple[int, int], FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.plan.scales is not None:
            raise ConfigError("the drawn factors are secret and no part of an observation", field="plan")
        strangers = [ends for ends in self.known_shares if not set(ends) & set(self.colluders)]
        if strangers:
            raise ConfigError(f"no colluder sits at an end of {strangers[0]}", field="known_shares")

    @property
    def size(self) -> int:
        return len(self.uploads)

    @property
    def honest(self) -> NDArray[np.int64]:
        """Seats that are not on the adversary's side, in order."""
        return np.setdiff1d(np.arange(self.size), self.colluders)

    def received(self, seat: int) -> list[FloatArray]:
        """The known shares that this seat received, and distorted."""
        return [share for (_, receiver), share in self.known_shares.items() if receiver == seat]


@dataclass(frozen=True)
class Estimate:
    """What the adversary makes of an observation.

    update     its guess of x_k, in the units of an update (not weighed by p_k)
    variance   what it expects of the squared error in each coordinate
    """

    update: FloatArray
    variance: FloatArray

    def shrunk(self, signal: float) -> FloatArray:
        """The update with every coordinate drawn towards 0 by how little it is trusted: signal / (signal + variance).

        `signal` is the expected square of a coordinate of x_k; where the variance is even, only the scale changes.
        """
        return np.asarray(self.update * (signal / (signal + self.variance)))


def estimate_alone(seen: Observation, victim: int) -> Estimate:
    """The paper's adversary: looks at the victim's upload alone, less the shares of colluders.

    seen     what the adversary holds
    victim   an honest seat; `ConfigError` for any other
    """
    _require_honest(seen, victim)
    plan, graph, row = seen.plan, seen.plan.graph, _less_known(seen, victim)
    near = graph.edges_of(victim)
    ends = zip(graph.senders[near].tolist(), graph.receivers[near].tolist(), strict=True)
    known = graph.weights[near][[pair in seen.known_shares for pair in ends]]
    variance = float(plan.marginal_variance[victim] - plan.unit_variance * known.sum())
    return _scaled(row, np.full(row.shape, variance), seen, victim)


def estimate_jointly(seen: Observation, victim: int, *, exploit: bool = True) -> Estimate:
    """The best linear estimate from all uploads.

    seen      what the adversary holds; updates of others that it does not know are taken to be zero, so that they end
              up in the estimate as they do in the sum
    victim    an honest seat; `ConfigError` for any other
    exploit   off: shares of colluders are only subtracted, and what a distortion has left of them counts as noise
    """
    _require_honest(seen, victim)
    honest = seen.honest
    place = int(np.searchsorted(honest, victim))
    rows = np.stack([_rest(seen, int(seat), int(seat) == victim, exploit) for seat in honest])
    residual = _residual(seen, honest, exploit)
    # sigma^2 L_H: the covariance of the shares between honest clients.
    graph = seen.plan.graph
    counted = np.isin(graph.senders, honest) & np.isin(graph.receivers, honest)
    shared = seen.plan.unit_variance * laplacian(graph, counted)[np.ix_(honest, honest)]
    if residual.ndim == 1:
        covariance = shared + np.diag(residual)
        weights = best_weights(covariance, place)
        combined = weights @ rows / weights[place]
        spread = float(weights @ covariance @ weights / weights[place] ** 2)
        error = np.full(combined.shape, max(0.0, spread))
    else:
        columns = _weights_by_coordinate(shared, residual, place)
        combined = np.sum(columns * rows, axis=0) / columns[place]
        error = 1.0 / columns[place]
    return _scaled(combined, error, seen, victim)


def best_coordinates(guess: Estimate, truth: FloatArray, part: float = 0.01) -> float:
    """The error on the `part` of coordinates the adversary trusts most, over its error on all; 1: no choice helps."""
    size = max(1, int(part * truth.size))
    squares = (guess.update - truth) ** 2
    everywhere = float(np.mean(squares))
    trusted = np.argsort(guess.variance, kind="stable")[:size]
    return float(np.sqrt(np.mean(squares[trusted]) / everywhere)) if everywhere > 0.0 else 1.0


def projected_out(vector: FloatArray, shares: list[FloatArray]) -> FloatArray:
    """`vector` less its part in the span of `shares`."""
    if not shares:
        return vector
    basis, _ = np.linalg.qr(np.stack(shares, axis=1))
    return np.asarray(vector - basis @ (basis.T @ vector))


def _rest(seen: Observation, seat: int, is_victim: bool, exploit: bool) -> FloatArray:
    """r_j: an upload less everything known of it but the victim's update, projected where that helps."""
    row = _less_known(seen, seat)
    if not is_victim and seat in seen.known_updates:
        row = row - seen.share[seat] * seen.known_updates[seat]
    if exploit and _is_distorted(seen) and distortion_named(seen.plan.plan.distortion).one_factor:
        row = projected_out(row, seen.received(seat))
    return row


def _less_known(seen: Observation, seat: int) -> FloatArray:
    """An upload less the shares that a colluder sent to this seat or received from it."""
    row: FloatArray = seen.uploads[seat].copy()
    for (sender, receiver), share in seen.known_shares.items():
        if sender == seat:
            row -= share
        elif receiver == seat:
            row += share
    return row


def _residual(seen: Observation, honest: NDArray[np.int64], exploit: bool) -> FloatArray:
    """The variance of what only one upload holds: per honest client, for `coordinate` also per coordinate."""
    plan = seen.plan
    if not plan.plan.kind.shares_noise:
        return np.asarray(plan.own_variance[honest]) * plan.plan.kind.adds_own_noise
    distortion, tau2 = distortion_named(plan.plan.distortion), plan.tau2[honest]
    if distortion.additive or not exploit:
        return np.asarray(plan.residual_variance[honest])
    # in_k without the edges that a colluder sent.
    graph = plan.graph
    kept = ~np.isin(graph.senders, seen.colluders)
    received = np.bincount(graph.receivers[kept], weights=graph.weights[kept], minlength=graph.size)
    unknown = tau2 * plan.unit_variance * received[honest]
    if not (distortion.per_coordinate and _is_distorted(seen) and seen.known_shares):
        return np.asarray(unknown)
    squares = np.zeros((honest.size, seen.uploads.shape[1]))
    for place, seat in enumerate(honest):
        for share in seen.received(int(seat)):
            squares[place] += share**2
    return np.asarray(unknown[:, None] + tau2[:, None] * squares)


def laplacian(graph: ShareGraph, counted: NDArray[np.bool_]) -> FloatArray:
    """The Laplacian of some of the edges, one row per client of the graph."""
    ends = graph.senders[counted], graph.receivers[counted]
    return ShareGraph.from_arrays(graph.size, *ends, graph.weights[counted], "given").laplacian()


def best_weights(covariance: FloatArray, place: int) -> FloatArray:
    """Sigma^-1 e_k, or, where noise cancels on a set that holds k, the null vector nearest e_k.

    Eigenvalues below 1e-12 of the largest count as null. A null vector w with w_k > 0 gives w . noise = 0 exactly, so
    the estimate has no error at all.
    """
    values, vectors = np.linalg.eigh(covariance)
    none = values <= _NULL * max(values[-1], 1e-300)
    exposed = vectors[:, none] @ vectors[place, none]
    if exposed[place] > 1e-9:
        return np.asarray(exposed)
    return np.asarray(vectors[:, ~none] @ (vectors[place, ~none] / values[~none]))


def _weights_by_coordinate(shared: FloatArray, residual: FloatArray, place: int) -> FloatArray:
    """Sigma_i^-1 e_k for every coordinate i, whose covariance differs on the diagonal; one column each."""
    size, coordinates = residual.shape
    floor = _NULL * max(float(np.trace(shared)) / size, float(residual.mean()), 1e-300)
    matrices = np.repeat(shared[None], coordinates, axis=0)
    matrices[:, np.arange(size), np.arange(size)] += residual.T + floor
    wanted = np.zeros((coordinates, size, 1))
    wanted[:, place] = 1.0
    return np.asarray(np.linalg.solve(matrices, wanted)[:, :, 0].T)


def _is_distorted(seen: Observation) -> bool:
    """Whether clients distort received shares at all; tau^2 is 0 where none are shared."""
    return bool(np.any(seen.plan.tau2 > 0.0))


def _scaled(row: FloatArray, variance: FloatArray, seen: Observation, victim: int) -> Estimate:
    p = float(seen.share[victim])
    return Estimate(row / p, variance / p**2)


def _require_honest(seen: Observation, victim: int) -> None:
    if not 0 <= victim < seen.size or victim in seen.colluders:
        raise ConfigError(f"client {victim} is not an honest participant of the round", field="victim")
