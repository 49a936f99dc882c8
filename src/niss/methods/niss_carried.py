"""NISS with carried shares: noise cancels between the clients of a round, and between one round and the next."""

# ruff: noqa: ARG002  (a method ignores what it does not need to know)

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from niss.errors import ConfigError
from niss.graph import ShareGraph
from niss.mechanism.carried import Common
from niss.mechanism.shares import Edges
from niss.methods.base import (
    CarriedEdges,
    FloatArray,
    IntArray,
    Method,
    Shares,
    UploadRows,
    server_adversary,
)
from niss.methods.look import GREEN, Look
from niss.methods.niss import Niss
from niss.randomness import SimStream

if TYPE_CHECKING:
    from niss.accounting.plans import Plan
    from niss.accounting.round_plans import RoundPlan


class NissCarried(Niss):
    """A client of round t also adds noise that a client of round t + 1 takes out again.

    Over the whole run a client with the participations P spends `mu^2 = Delta' G[P, P] Delta`, `G` the inverse of the
    covariance over all uploads of all rounds (`niss.views.run`). A participation is charged what it adds to that,
    with G of the whole committed run at its worst; the budget covers the dearest allowed pattern. The model has the
    fresh noise of all rounds, and of what was carried only the latest: less than a trusted server with independent
    noise leaves in it.

    Everyone shares with everyone, within a round and with the next cohort.

    kappa                as in `niss`
    carried_to_residual  w / r; None: what leaves least noise in the model
    tau2                 given: that much fresh noise, whatever is promised then
    closing              one more round without data takes out what the last one carried

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
    settings = Niss.settings | {"carried_to_residual", "closing"}
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
        if plan.graph != "complete":
            raise ConfigError(
                f"shares are carried where everyone shares with everyone, not on a {plan.graph} graph",
                field="graph",
                hint="use graph = 'complete', or method = 'niss'",
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
        noise = plan.committed(size).noise
        unit = noise.unit * _square(plan, own_variance)
        return Shares(_everyone(size), unit, np.full(size, noise.residual / (noise.neighbours * noise.unit)))

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
        size, share = round_plan.participants.size, self._share(round_plan)
        before, after = self._gaps(round_plan, stream)
        seats = np.arange(size)
        if edges is not None:
            seats = np.setdiff1d(seats, _lost(edges))
        count = seats.size
        fresh = float(round_plan.residual_variance[0])
        weight = float(round_plan.graph.weights[0]) if round_plan.graph.weights.size else 0.0
        spread = 2.0 * count * weight * round_plan.unit_variance + fresh
        common: list[Common] = [(math.sqrt(fresh / count), stream.child("residual"))]
        if after is not None and share:
            spread += size * share
            common.append((math.sqrt(count * size * share) / count, after.stream.child("carried")))
        if before is not None and share:
            senders = before.senders(size)
            spread += senders * share
            common.append((-math.sqrt(senders * size * share) / count, before.stream.child("carried")))
        uploads.add_spread(seats, spread, common, stream)
        return round_plan

    def _gaps(
        self, round_plan: RoundPlan, stream: SimStream | None = None
    ) -> tuple[CarriedEdges | None, CarriedEdges | None]:
        """From the round before and to the one after; where nothing is known of them, they are as planned."""
        if round_plan.carrying is not None:
            return round_plan.carrying.before, round_plan.carrying.after
        plan, number, origin = round_plan.plan, round_plan.number, stream or SimStream(0)
        return (
            CarriedEdges(origin.child("gap", number - 1)) if number else None,
            CarriedEdges(origin.child("gap", number))
            if number + 1 < plan.planned_rounds + plan.closing
            else None,
        )

    def _share(self, round_plan: RoundPlan) -> float:
        """Variance of a carried share, as it is added."""
        plan, size = round_plan.plan, round_plan.participants.size
        return plan.committed(size).noise.carried * _square(plan, round_plan.own_variance) / size

    # What it is worth.

    def joint_variance(self, round_plan: RoundPlan) -> FloatArray | None:
        """Delta^2 over what the participation adds to mu^2: independent noise of that variance would cost as much."""
        plan, size = round_plan.plan, round_plan.participants.size
        run = plan.committed(size)
        if not run.private:
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
        if not run.private:
            return np.full(participants.size, np.inf)
        past = _past(participants, history)
        known = {one: run.cost(number, one) for one in set(past)}
        return np.sqrt([known[one] for one in past])

    def worst(self, round_plan: RoundPlan) -> None:
        """Colluders are in the plan of the whole run, exactly: on complete graphs all are alike."""

    def variance_against(self, round_plan: RoundPlan, colluders: Collection[int]) -> FloatArray:
        raise ConfigError(
            "the claim of niss-carried is about a whole run, not about one of its rounds",
            field="method",
            hint="use niss.views.run_mu2 on the graphs of all rounds",
        )

    def marginal_variance(self, round_plan: RoundPlan) -> FloatArray:
        gaps = sum(edges is not None for edges in self._gaps(round_plan))
        touching = gaps * round_plan.participants.size * self._share(round_plan)
        return super().marginal_variance(round_plan) + touching

    def left_over_variance(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        """What shares within the round and fresh noise leave in its sum, what is carried on, and what is taken out."""
        return (
            super().left_over_variance(round_plan, absent, repaired=repaired)
            + self.under_way(round_plan, absent, repaired=repaired)
            + self._taken_out(round_plan, absent, repaired)[0]
        )

    def earlier_covariances(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> FloatArray:
        """The negative variance of what the round before added and this one takes out."""
        if self._gaps(round_plan)[0] is None:
            return np.zeros(0)
        return np.array([-self._taken_out(round_plan, absent, repaired)[1]])

    def under_way(
        self, round_plan: RoundPlan, absent: Collection[int] = (), *, repaired: bool = False
    ) -> float:
        size = round_plan.participants.size
        carries_on = self._gaps(round_plan)[1] is not None
        return (size - len(absent)) * size * self._share(round_plan) if carries_on else 0.0

    def _taken_out(
        self, round_plan: RoundPlan, absent: Collection[int], repaired: bool
    ) -> tuple[float, float]:
        """The variance of what this round's sum takes out, and of the part of it that was added before."""
        size, before = round_plan.participants.size, self._gaps(round_plan)[0]
        if before is None:
            return 0.0, 0.0
        each = self._share(round_plan) * (size if repaired else size - len(absent))
        return before.senders(size) * each, (size - len(before.absent)) * each

    # What is said about it.

    def adversary(self, plan: Plan) -> str:
        rest = f"exactly {plan.separation}" if plan.pattern == "cyclic" else f"at least {plan.separation}"
        return (
            f"{server_adversary(plan.colluders)}; over a run of {plan.planned_rounds} committed rounds as a whole, for "
            f"clients that take part {rest} round{'s' if plan.separation != 1 else ''} apart"
        )

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        caveats = [*super().caveats(plan)]
        if plan.participants is not None and (run := plan.committed(plan.participants)).private:
            rounds = ", ".join(str(number + 1) for number in run.worst.rounds)
            costliest = f"what the costliest allowed participations cost, in the rounds {rounds}"
            if not run.worst.exact:
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


def _square(plan: Plan, own_variance: FloatArray) -> float:
    """Delta^2 of an upload, from the noise that a client would need alone."""
    return float(own_variance.max()) * float(plan.round_mu(np.zeros(1, dtype=np.int64))[0]) ** 2


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
