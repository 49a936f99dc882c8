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
from niss.methods.niss import Niss, draw_graph
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


class NissCarried(Niss):
    """A client of round t also adds noise that a client of round t + 1 takes out again.

    Over the whole run a client with the participations P spends `mu^2 = Delta' G[P, P] Delta`, `G` the inverse of the
    covariance over all uploads of all rounds (`niss.views.carried`). A participation is charged what it adds to that,
    with G of the whole committed run at its worst; the budget covers the dearest allowed pattern. The model has the
    fresh noise of all rounds, and of what was carried only the latest: less than a trusted server with independent
    noise leaves in it.

    kappa, neighbours, graph  as in `niss`; everyone shares with everyone unless the graph is `regular`
    carried_neighbours        unit shares that a client carries to the next cohort; None: to everyone
    carried_to_residual       w / r; None: what leaves least noise in the model
    tau2                      given: that much fresh noise, whatever is promised then
    closing                   one more round without data takes out what the last one carried

    Dropouts: a lost client's shares stay in the model (`tolerate`), or are taken out (`repair`): those within the
    round, those carried to it, and one round later those it would have carried on. Clients that may be called dropped
    count like colluders: the server knows their shares. A client that is called dropped although it uploaded still has
    its self-mask, of the variance that its charge covers.
    """

    name = "niss-carried"
    has_protocol = False
    whole_run = True
    carries = True
    settings = Niss.settings | {"carried_neighbours", "carried_to_residual", "closing"}
    samplings = ("cyclic", "uniform")
    defaults = MappingProxyType({"graph": "complete", "kappa": 20.0})

    def check(self, plan: Plan) -> None:
        if plan.unit != "client" or isinstance(plan.epsilon, tuple) or isinstance(plan.tau2, tuple):
            raise ConfigError(
                "carried shares are planned for whole clients with one target for all",
                field="unit" if plan.unit != "client" else "epsilon",
                hint="use unit = 'client', one epsilon and one tau2",
            )
        if plan.uniform:
            raise ConfigError(
                "noise that is carried to the next round cannot be uniform: this round would have no sum",
                field="shares",
                hint="use shares = 'gaussian'",
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
        if _sparse(plan) and (plan.colluders or plan.dropped):
            raise ConfigError(
                "on sparse graphs carried shares are not accounted for against colluders or repairs: delta would have "
                "to pay for graphs on which too many of them sit around a client",
                field="graph",
                hint="use graph = 'complete' without carried_neighbours",
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
        graph = _everyone(size) if plan.graph == "complete" else self._well_connected(plan, size, beacon)
        tau2 = run.residual * square / (size * sent)
        return Shares(graph, sent / degree, np.full(size, tau2))

    def _well_connected(self, plan: Plan, size: int, beacon: bytes) -> ShareGraph:
        """The first graph after the beacon that is as well connected as the plan assumes; all of it is public."""
        run = plan.committed(size)
        promised = None if run.promise is None else run.promise.connectivity.spatial
        for attempt in range(_ATTEMPTS):
            graph = draw_graph(
                plan.graph, range(size), degree=plan.neighbours, beacon=_again(beacon, attempt)
            )
            if promised is None or _second(graph) >= promised * float(graph.laplacian().diagonal().min()):
                return graph
        raise ConfigError("no well connected graph was drawn", field="neighbours", hint="use more neighbours")

    def carried_graph(
        self, plan: Plan, lists: tuple[IntArray, IntArray], beacon: bytes
    ) -> CarriedGraph | None:
        """Who of the first list carries noise to whom of the second; None: everyone to everyone."""
        if plan.carried_neighbours is None:
            return None
        size = lists[0].size
        run = plan.committed(size)
        promised = 1.0 if run.promise is None else run.promise.connectivity.carried or 0.0
        hashes = (_list_hash(lists[0]), _list_hash(lists[1]))
        for attempt in range(_ATTEMPTS):
            graph = CarriedGraph.draw(
                (size, lists[1].size),
                degree=plan.carried_neighbours,
                beacon=_again(beacon, attempt),
                lists=hashes,
            )
            matrix = graph.matrix() / plan.carried_neighbours
            if float(np.linalg.norm(matrix - 1.0 / size, 2)) <= promised:
                return graph
        raise ConfigError(
            "no well connected carried graph was drawn", field="carried_neighbours", hint="use more"
        )

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
        if _sparse(round_plan.plan):
            super().add_client_noise(uploads, round_plan, stream, edges, keep_factors=keep_factors)
            self._add_carried(uploads, round_plan, before, after)
            return round_plan
        seats = np.arange(size)
        if edges is not None:
            seats = np.setdiff1d(seats, _lost(edges))
        count, share = seats.size, self._share(round_plan)
        fresh = float(round_plan.residual_variance[0])
        weight = float(round_plan.graph.weights[0]) if round_plan.graph.weights.size else 0.0
        spread = 2.0 * count * weight * round_plan.unit_variance + fresh
        common: list[Common] = [(math.sqrt(fresh / count), stream.child("residual"))]
        if after is not None and share:
            spread += size * share
            common.append((math.sqrt(count * size * share) / count, after.stream.child("carried")))
        if before is not None and share:
            senders = _counted(before, size)
            spread += senders * share
            common.append((-math.sqrt(senders * size * share) / count, before.stream.child("carried")))
        uploads.add_spread(seats, spread, common, stream)
        return round_plan

    def _add_carried(
        self, uploads: UploadRows, round_plan: RoundPlan, before: Gap | None, after: Gap | None
    ) -> None:
        """Edge by edge, each from its own stream."""
        unit = self._share(round_plan)
        if not unit:
            return
        for gap, sign in ((after, 1.0), (before, -1.0)):
            if gap is None:
                continue
            graph = self._graph(gap, round_plan)
            scales = sign * np.sqrt(unit * graph.weights)
            ends = graph.senders if sign > 0 else graph.receivers
            streams = [
                gap.stream.child("carried", int(a), int(b))
                for a, b in zip(graph.senders, graph.receivers, strict=True)
            ]
            uploads.add_edge_noise(ends, scales, streams)

    def _gaps(self, round_plan: RoundPlan, stream: SimStream) -> tuple[Gap | None, Gap | None]:
        """To the rounds before and after; where nothing is known of them, they are as planned."""
        if round_plan.carrying is not None:
            return round_plan.carrying.before, round_plan.carrying.after
        plan, number = round_plan.plan, round_plan.number
        return (
            Gap(stream.child("gap", number - 1)) if number else None,
            Gap(stream.child("gap", number)) if number + 1 < plan.planned_rounds + plan.closing else None,
        )

    def _graph(self, gap: Gap, round_plan: RoundPlan) -> CarriedGraph:
        size = round_plan.participants.size
        return gap.graph if gap.graph is not None else CarriedGraph.complete((size, size))

    def _share(self, round_plan: RoundPlan) -> float:
        """Variance of a carried share of weight 1."""
        plan, size = round_plan.plan, round_plan.participants.size
        square = _square(plan, round_plan.own_variance)
        return plan.committed(size).carried * square / (size * (plan.carried_neighbours or size))

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
        """Colluders are in the plan of the whole run, exactly: on complete graphs they are all alike."""

    def variance_against(self, round_plan: RoundPlan, colluders: Collection[int]) -> FloatArray:
        raise ConfigError(
            "the claim of niss-carried is about a whole run, not about one of its rounds",
            field="method",
            hint="use niss.views.run_mu2 on the graphs of all rounds",
        )

    def marginal_variance(self, round_plan: RoundPlan) -> FloatArray:
        before, after = self._gaps(round_plan, SimStream(0))
        touching = (before is not None) + (after is not None)
        degree = round_plan.plan.carried_neighbours or round_plan.participants.size
        return super().marginal_variance(round_plan) + touching * degree * self._share(round_plan)

    def left_over_variance(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        """What shares within the round and fresh noise leave in its sum, what is carried on, and what is taken out."""
        return (
            super().left_over_variance(round_plan, absent, repaired=repaired)
            + self.under_way(round_plan, absent, repaired=repaired)
            + self._taken_out(round_plan, absent, repaired)[0]
        )

    def model_variance_change(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        """The same, but for what is taken out: of the model's variance it takes away twice what both rounds share."""
        both = self._taken_out(round_plan, absent, repaired)[1]
        return self.left_over_variance(round_plan, absent, repaired=repaired) - 2.0 * both

    def under_way(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        after = self._gaps(round_plan, SimStream(0))[1]
        if after is None:
            return 0.0
        degree = round_plan.plan.carried_neighbours or round_plan.participants.size
        return (round_plan.participants.size - len(absent)) * degree * self._share(round_plan)

    def _taken_out(
        self, round_plan: RoundPlan, absent: Collection[int], repaired: bool
    ) -> tuple[float, float]:
        """Variance of what this round's sum takes out, and of the part that the round before had added."""
        before, size = self._gaps(round_plan, SimStream(0))[0], round_plan.participants.size
        if before is None:
            return 0.0, 0.0
        share, here = self._share(round_plan), size - len(absent)
        added = size - len(before.absent)
        if before.graph is None:
            receivers = size if repaired else here
            return _counted(before, size) * receivers * share, added * receivers * share
        uploads = ~np.isin(before.graph.receivers, list(absent))
        both = uploads & ~np.isin(before.graph.senders, before.absent)
        weights = before.graph.weights
        return share * float(weights[uploads].sum()), share * float(weights[both].sum())

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
            worst = run.promise.worst.rounds
            caveats.append(
                f"The budget is what the costliest allowed participations cost, in the rounds "
                f"{', '.join(str(number + 1) for number in worst)}; ending early is safe, going on past round "
                f"{plan.planned_rounds} is a new run."
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


def _second(graph: ShareGraph) -> float:
    return float(np.linalg.eigvalsh(graph.laplacian())[1])


def _again(beacon: bytes, attempt: int) -> bytes:
    return beacon if attempt == 0 else hashlib.sha256(beacon + bytes([attempt])).digest()


def _list_hash(participants: IntArray) -> bytes:
    return hashlib.sha256(participants.astype("<i8").tobytes()).digest()
