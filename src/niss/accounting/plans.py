"""How clients are protected, and what that is worth: a `Plan` for a run, a `RoundPlan` for each of its rounds.

A `Plan` fixes clip, noise, graph, distortion and target together. `Plan.for_round` turns it into the
numbers of one round, on the graph that is really used, together with what they promise; the noise that
runs and the claim that is made come from the same `RoundPlan`. What the noise is, and what it is worth, is
up to the method (`niss.methods`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.accounting.calibration import committed_run
from niss.accounting.committed import PATTERNS, Committed
from niss.accounting.round_plans import RoundPlan
from niss.accounting.targets import (
    FAILURE_SHARE,
    GRID_SHARE,
    RELATIONS,
    client_sensitivity,
    split_failure,
)
from niss.checks import require_one_of
from niss.errors import ConfigError
from niss.graph import GRAPHS
from niss.mechanism import MECHANISMS, gaussian_sigma, gdp_mu
from niss.methods import (
    DISTORTIONS,
    METHODS,
    Method,
    distortion_named,
    method_named,
    of_participants,
)
from niss.views import Corruption

UNITS = ("client", "record", "nbafl")
# At least 1, where they are given.
_COUNTS = (
    "attempts", "participations", "horizon", "chain_rounds", "separation", "threshold", "bands", "participants",
)  # fmt: skip

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the clients of a federated run are protected.

    method          `fedavg` (no noise), `dp-fedavg` (own noise, not cancelled), `central-dp` (a trusted
                    server adds the noise once), `central-dp-sampled` (and draws participants in secret),
                    `central-mf` (and correlates it over rounds), `secagg-ddg` (secure
                    aggregation, every client adds a part of the noise), `niss` (noise shares that cancel),
                    `niss-carried` (and noise carried from one round to the next)
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
    colluders       most participants of a round that tell the server all they know, fixed before the
                    beacon; in a coalition graph, most in each group
    revealed        most edges of a client that may be given to the server to repair dropouts
    dropped         most clients that may be declared dropped in a repaired round
    attempts        most times a round may be tried again; each attempt may fail its collusion bound
    horizon         rounds of the whole run, to which methods that plan their noise for all of it are committed; None:
                    `participations` times `separation`
    chain_rounds    rounds of all beacon chains among which a server could choose: each of their graphs may fail the
                    bound, shown or not; None: no more than the run has
    separation      a client that takes part in round t stays out until round t + separation
    sampling_probability  with which a client is drawn into a round, on its own and in secret; 1: no secret
    threshold       fewest uploads of which secure aggregation opens the sum; None: those of all participants
    bands           of the square root of `central-mf`; None: the separation
    carried_to_residual   variance that is carried to the next round, in units of what stays; None: what leaves least
                    noise in the model
    participants    of every round, where noise is carried from one to the next; None: those of the first
    pattern         rounds of a client are exactly (`cyclic`) or at least (`any`) the separation apart
    dropout         share of the participants that is expected to drop out, for which it is planned how much to carry
    closing         one more round, without data, takes out what the last one carried
    on_grid         the protocol runs it: a part of delta pays for noise on a grid. Some methods always keep that part
    committee       members that repair a round; None: all its participants

    >>> plan = Plan(clip=0.5, epsilon=3.0, participations=6, kappa=4.0)
    >>> plan.calibrated, plan.kind.shares_noise
    (True, True)
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
    colluders: int = 0
    revealed: int = 0
    dropped: int = 0
    attempts: int = 1
    horizon: int | None = None
    chain_rounds: int | None = None
    separation: int = 1
    sampling_probability: float = 1.0
    threshold: int | None = None
    bands: int | None = None
    carried_to_residual: float | None = None
    participants: int | None = None
    pattern: str = "cyclic"
    dropout: float = 0.0
    closing: bool = False
    on_grid: bool = False
    committee: int | None = None

    def __post_init__(self) -> None:
        choices: dict[str, Iterable[str]] = {
            "method": METHODS,
            "unit": UNITS,
            "relation": RELATIONS,
            "mechanism": MECHANISMS,
            "graph": GRAPHS,
            "distortion": DISTORTIONS,
            "pattern": PATTERNS,
        }
        for field, allowed in choices.items():
            value = getattr(self, field)
            require_one_of(value, allowed, field=field)
        for field in ("clip", "kappa", "learning_rate"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"must be a finite number above 0, not {value!r}", field=field)
        for field in _COUNTS:
            value = getattr(self, field)
            if value is not None and not 1 <= value < math.inf:
                raise ConfigError(f"must be at least 1, not {value}", field=field)
        if not 0.0 < self.sampling_probability <= 1.0:
            raise ConfigError(
                f"must lie in (0, 1], not {self.sampling_probability!r}", field="sampling_probability"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"must lie in [0, 1), not {self.dropout!r}", field="dropout")
        carried = self.carried_to_residual
        if carried is not None and not (math.isfinite(carried) and carried >= 0.0):
            raise ConfigError(
                f"must be finite and not negative, not {carried!r}", field="carried_to_residual"
            )
        if not (math.isfinite(self.neighbours) and self.neighbours >= 1.0):
            raise ConfigError(
                f"each client must send at least one unit share, not {self.neighbours!r}", field="neighbours"
            )
        Corruption(colluders=self.colluders, revealed=self.revealed, dropped=self.dropped)
        if self.colluders and not 0.0 < self.delta < 1.0:
            raise ConfigError(f"must lie in (0, 1), not {self.delta!r}", field="delta")
        if self.unit == "record" and self.learning_rate is None:
            raise ConfigError(
                "the record unit needs the rate of the one local step",
                field="learning_rate",
                hint="set learning_rate",
            )
        for tau2 in self.tau2 if isinstance(self.tau2, tuple) else (self.tau2 or 0.0,):
            if not (math.isfinite(tau2) and tau2 >= 0.0):
                raise ConfigError(f"must be finite and not negative, not {tau2!r}", field="tau2")
        if self.tau2 is None and not distortion_named(self.distortion).calibratable:
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
        self.kind.check(self)

    @property
    def planned_rounds(self) -> int:
        """Rounds of the whole run."""
        return self.participations * self.separation if self.horizon is None else self.horizon

    @property
    def kind(self) -> Method:
        """The method itself: what noise is added where, and what that is worth."""
        return method_named(self.method)

    @property
    def private(self) -> bool:
        """Whether any noise is added."""
        return self.kind.private

    @property
    def heuristic(self) -> bool:
        """Whether the sensitivity is a heuristic, so that no number here is a guarantee."""
        return self.unit == "nbafl" or (self.mechanism == "classical" and self.allow_invalid)

    @property
    def calibrated(self) -> bool:
        """Whether the joint-view target is met by construction, so that it can serve as a budget."""
        return self.private and not self.heuristic and self.kind.calibrated(self)

    @property
    def possible_rounds(self) -> int:
        """The most rounds among which a server could choose those that it shows to a client."""
        committed = 1 if self.horizon is None else self.horizon + self.closing
        return max(self.participations, committed, self.chain_rounds or 1)

    @property
    def graphs(self) -> int:
        """The most graphs among which a server could look for one that suits its colluders."""
        return self.possible_rounds * self.attempts

    @property
    def failure(self) -> float:
        """The probability, per client and graph, with which a bound on colluders may fail.

        Those among a client's neighbours on a sparse graph, and those in a committee, are bounded by quantiles, and a
        part of delta pays for the graphs on which one fails. Where everyone is neighbour and member, or where the
        colluders may sit in one group, nothing can fail; nor can it where no noise is shared.
        """
        everywhere = self._everyone_near and self.committee is None
        if everywhere or not self.kind.shares_noise or not self.colluders:
            return 0.0
        return FAILURE_SHARE * self.delta / self.graphs

    @property
    def _everyone_near(self) -> bool:
        return self.graph in ("complete", "coalition")

    @property
    def corruption(self) -> Corruption:
        """What is assumed of the other participants."""
        failure = 0.0
        if not self._everyone_near:
            failure, _ = split_failure(self.failure, drawn=self.committee is not None)
        return Corruption(
            colluders=self.colluders, revealed=self.revealed, dropped=self.dropped, failure=failure
        )

    @property
    def failing_delta(self) -> float:
        """The part of delta that pays for graphs on which a collusion bound fails."""
        return self.graphs * self.failure

    @property
    def grid_delta(self) -> float:
        """The part of delta that pays for noise on a grid, from a real sampler, where a protocol may run the plan."""
        paid = self.kind.has_protocol and (self.on_grid or self.kind.pays_for_grid)
        return GRID_SHARE * self.delta if paid and self.calibrated else 0.0

    @property
    def gaussian_delta(self) -> float:
        """What is left of delta for the noise itself, once the other parts are paid for."""
        return self.delta - self.failing_delta - self.grid_delta

    def sensitivity(self, weights: ArrayLike, records: ArrayLike) -> FloatArray:
        """How far one client (or one record) can move its contribution `p_k x_k`, in L2 norm.

        weights  p_k, one or one per client
        records  d_k, how many records each holds; not needed for the client unit
        """
        p = np.asarray(weights, dtype=np.float64)
        d = np.asarray(records, dtype=np.float64)
        if self.unit == "client":
            return client_sensitivity(p, self.clip, self.relation)
        if self.unit == "record":
            assert self.learning_rate is not None
            return 2.0 * self.learning_rate * p * self.clip / d
        return 2.0 * self.clip / d

    def budget(self, clients: int) -> FloatArray:
        """B_k: the mu of each client's whole target, composed over its participations."""
        return self.round_mu(np.arange(clients)) * math.sqrt(self.participations)

    def round_mu(self, participants: IntArray) -> FloatArray:
        """The mu each participant may spend in one round."""
        epsilons = of_participants(self.epsilon, participants, "epsilon")
        known = {epsilon: self._round_mu_of(epsilon) for epsilon in set(epsilons)}
        return np.array([known[epsilon] for epsilon in epsilons])

    def _round_mu_of(self, epsilon: float) -> float:
        if (mu := self.kind.round_mu(self, epsilon)) is not None:
            return mu
        if self.mechanism == "classical":
            sigma = gaussian_sigma(
                epsilon, self.gaussian_delta, 1.0, mechanism="classical", allow_invalid=self.allow_invalid
            )
            return 1.0 / (sigma * math.sqrt(self.participations))
        return gdp_mu(epsilon, self.gaussian_delta) / math.sqrt(self.participations)

    def committed(self, participants: int) -> Committed:
        """The noise of the whole run and what its rounds cost, where noise is carried over; for rounds of that size."""
        if self.participants not in (None, participants):
            raise ConfigError(
                f"{participants} clients in a round of a run that was planned for {self.participants}",
                field="participants",
                hint="noise that is carried from round to round needs rounds of one size",
            )
        if isinstance(self.epsilon, tuple) or isinstance(self.tau2, tuple):
            raise ConfigError("carried shares have one target for all clients", field="epsilon")
        return committed_run(self, participants)

    def for_round(
        self,
        participants: ArrayLike,
        *,
        weights: ArrayLike,
        records: ArrayLike,
        beacon: bytes,
        number: int = 0,
    ) -> RoundPlan:
        """The noise of one round for these participants, and what it promises them.

        participants  the clients that take part, by number
        weights       p_k, with which the update of each enters the sum; one number, or one per participant
        records       d_k, likewise; public and fixed where the unit is a record
        beacon        public randomness from which the share graph follows
        number        of the round, from 0, where the noise of rounds is not alike
        """
        members = np.asarray(participants, dtype=np.int64)
        if members.ndim != 1 or members.size == 0 or np.unique(members).size != members.size:
            raise ConfigError("needs at least one client, and each one once", field="participants")
        p = _per_participant(weights, members.size, "weights", positive=self.private)
        d = _per_participant(records, members.size, "records", positive=self.unit != "client")
        moved = self.sensitivity(p, d)
        own = np.zeros(members.size)
        if self.private:
            own = (moved / self.round_mu(members)) ** 2
        shares = self.kind.share(self, members, own, beacon)
        return RoundPlan(
            plan=self,
            participants=members,
            sensitivity=moved,
            own_variance=own,
            graph=shares.graph,
            unit_variance=shares.unit_variance,
            tau2=shares.tau2,
            opponent=shares.opponent,
            number=number,
        )


def _per_participant(values: ArrayLike, size: int, field: str, *, positive: bool) -> FloatArray:
    given = np.asarray(values, dtype=np.float64)
    if given.shape not in ((), (size,)):
        raise ConfigError(f"needs one number, or one per participant ({size})", field=field)
    if not np.all(np.isfinite(given)) or np.any(given < 0.0) or (positive and np.any(given == 0.0)):
        raise ConfigError(f"must be finite and {'above 0' if positive else 'not negative'}", field=field)
    return np.broadcast_to(given, (size,))
