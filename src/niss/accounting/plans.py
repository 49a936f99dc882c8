"""How clients are protected, and what that is worth: a `Plan` for a run, a `RoundPlan` for each of its rounds.

A `Plan` fixes clip, noise, graph, distortion and target together. `Plan.for_round` turns it into the
numbers of one round, on the graph that is really used, together with what they promise; the noise that
runs and the claim that is made come from the same `RoundPlan`. What the noise is, and what it is worth, is
up to the method (`niss.methods`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import InstanceOf
from typing_extensions import Doc

from niss.accounting.asked import Horizon, SettledMode, Sharing, Target, Trust, method_names, settled_mode
from niss.accounting.assumed import Assumed, assumed_in
from niss.accounting.calibration import committed_run
from niss.accounting.committed import Committed
from niss.accounting.ledger import Amount
from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism import Slots, classical_sigma, gdp_mu, poisson_multiplier
from niss.mechanism.shares import Edges, SomeEdges, per_client
from niss.methods import (
    METHODS,
    CarriedEdges,
    Method,
    client_sensitivity,
    distortion_named,
    mu_of,
    of_participants,
)
from niss.methods.base import Needs, require_needs
from niss.settings import NotNegative, OneOf, Positive, settings
from niss.views import EXACT_LIMIT, WorstCase, effective_variance

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


# The parts of delta that pay for bounds on colluders among neighbours and in committees, and for noise on a grid.
FAILURE_SHARE = 0.1
GRID_SHARE = 0.02
# What the claim for a record is proved for, and what has no meaning elsewhere.
_RECORD: Needs = {
    "relation": ("zero-out", "a record is added or removed; of one that is replaced too little is proved"),
    "epsilon": (float, "the records of all silos have one target"),
    "mechanism": ("analytic", "it is calibrated by dp-accounting"),
}
_NO_RECORD: Needs = dict.fromkeys(("batch", "records"), (None, "only records are drawn, in unit = 'record'"))


@settings
class Plan(Trust, Horizon, Sharing, Target):
    """How the clients of a federated run are protected, in four parts: `Target`, `Sharing`, `Horizon` and `Trust`.

    The names of all four are given side by side; what they mean stands beside each of them, as on the page of settings.
    Besides, a plan has its method, what the method alone needs, and numbers that a planner may choose.

    >>> plan = Plan(clip=0.5, epsilon=3.0, participations=6, kappa=4.0)
    >>> plan.calibrated, plan.kind.shares_noise
    (True, True)
    """

    method: Annotated[
        Annotated[str, OneOf(method_names)] | InstanceOf[Method],
        Doc(
            "`fedavg` (no noise), `alone` (one client trains by itself), `dp-fedavg` (own noise, not cancelled), "
            "`central-dp` (a trusted server adds the noise once), `central-dp-sampled` (and draws participants in "
            "secret), `central-mf` (and correlates it over rounds), `secagg-ddg` (secure aggregation, every client "
            "adds a part of the noise), `niss` (noise shares that cancel), `niss-carried` (and noise carried from one "
            "round to the next); or the method itself, with settings of its own: `CentralMf(bands=5)`."
        ),
    ] = "niss"
    kappa: Annotated[Positive, Doc("Strength of the shares: v sigma^2 = kappa sigma_k^2.")] = 1.0
    tau2: Annotated[
        NotNegative | tuple[NotNegative, ...] | None,
        Doc("Distortion of received shares; none: calibrated for the joint view."),
    ] = None
    carried_to_residual: Annotated[
        NotNegative | None,
        Doc("Variance that is carried to the next round, over what stays; none: what leaves least noise."),
    ] = None
    closing: Annotated[bool, Doc("One more round, without data, takes out what the last one carried.")] = (
        False
    )

    def __post_init__(self) -> None:
        record = self.unit == "record"
        require_needs(_RECORD if record else _NO_RECORD, vars(self), who=f"unit {self.unit!r}")
        for name in ("batch", "records") if record else ():
            if getattr(self, name) is None:
                raise ConfigError(
                    "is missing, and the record unit needs it",
                    field=name,
                    hint="for example batch = 0.05, records = 60000: the sum is divided by batch x records",
                )
        if self.tau2 is None and not distortion_named(self.distortion).additive:
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
    def turns(self) -> int:
        """The rounds of a client over which the target is composed: as many as asked, or as the run has room for."""
        if self.participations != "planned":
            return self.participations
        return math.ceil((self.horizon or 1) / self.separation)

    @property
    def settled_mode(self) -> SettledMode:
        """What happens to the noise of clients that drop out: as asked, or as usual. Who knows a round's size may
        choose a better one where it is left to be planned."""
        return settled_mode(self.mode, self.unit)

    @property
    def planned_rounds(self) -> int:
        """Rounds of the whole run."""
        return self.turns * self.separation if self.horizon is None else self.horizon

    @property
    def kind(self) -> Method:
        """The method itself: what noise is added where, and what that is worth."""
        return METHODS[self.method] if isinstance(self.method, str) else self.method

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
        """The most rounds among which a server could choose those that it shows to a client: all of the run's."""
        return max(self.turns, self.planned_rounds + self.closing, self.chain_rounds or 1)

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
        if self.everyone_near or not self.kind.shares_noise or not self.collusion:
            return 0.0
        return FAILURE_SHARE * self.delta / self.graphs

    @property
    def everyone_near(self) -> bool:
        """Whether everyone shares with everyone, or at least may with all who could collude."""
        return self.graph in ("complete", "coalition")

    def assumed(self, participants: int) -> Assumed:
        """What is assumed of the participants of a round of that size, and who repairs it."""
        return assumed_in(self, participants)

    @property
    def failing_delta(self) -> float:
        """The part of delta that pays for graphs on which a collusion bound fails."""
        return self.graphs * self.failure

    @property
    def grid_delta(self) -> float:
        """The part of delta that pays for noise on a grid, from a real sampler, where a protocol may run the plan."""
        return GRID_SHARE * self.delta if self.kind.has_protocol and self.calibrated else 0.0

    @property
    def gaussian_delta(self) -> float:
        """What is left of delta for the noise itself, once the other parts are paid for."""
        return self.delta - self.failing_delta - self.grid_delta

    def sensitivity(self, weights: ArrayLike, records: ArrayLike) -> FloatArray:
        """How far one client (or one record) can move its contribution `p_k x_k`, in L2 norm.

        Where records are hidden, x_k is the sum of the clipped gradients of a batch: one record more or less moves it
        by at most the clip, as a client that becomes zero moves an update.

        weights  p_k, one or one per client
        records  d_k, how many records each holds; only the heuristic `nbafl` asks
        """
        if self.unit == "nbafl":
            return 2.0 * self.clip / np.asarray(records, dtype=np.float64)
        return client_sensitivity(np.asarray(weights, dtype=np.float64), self.clip, self.relation)

    def divisor(self, participants: int) -> float:
        """What a round's sum is divided by, `1 / p_k`: its participants, or the planned batch of all silos, `q N`.

        Neither depends on what anybody holds or drew.
        """
        return (
            float(participants) if self.batch is None or self.records is None else self.batch * self.records
        )

    def budget(self, clients: int) -> FloatArray | Slots:
        """B_k: the mu of each client's whole target, composed over its participations; for records the slots of all."""
        if self.batch is None:
            return self.round_mu(np.arange(clients)) * math.sqrt(self.turns)
        return Slots.of((self.batch, 1.0 / float(self.round_mu(np.arange(1))[0]), self.turns))

    @property
    def whole(self) -> Amount:
        """The budget of a client where all have the same."""
        budget = self.budget(1)
        return budget if isinstance(budget, Slots) else float(budget[0])

    def round_mu(self, participants: IntArray) -> FloatArray:
        """The mu each participant may spend in one round; in the record unit 1 / z, of a record that is in its batch.

        There z is the least noise multiplier under which `participations` rounds with secret batches keep the target.
        An attempt that is charged is one of them.
        """
        epsilons = of_participants(self.epsilon, participants, "epsilon")
        known = {epsilon: self._round_mu_of(epsilon) for epsilon in set(epsilons)}
        return np.array([known[epsilon] for epsilon in epsilons])

    def _round_mu_of(self, epsilon: float) -> float:
        if (mu := self.kind.round_mu(self, epsilon)) is not None:
            return mu
        if self.mechanism == "classical":
            sigma = classical_sigma(epsilon, self.gaussian_delta, allow_invalid=self.allow_invalid)
            return 1.0 / (sigma * math.sqrt(self.turns))
        if self.batch is not None:
            return 1.0 / poisson_multiplier(epsilon, self.gaussian_delta, self.batch, self.turns)
        return gdp_mu(epsilon, self.gaussian_delta) / math.sqrt(self.turns)

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
        records       d_k, likewise; only the heuristic `nbafl` asks
        beacon        public randomness from which the share graph follows
        number        of the round, from 0, where the noise of rounds is not alike
        """
        members = np.asarray(participants, dtype=np.int64)
        if members.ndim != 1 or members.size == 0 or np.unique(members).size != members.size:
            raise ConfigError("needs at least one client, and each one once", field="participants")
        p, d = per_client(weights, members.size, "weights"), per_client(records, members.size, "records")
        if self.private and not p.all():
            raise ConfigError("must be above 0", field="weights")
        if self.unit == "nbafl" and not d.all():
            raise ConfigError("must be above 0", field="records")
        moved = self.sensitivity(p, d)
        own = np.zeros(members.size)
        if self.private:
            own = (moved / self.round_mu(members)) ** 2
        alone = RoundPlan(
            plan=self,
            participants=members,
            sensitivity=moved,
            own_variance=own,
            graph=ShareGraph(members.size, []),
            tau2=np.zeros(members.size),
            number=number,
        )
        return self.kind.share(alone, beacon)


@dataclass(frozen=True)
class Balance:
    """How unequally shares were received, as multiples of what was sent, and what the worst-off client kept.

    `kept` is its effective variance as a part of the worst-off client's on a balanced graph of the same
    size; None where there is nothing to compare, or too much to do it exactly.
    """

    least_received: float
    most_received: float
    kept: float | None


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The numbers of one round: what is added where, and what that promises to whom.

    All arrays are in the order of `participants`. Variances are per coordinate of the upload `p_k x_k`.
    Methods that share no noise have a graph without edges.

    sensitivity    how far each can move its upload, in L2 norm
    own_variance   sigma_k^2, the noise each would need if it stood alone
    graph          who shares with whom, by seat
    unit_variance  sigma^2, the variance of a share of weight 1
    tau2           distortion of the shares each receives
    scales         the factors that a multiplicative distortion drew, once they are drawn and kept
    opponent       the worst case for which tau2 was calibrated
    number         of the round, from 0
    absent         seats that never uploaded
    repaired       whether their shares were taken out of the sum again
    before, after  what is carried to this round and from it; None: nothing
    history        participants of all earlier rounds, where noise is carried; None: nothing is known of other rounds
    keep_factors   whether to keep a distortion's factors per coordinate; None: where they can be accounted for
    """

    plan: Plan
    participants: IntArray
    sensitivity: FloatArray
    own_variance: FloatArray
    graph: ShareGraph
    unit_variance: float = 0.0
    tau2: FloatArray
    scales: FloatArray | None = None
    opponent: WorstCase | None = None
    number: int = 0
    absent: tuple[int, ...] = ()
    repaired: bool = False
    before: CarriedEdges | None = None
    after: CarriedEdges | None = None
    history: tuple[IntArray, ...] | None = None
    keep_factors: bool | None = None

    def with_lost(self, absent: Collection[int], *, repaired: bool = False) -> RoundPlan:
        """The same round without the uploads of these seats."""
        return replace(self, absent=tuple(sorted(absent)), repaired=repaired)

    @property
    def here(self) -> IntArray:
        """The seats whose uploads arrived."""
        return np.delete(np.arange(self.participants.size), self.absent)

    @property
    def edges(self) -> Edges:
        """The edges that are left: all, or after a repair those between survivors.

        Each has the same noise with and without the others.
        """
        if not (self.absent and self.repaired):
            return self.graph
        lost = np.zeros(self.graph.size, dtype=bool)
        lost[list(self.absent)] = True
        return SomeEdges.of(self.graph, ~(lost[self.graph.senders] | lost[self.graph.receivers]))

    @property
    def aggregate_variance(self) -> float:
        """Predicted noise variance of the sum of all uploads, with what a trusted server adds."""
        return self.plan.kind.left_over_variance(self.with_lost(()))

    @property
    def residual_variance(self) -> FloatArray:
        """What each client's distortion adds, `tau_k^2 sigma^2 in_k`."""
        return self.tau2 * self.unit_variance * self.graph.in_weight

    @cached_property
    def joint_variance(self) -> FloatArray | None:
        """Effective variance per client against a server that sees everything; None: not computed.

        Where the server is trusted, the view is that of anyone who sees the released model.
        """
        return self.plan.kind.joint_variance(self)

    @cached_property
    def worst(self) -> WorstCase | None:
        """The worst case over colluders; None where nobody is assumed to collude, or none is computed.

        The worst ratio of effective to wanted variance found at any client is charged to every client.
        """
        return self.plan.kind.worst(self)

    def balance(self) -> Balance | None:
        """What an unbalanced graph costs; None where every client receives as much as it sends."""
        if self.graph.balanced:
            return None
        received = self.graph.in_weight / self.graph.out_weight
        if self.graph.size > EXACT_LIMIT:
            return Balance(float(received.min()), float(received.max()), None)
        regular = ShareGraph.regular(
            self.participants.size, degree=self.plan.neighbours, beacon=self.graph.digest()
        )
        residual = self.tau2 * self.unit_variance * regular.in_weight
        fair = effective_variance(regular, unit_variance=self.unit_variance, residual_variance=residual)
        # Nobody colludes on either side of the comparison: what is measured is the graph.
        honest = replace(self.plan, collusion=0.0, mode="tolerate")
        trusting = replace(self, plan=honest, opponent=None).joint_variance
        kept = None
        if trusting is not None and fair.min() > 0.0:
            kept = float(trusting.min() / fair.min())
        return Balance(float(received.min()), float(received.max()), kept)

    @property
    def marginal_variance(self) -> FloatArray:
        """Noise variance of one upload looked at alone: the paper's view."""
        return self.plan.kind.marginal_variance(self)

    @property
    def joint_mu(self) -> FloatArray:
        """mu of the joint view; infinite where there is no guarantee or none was computed."""
        return self.plan.kind.joint_mu(self)

    @property
    def marginal_mu(self) -> FloatArray:
        """mu of the marginal view; infinite where an upload carries no noise."""
        return mu_of(self.sensitivity, self.marginal_variance)
