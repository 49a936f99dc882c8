"""One object that says how clients are protected, and what that is worth.

A `Plan` fixes clip, noise, graph, distortion and target together. `Plan.for_round` turns it into the
numbers of one round, on the graph that is really used, together with what they promise; the noise that
runs and the claim that is made come from the same `RoundPlan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.accounting.joint import calibrate_tau2, effective_variance
from niss.errors import ConfigError
from niss.graph import GRAPHS, ShareGraph
from niss.mechanism import DISTORTIONS, MECHANISMS, aggregate_variance, gaussian_sigma, gdp_mu, share_counts

METHODS = ("fedavg", "dp-fedavg", "central-dp", "niss")
UNITS = ("client", "record", "nbafl")
RELATIONS = ("zero-out", "replace-one")

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the clients of a federated run are protected.

    method          `fedavg` (no noise), `dp-fedavg` (own noise, not cancelled), `central-dp` (a trusted
                    server adds the noise once), `niss` (noise shares that cancel)
    unit            what is hidden: a whole `client`, one `record`, or `nbafl`: the reading of the paper,
                    sensitivity 2 clip / d_k after many local steps, which is a heuristic and proves nothing
    relation        neighbouring inputs of the client unit: its update becomes zero (`zero-out`) or any
                    other (`replace-one`); records are always replaced, at a fixed, public number d_k
    clip            L2 bound on an update (unit client) or on a sample's gradient (unit record)
    epsilon, delta  the target of every client, or one epsilon per client
    participations  rounds over which the target is composed; 1 means per round
    kappa           strength of the shares: v sigma^2 = kappa sigma_k^2
    neighbours      unit shares sent by the client with the least noise (the others in proportion)
    tau2            distortion of received shares; None calibrates it for the joint view
    """

    method: str = "niss"
    unit: str = "client"
    relation: str = "zero-out"
    clip: float = 0.5
    epsilon: float | tuple[float, ...] = 3.0
    delta: float = 1e-5
    participations: int = 1
    mechanism: str = "analytic"
    allow_invalid: bool = False
    learning_rate: float | None = None
    kappa: float = 1.0
    neighbours: float = 10.0
    graph: str = "regular"
    groups: tuple[tuple[int, ...], ...] = ()
    distortion: str = "additive"
    tau2: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field, allowed in (
            ("method", METHODS),
            ("unit", UNITS),
            ("relation", RELATIONS),
            ("mechanism", MECHANISMS),
            ("graph", GRAPHS),
            ("distortion", DISTORTIONS),
        ):
            if getattr(self, field) not in allowed:
                raise ConfigError(
                    f"unknown value {getattr(self, field)!r}",
                    field=field,
                    hint="use one of: " + ", ".join(allowed),
                )
        for field in ("clip", "kappa"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) > 0.0):
                raise ConfigError(
                    f"must be a finite number above 0, not {getattr(self, field)!r}", field=field
                )
        if not (math.isfinite(self.neighbours) and self.neighbours >= 1.0):
            raise ConfigError(
                f"each client must send at least one unit share, not {self.neighbours!r}", field="neighbours"
            )
        if self.participations < 1:
            raise ConfigError(f"must be at least 1, not {self.participations}", field="participations")
        if self.unit == "record" and self.learning_rate is None:
            raise ConfigError(
                "the record unit needs the rate of the one local step", field="learning_rate", hint="give it"
            )
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0.0):
            raise ConfigError(f"must be a finite number above 0, not {rate!r}", field="learning_rate")
        for tau2 in self.tau2 if isinstance(self.tau2, tuple) else (self.tau2 or 0.0,):
            if not (math.isfinite(tau2) and tau2 >= 0.0):
                raise ConfigError(f"must be finite and not negative, not {tau2!r}", field="tau2")
        if self.tau2 is None and self.distortion != "additive":
            raise ConfigError(
                f"only the additive distortion can be calibrated for the joint view, not {self.distortion!r}",
                field="tau2",
                hint="give a number for tau2, or use distortion = 'additive'",
            )
        if self.graph == "coalition" and not self.groups:
            raise ConfigError(
                "a coalition graph needs groups",
                field="groups",
                hint="for example groups = [[0, 1, 2], [3, 4, 5]]",
            )

    @property
    def private(self) -> bool:
        """Whether any noise is added."""
        return self.method != "fedavg"

    @property
    def heuristic(self) -> bool:
        """Whether the sensitivity is a heuristic, so that no number here is a guarantee."""
        return self.unit == "nbafl" or (self.mechanism == "classical" and self.allow_invalid)

    @property
    def calibrated(self) -> bool:
        """Whether the joint-view target is met by construction, so that it can serve as a budget."""
        if not self.private or self.heuristic:
            return False
        return self.method != "niss" or self.tau2 is None

    def sensitivity(self, weights: ArrayLike, records: ArrayLike) -> FloatArray:
        """How far one client (or one record) can move its contribution `p_k x_k`, in L2 norm."""
        p = np.asarray(weights, dtype=np.float64)
        d = np.asarray(records, dtype=np.float64)
        if self.unit == "client":
            return p * self.clip * (2.0 if self.relation == "replace-one" else 1.0)
        if self.unit == "record":
            assert self.learning_rate is not None
            return 2.0 * self.learning_rate * p * self.clip / d
        return 2.0 * self.clip / d

    def budget(self, clients: int) -> FloatArray:
        """B_k: the mu of each client's whole target, composed over its participations."""
        return self.round_mu(np.arange(clients)) * math.sqrt(self.participations)

    def round_mu(self, participants: IntArray) -> FloatArray:
        """The mu each participant may spend in one round."""
        if isinstance(self.epsilon, tuple):
            if participants.size and int(participants.max()) >= len(self.epsilon):
                raise ConfigError(
                    f"{len(self.epsilon)} values for at least {int(participants.max()) + 1} clients",
                    field="epsilon",
                )
            epsilons = [self.epsilon[client] for client in participants]
        else:
            epsilons = [self.epsilon] * participants.size
        known: dict[float, float] = {}
        for epsilon in epsilons:
            if epsilon not in known:
                known[epsilon] = self._round_mu_of(epsilon)
        return np.array([known[epsilon] for epsilon in epsilons])

    def _round_mu_of(self, epsilon: float) -> float:
        if self.mechanism == "classical":
            sigma = gaussian_sigma(
                epsilon, self.delta, 1.0, mechanism="classical", allow_invalid=self.allow_invalid
            )
            return 1.0 / (sigma * math.sqrt(self.participations))
        return gdp_mu(epsilon, self.delta) / math.sqrt(self.participations)

    def for_round(
        self, participants: ArrayLike, *, weights: ArrayLike, records: ArrayLike, beacon: bytes
    ) -> RoundPlan:
        """The noise of one round for these participants, and what it promises them."""
        members = np.asarray(participants, dtype=np.int64)
        if members.ndim != 1 or members.size == 0 or np.unique(members).size != members.size:
            raise ConfigError("needs at least one client, and each one once", field="participants")
        p = _per_participant(weights, members.size, "weights", positive=self.private)
        d = _per_participant(records, members.size, "records", positive=self.unit != "client")
        moved = self.sensitivity(p, d)
        own = np.zeros(members.size)
        if self.private:
            own = (moved / self.round_mu(members)) ** 2
        unshared = RoundPlan(
            plan=self,
            participants=members,
            sensitivity=moved,
            own_variance=own,
            graph=ShareGraph(members.size, []),
            unit_variance=0.0,
            tau2=np.zeros(members.size),
        )
        if self.method != "niss":
            return unshared
        unit = self.kappa * float(own.min()) / self.neighbours
        graph = self._draw_graph(members, share_counts(self.kappa * own, unit), beacon)
        if self.tau2 is None:
            tau2 = np.full(members.size, calibrate_tau2(graph, unit_variance=unit, target_variance=own))
        elif isinstance(self.tau2, tuple):
            if int(members.max()) >= len(self.tau2):
                raise ConfigError(
                    f"{len(self.tau2)} values for at least {int(members.max()) + 1} clients", field="tau2"
                )
            tau2 = np.array([self.tau2[client] for client in members])
        else:
            tau2 = np.full(members.size, float(self.tau2))
        return replace(unshared, graph=graph, unit_variance=unit, tau2=tau2)

    def _draw_graph(self, members: IntArray, shares: FloatArray, beacon: bytes) -> ShareGraph:
        size = members.size
        unequal = None if np.allclose(shares, shares[0], rtol=1e-12) else shares
        if self.graph == "coalition":
            seats = {int(client): seat for seat, client in enumerate(members)}
            groups = [[seats[client] for client in group if client in seats] for group in self.groups]
            groups = [group for group in groups if len(group) >= 2]
            alone = size - sum(len(group) for group in groups)
            if alone:
                raise ConfigError(
                    f"{alone} participants of this round have no partner in their group",
                    field="groups",
                    hint="let whole groups take part, or use graph = 'regular'",
                )
            return ShareGraph.coalition(
                size, groups=groups, degree=self.neighbours, beacon=beacon, shares=unequal
            )
        if self.graph == "random":
            return ShareGraph.random(size, degree=self.neighbours, beacon=beacon, shares=unequal)
        degree = self.neighbours
        if self.graph == "complete":
            if unequal is None:
                return ShareGraph.complete(size, weight=self.neighbours / (size - 1))
            degree = size - 1
        return ShareGraph.regular(size, degree=degree, beacon=beacon, shares=unequal)


@dataclass(frozen=True)
class Balance:
    """How unequally shares were received, as multiples of what was sent, and what the worst-off client kept.

    `kept` is its effective variance as a part of the worst-off client's on a balanced graph of the same
    size; None where there is nothing to compare.
    """

    least_received: float
    most_received: float
    kept: float | None


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The numbers of one round: what is added where, and what that promises to whom.

    All arrays are in the order of `participants`. Variances are per coordinate of the upload `p_k x_k`.
    Methods that share no noise have a graph without edges.
    """

    plan: Plan
    participants: IntArray
    sensitivity: FloatArray
    own_variance: FloatArray
    graph: ShareGraph
    unit_variance: float
    tau2: FloatArray
    scales: FloatArray | None = None

    def with_scales(self, scales: FloatArray | None) -> RoundPlan:
        """The same round, conditioned on the scalar distortion factors that were drawn."""
        return replace(self, scales=scales)

    @property
    def aggregate_variance(self) -> float:
        """Predicted noise variance of the sum of all uploads (of the released sum, for central-dp)."""
        method = self.plan.method
        if method == "niss":
            return aggregate_variance(self.graph, unit_variance=self.unit_variance, tau2=self.tau2)
        if method == "central-dp":
            return float(self.own_variance.max())
        return float(self.own_variance.sum())

    @cached_property
    def joint_variance(self) -> FloatArray | None:
        """Effective variance per client against a server that sees everything; None: not computed.

        For `central-dp` the server is trusted, and the view is that of anyone who sees the released model.
        """
        method = self.plan.method
        if method == "central-dp":
            return np.full(self.participants.size, self.aggregate_variance)
        if method != "niss":
            return self.own_variance
        undistorted = bool(np.all(self.tau2 == 0.0))
        if self.plan.distortion == "coordinate" and not undistorted:
            return None
        if self.plan.distortion == "scalar" and not undistorted:
            if self.scales is None:
                return None
            return effective_variance(
                self.graph, unit_variance=self.unit_variance, residual_variance=0.0, scales=self.scales
            )
        residual = self.tau2 * self.unit_variance * self.graph.in_weight
        return effective_variance(self.graph, unit_variance=self.unit_variance, residual_variance=residual)

    def balance(self) -> Balance | None:
        """What an unbalanced graph costs; None where every client receives as much as it sends."""
        if self.plan.method != "niss" or self.graph.balanced:
            return None
        regular = ShareGraph.regular(
            self.participants.size, degree=self.plan.neighbours, beacon=self.graph.digest()
        )
        residual = self.tau2 * self.unit_variance * regular.in_weight
        fair = effective_variance(regular, unit_variance=self.unit_variance, residual_variance=residual)
        kept = None
        if self.joint_variance is not None and fair.min() > 0.0:
            kept = float(self.joint_variance.min() / fair.min())
        received = self.graph.in_weight / self.graph.out_weight
        return Balance(float(received.min()), float(received.max()), kept)

    @property
    def marginal_variance(self) -> FloatArray:
        """Noise variance of one upload looked at alone: the paper's view."""
        method = self.plan.method
        if method == "central-dp":
            return np.zeros(self.participants.size)
        if method != "niss":
            return self.own_variance
        return self.unit_variance * (self.graph.out_weight + (1.0 + self.tau2) * self.graph.in_weight)

    @property
    def joint_mu(self) -> FloatArray:
        """mu of the joint view; infinite where there is no guarantee or none was computed."""
        if self.joint_variance is None:
            return np.full(self.participants.size, np.inf)
        return _mu(self.sensitivity, self.joint_variance)

    @property
    def marginal_mu(self) -> FloatArray:
        """mu of the marginal view; infinite where an upload carries no noise."""
        return _mu(self.sensitivity, self.marginal_variance)


def _per_participant(values: ArrayLike, size: int, field: str, *, positive: bool) -> FloatArray:
    given = np.asarray(values, dtype=np.float64)
    if given.shape not in ((), (size,)):
        raise ConfigError(f"needs one number, or one per participant ({size})", field=field)
    if not np.all(np.isfinite(given)) or np.any(given < 0.0) or (positive and np.any(given == 0.0)):
        raise ConfigError(f"must be finite and {'above 0' if positive else 'not negative'}", field=field)
    return np.broadcast_to(given, (size,))


def _mu(sensitivity: FloatArray, variance: FloatArray) -> FloatArray:
    with np.errstate(divide="ignore"):
        return np.asarray(sensitivity / np.sqrt(variance))
