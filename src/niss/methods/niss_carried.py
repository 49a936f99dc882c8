"""NISS with carried shares: noise cancels between the clients of a round, and between one round and the next."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from niss.errors import ConfigError
from niss.graph import CarriedGraph, ShareGraph
from niss.mechanism.carried import Common
from niss.mechanism.shares import Edges
from niss.methods.base import (
    FloatArray,
    Gap,
    IntArray,
    Method,
    Shares,
    UploadRows,
    server_adversary,
)
from niss.methods.look import GREEN, Look
from niss.methods.niss import Niss, draw_graph
from niss.randomness import SimStream
from niss.views.carried_floor import within_connectivity

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


class NissCarried(Niss):
    """A client of round t also adds noise that a client of round t + 1 (or a later one) takes out again.

    Over the whole run a client with the participations P spends `mu^2 = Delta' G[P, P] Delta`, `G` the inverse of the
    covariance over all uploads of all rounds (`niss.views.carried`). A participation is charged what it adds to that,
    with G of the whole committed run at its worst; the budget covers the dearest allowed pattern. The model has the
    fresh noise of all rounds, and of what was carried only the latest: less than a trusted server with independent
    noise leaves in it.

    kappa, neighbours, graph  as in `niss`; everyone shares with everyone unless the graph is `regular`
    carried_neighbours        unit shares that a client carries to the next cohort; None: to everyone
    carried_to_residual       w / r; None: what leaves least noise in the model
    lags                      rounds ahead to which noise is carried
    factors                   with which rounds enter the model: whoever takes a share out multiplies it by the ratio of
                              factors of the two rounds, so that it cancels in the model
    tau2                      given: that much fresh noise, whatever is promised then
    closing                   one more round without data takes out what the last one carried

    Dropouts: a lost client's shares stay in the model (`tolerate`), or are taken out (`repair`): those within the
    round, those carried to it, and one round later those it would have carried on. Clients that may be called dropped
    count like colluders: the server knows their shares. A client that is called dropped although it uploaded still has
    its self-mask, of the variance that its charge covers.
    """

    name = "niss-carried"
    look = Look(GREEN, "D")
    pays_for_grid = False
    whole_run = True
    correlates = True
    carries = True
    settings = Niss.settings | {"carried_neighbours", "carried_to_residual", "lags", "closing"}
    samplings = ("cyclic", "uniform")
    defaults = MappingProxyType({"graph": "complete", "kappa": 20.0})

    def check(self, plan: Plan) -> None:
        if plan.unit != "client" or isinstance(plan.epsilon, tuple) or isinstance(plan.tau2, tuple):
            raise ConfigError(
                "carried shares are planned for whole clients with one target for all",
                field="unit" if plan.unit != "client" else "epsilon",
                hint="use unit = 'client', one epsilon and one tau2",
            )
        if plan.mechanism != "analytic" or plan.distortion != "additive":
            raise ConfigError(
                "carried shares need the analytic mechanism and the additive distortion", field="distortion"
            )
        if plan.graph not in ("complete", "regular"):
            raise ConfigError(
                f"carried shares cannot be planned on a {plan.graph} graph",
                field="graph",
                hint="use 'complete' or 'regular'",
            )
        if plan.graph == "regular" and plan.dropped and plan.revealed >= math.ceil(plan.neighbours):
            raise ConfigError(
                f"repairs that may reveal {plan.revealed} edges of a client could strip a client of all its shares",
                field="revealed",
                hint=f"let each send more than {plan.revealed} shares (neighbours), or use graph = 'complete'",
            )
        if plan.lags > 1 and plan.carried_to_residual is not None:
            raise ConfigError(
                "what is carried to each of several rounds is planned, not given",
                field="carried_to_residual",
                hint="leave it out, or use lags = 1",
            )
        if plan.participations < math.ceil(plan.planned_rounds / plan.separation):
            raise ConfigError(
                f"{plan.participations} participations of a client, but its turn comes "
                f"{math.ceil(plan.planned_rounds / plan.separation)} times; whoever stayed out would leave noise in "
                "the model",
                field="participations",
                hint="leave it out, or take fewer rounds",
            )

    def share(self, plan: Plan, participants: IntArray, own_variance: FloatArray, beacon: bytes) -> Shares:
        size = participants.size
        if np.ptp(own_variance) > 1e-9 * own_variance.max():
            raise ConfigError(
                "carried shares are planned for clients of equal weight",
                field="weights",
                hint="use training.weights = 'equal'",
            )
        run, square = plan.committed(size), _square(plan, own_variance)
        sent = run.spatial / 2.0 * square
        degree = plan.neighbours if plan.graph == "regular" else size - 1.0
        graph = _everyone(size) if plan.graph == "complete" else _well_connected(plan, size, beacon)
        tau2 = run.residual * square / (size * sent)
        return Shares(graph, sent / degree, np.full(size, tau2))

    def carried_graph(
        self, plan: Plan, lists: tuple[IntArray, IntArray], beacon: bytes, lag: int = 1
    ) -> CarriedGraph | None:
        """Who of the first list carries noise to whom of the second; None: everyone to everyone."""
        if plan.carried_neighbours is None:
            return None
        return _well_spread(plan, lists[0].size, (_list_hash(lists[0]), _list_hash(lists[1])), beacon, lag)

    # What runs.

    def add_client_noise(
        self,
        uploads: UploadRows,
        round_plan: RoundPlan,
        stream: SimStream,
        edges: Edges | None = None,
        *,
        keep_factors: bool | None = None,
    ) -> RoundPlan:
        """Without `edges` everyone's noise, with them that of the survivors of a repaired round."""
        size = round_plan.participants.size
        before, after = self._gaps(round_plan, stream)
        seats = np.arange(size)
        if edges is not None:
            seats = np.setdiff1d(seats, _lost(edges))
        if _sparse(round_plan.plan):
            super().add_client_noise(uploads, round_plan, stream, edges, keep_factors=keep_factors)
            self._add_carried(uploads, round_plan, before, after, seats)
            return round_plan
        count = seats.size
        fresh = float(round_plan.residual_variance[0])
        weight = float(round_plan.graph.weights[0]) if round_plan.graph.weights.size else 0.0
        spread = 2.0 * count * weight * round_plan.unit_variance + fresh
        common: list[Common] = [(math.sqrt(fresh / count), stream.child("residual"))]
        for gap in after:
            if share := self._share(round_plan, gap.lag):
                spread += size * share
                common.append((math.sqrt(count * size * share) / count, gap.stream.child("carried")))
        for gap in before:
            if share := self._share(round_plan, gap.lag):
                senders, ratio = _counted(gap, size), self._ratio(round_plan, gap)
                spread += senders * share * ratio**2
                taken = -ratio * math.sqrt(senders * size * share) / count
                common.append((taken, gap.stream.child("carried")))
        uploads.add_spread(seats, spread, common, stream)
        return round_plan

    def _add_carried(
        self,
        uploads: UploadRows,
        round_plan: RoundPlan,
        before: Sequence[Gap],
        after: Sequence[Gap],
        seats: IntArray,
    ) -> None:
        """Edge by edge, each from its own stream. What a repair takes out of the sum is taken out of the first seat."""
        for gap in after:
            graph = self._graph(gap, round_plan)
            self._add_edges(uploads, round_plan, gap, graph.senders, 1.0, slice(None))
        for gap in before:
            graph = self._graph(gap, round_plan)
            ends = np.where(np.isin(graph.receivers, seats), graph.receivers, seats[0])
            counted = np.flatnonzero(~(np.isin(graph.senders, gap.absent) & gap.repaired))
            self._add_edges(uploads, round_plan, gap, ends, -self._ratio(round_plan, gap), counted)

    def _add_edges(
        self,
        uploads: UploadRows,
        round_plan: RoundPlan,
        gap: Gap,
        ends: IntArray,
        factor: float,
        which: slice | IntArray,
    ) -> None:
        unit, graph = self._share(round_plan, gap.lag), self._graph(gap, round_plan)
        if unit:
            pairs = zip(graph.senders[which].tolist(), graph.receivers[which].tolist(), strict=True)
            streams = [gap.stream.child("carried", a, b) for a, b in pairs]
            uploads.add_edge_noise(ends[which], factor * np.sqrt(unit * graph.weights[which]), streams)

    def _gaps(
        self, round_plan: RoundPlan, stream: SimStream | None = None
    ) -> tuple[tuple[Gap, ...], tuple[Gap, ...]]:
        """To the rounds before and after; where nothing is known of them, they are as planned."""
        if round_plan.carrying is not None:
            return round_plan.carrying.before, round_plan.carrying.after
        plan, number, origin = round_plan.plan, round_plan.number, stream or SimStream(0)
        lags = range(1, plan.lags + 1)
        rounds = plan.planned_rounds + plan.closing
        return (
            tuple(
                Gap(lag_stream(origin.child("gap", number - lag), lag), lag) for lag in lags if lag <= number
            ),
            tuple(
                Gap(lag_stream(origin.child("gap", number), lag), lag)
                for lag in lags
                if number + lag < rounds
            ),
        )

    def _graph(self, gap: Gap, round_plan: RoundPlan) -> CarriedGraph:
        size = round_plan.participants.size
        return gap.graph if gap.graph is not None else CarriedGraph.complete((size, size), lag=gap.lag)

    def _share(self, round_plan: RoundPlan, lag: int = 1) -> float:
        """Variance of a carried share of weight 1, as it is added."""
        plan, size = round_plan.plan, round_plan.participants.size
        square = _square(plan, round_plan.own_variance)
        carried = plan.committed(size).carried_by_lag[lag - 1]
        return carried * square / (size * (plan.carried_neighbours or size))

    def _ratio(self, round_plan: RoundPlan, gap: Gap) -> float:
        """The factor with which this round takes out what the first round of the gap had added."""
        plan, number = round_plan.plan, round_plan.number
        return plan.factor(number - gap.lag) / plan.factor(number)

    # What it is worth.

    def joint_variance(self, round_plan: RoundPlan) -> FloatArray | None:
        """Delta^2 over what the participation adds to mu^2: independent noise of that variance would cost as much."""
        plan, size = round_plan.plan, round_plan.participants.size
        run = plan.committed(size)
        if run.promise is None:
            return None
        if round_plan.carrying is None:
            costs = np.full(size, run.cost(round_plan.number, None))
        else:
            past = _past(round_plan.participants, round_plan.carrying.history)
            known = {one: run.charge(round_plan.number, one) for one in set(past)}
            costs = np.array([known[one] for one in past])
        return np.asarray(round_plan.sensitivity**2 / costs)

    def joint_mu(self, round_plan: RoundPlan, *, repairing: bool = False) -> FloatArray:
        """In a repair a client that is stripped of its edges keeps a self-mask of the variance that the charge covers,
        so that nothing is to be added here; what repairs reveal of the others is part of the plan."""
        return Method.joint_mu(self, round_plan)

    def planned_mu(
        self, plan: Plan, participants: IntArray, number: int, history: Sequence[IntArray] = ()
    ) -> FloatArray:
        if plan.participants is None:
            return plan.round_mu(participants)
        run = plan.committed(plan.participants)
        if run.promise is None:
            return np.full(participants.size, np.inf)
        past = _past(participants, history)
        known = {one: run.cost(number, one) for one in set(past)}
        return np.sqrt([known[one] for one in past])

    def worst(self, round_plan: RoundPlan) -> None:
        """Colluders are in the plan of the whole run: exactly on complete graphs, where all are alike, else bounded."""

    def variance_against(self, round_plan: RoundPlan, colluders: Collection[int]) -> FloatArray:
        raise ConfigError(
            "the claim of niss-carried is about a whole run, not about one of its rounds",
            field="method",
            hint="use niss.views.run_mu2 on the graphs of all rounds",
        )

    def marginal_variance(self, round_plan: RoundPlan) -> FloatArray:
        before, after = self._gaps(round_plan)
        degree = round_plan.plan.carried_neighbours or round_plan.participants.size
        touching = math.fsum(self._share(round_plan, gap.lag) for gap in after)
        for gap in before:
            touching += self._ratio(round_plan, gap) ** 2 * self._share(round_plan, gap.lag)
        return super().marginal_variance(round_plan) + degree * touching

    def left_over_variance(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        """What shares within the round and fresh noise leave in its sum, what is carried on, and what is taken out."""
        return (
            super().left_over_variance(round_plan, absent, repaired=repaired)
            + self._carried_on(round_plan, len(absent))
            + math.fsum(whole for _, whole, _ in self._taken_out(round_plan, absent, repaired))
        )

    def earlier_covariances(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> FloatArray:
        """`-(a_s / a_t)` times the variance of what round s added and this one takes out."""
        taken = self._taken_out(round_plan, absent, repaired)
        covariances = np.zeros(max((gap.lag for gap, _, _ in taken), default=0))
        for gap, _, both in taken:
            covariances[gap.lag - 1] = -both / self._ratio(round_plan, gap)
        return covariances

    def under_way(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        plan, number = round_plan.plan, round_plan.number
        before, _ = self._gaps(round_plan)
        carried = plan.factor(number) ** 2 * self._carried_on(round_plan, len(absent))
        # With more lags, rounds before this one have carried noise past it.
        rounds = plan.planned_rounds + plan.closing
        for gap in before:
            start = number - gap.lag
            for lag in range(gap.lag + 1, min(plan.lags, rounds - 1 - start) + 1):
                carried += plan.factor(start) ** 2 * self._added(round_plan, lag, len(gap.absent))
        return carried

    def _carried_on(self, round_plan: RoundPlan, absent: int) -> float:
        """What the sum of this round carries on to later ones."""
        after = self._gaps(round_plan)[1]
        return math.fsum(self._added(round_plan, gap.lag, absent) for gap in after)

    def _added(self, round_plan: RoundPlan, lag: int, absent: int) -> float:
        """Variance of what a round that lost so many adds to be taken out `lag` rounds later."""
        size = round_plan.participants.size
        return (size - absent) * (round_plan.plan.carried_neighbours or size) * self._share(round_plan, lag)

    def _taken_out(
        self, round_plan: RoundPlan, absent: Collection[int], repaired: bool
    ) -> list[tuple[Gap, float, float]]:
        """For each gap, the variance of what this round's sum takes out, and of the part that was added before."""
        size, taken = round_plan.participants.size, []
        for gap in self._gaps(round_plan)[0]:
            square = self._ratio(round_plan, gap) ** 2 * self._share(round_plan, gap.lag)
            if gap.graph is None:
                receivers = size if repaired else size - len(absent)
                whole, both = _counted(gap, size) * receivers, (size - len(gap.absent)) * receivers
                taken.append((gap, square * whole, square * both))
                continue
            graph = gap.graph
            added = ~np.isin(graph.senders, gap.absent)
            counted = added | (not gap.repaired)
            if not repaired:
                counted &= ~np.isin(graph.receivers, list(absent))
            weights = [float(graph.weights[edges].sum()) for edges in (counted, counted & added)]
            taken.append((gap, square * weights[0], square * weights[1]))
        return taken

    # What is said about it.

    def adversary(self, plan: Plan) -> str:
        rest = f"exactly {plan.separation}" if plan.pattern == "cyclic" else f"at least {plan.separation}"
        return (
            f"{server_adversary(plan.colluders)}; over a run of {plan.planned_rounds} committed rounds as a whole, for "
            f"clients that take part {rest} round{'s' if plan.separation != 1 else ''} apart"
        )

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        caveats = [*super().caveats(plan)]
        if plan.participants is not None and (run := plan.committed(plan.participants)).promise is not None:
            rounds = ", ".join(str(number + 1) for number in run.promise.worst.rounds)
            costliest = f"what the costliest allowed participations cost, in the rounds {rounds}"
            if not run.promise.worst.exact:
                costliest = "at least what the costliest allowed participations cost"
            caveats.append(
                f"The budget is {costliest}; ending early is safe, going on past round {plan.planned_rounds} is a new "
                "run."
            )
        if plan.separation == 1:
            caveats.append("Clients return at once, so that carrying noise gains nothing.")
        return tuple(caveats)

    def ledger_basis(self, plan: Plan) -> dict[str, Any]:
        return {
            "colluders": plan.colluders,
            "dropped": plan.dropped,
            "rounds": plan.planned_rounds,
            "separation": plan.separation,
            "pattern": plan.pattern,
        }

    def ledger_note(self, basis: Mapping[str, Any]) -> str | None:
        apart = "exactly" if basis.get("pattern") == "cyclic" else "at least"
        return (
            f"{self.name}: a charge is what the participation adds to mu^2 over the whole committed run of "
            f"{basis.get('rounds')} rounds, for clients that take part {apart} {basis.get('separation')} rounds apart; "
            "noise that cancels between rounds makes it larger after earlier participations."
        )


# Graphs drawn until one is as well connected as the plan assumes.
_ATTEMPTS = 20


def lag_stream(stream: SimStream, lag: int) -> SimStream:
    """Where noise for the round `lag` later is drawn from, given where that for the next one is."""
    return stream if lag == 1 else stream.child("lag", lag)


def _sparse(plan: Plan) -> bool:
    return plan.graph == "regular" or plan.carried_neighbours is not None


def _square(plan: Plan, own_variance: FloatArray) -> float:
    """Delta^2 of an upload, from the noise that a client would need alone."""
    return float(own_variance.max()) * float(plan.round_mu(np.zeros(1, dtype=np.int64))[0]) ** 2


def _counted(gap: Gap, size: int) -> int:
    """Clients of the first round whose shares are taken out in the second: those of the lost too, unless repaired."""
    return size - len(gap.absent) if gap.repaired else size


def _past(clients: IntArray, history: Sequence[IntArray]) -> list[tuple[int, ...]]:
    """The earlier rounds of each client."""
    rounds: dict[int, list[int]] = {int(client): [] for client in clients}
    for number, participants in enumerate(history):
        for client in participants.tolist():
            if client in rounds:
                rounds[client].append(number)
    return [tuple(rounds[int(client)]) for client in clients]


def _lost(edges: Edges) -> IntArray:
    """The seats that a repair left without an edge; at least two have some, or nothing would have been repaired."""
    return np.setdiff1d(np.arange(edges.size), edges.senders)


@lru_cache(maxsize=8)
def _everyone(size: int) -> ShareGraph:
    return ShareGraph.complete(size)


# A round's graphs are drawn for its own noise, and again for that of the rounds it carries noise to.
@lru_cache(maxsize=64)
def _well_connected(plan: Plan, size: int, beacon: bytes) -> ShareGraph:
    """The first graph after the beacon that is as well connected as the plan assumes; all of it is public."""
    promise = plan.committed(size).promise
    for attempt in range(_ATTEMPTS):
        graph = draw_graph(plan.graph, range(size), degree=plan.neighbours, beacon=_again(beacon, attempt))
        if promise is None:
            return graph
        assumed = promise.connectivity
        if within_connectivity(graph, assumed.known_neighbours) >= (assumed.spatial or 0.0):
            return graph
    raise ConfigError("no well connected graph was drawn", field="neighbours", hint="use more neighbours")


@lru_cache(maxsize=64)
def _well_spread(plan: Plan, size: int, lists: tuple[bytes, bytes], beacon: bytes, lag: int) -> CarriedGraph:
    """The same for the graph between two rounds."""
    assert plan.carried_neighbours is not None
    promise = plan.committed(size).promise
    for attempt in range(_ATTEMPTS):
        graph = CarriedGraph.draw(
            (size, size),
            degree=plan.carried_neighbours,
            beacon=_again(beacon, attempt),
            lists=lists,
            lag=lag,
        )
        if promise is None or graph.second_singular_value <= (promise.connectivity.carried or 0.0):
            return graph
    raise ConfigError(
        "no well connected carried graph was drawn", field="carried_neighbours", hint="use more"
    )


def _again(beacon: bytes, attempt: int) -> bytes:
    return beacon if attempt == 0 else hashlib.sha256(beacon + bytes([attempt])).digest()


def _list_hash(participants: IntArray) -> bytes:
    return hashlib.sha256(participants.astype("<i8").tobytes()).digest()
