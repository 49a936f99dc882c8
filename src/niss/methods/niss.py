"""NISS: clients share noise over a graph, so that all of it but a small residual cancels in the sum.

With `v sigma^2 = kappa sigma_k^2` of shares sent, the same received, and a distortion tau^2 of what was received,

    one upload alone carries    sigma^2 (out_k + (1 + tau_k^2) in_k)        marginal view, the paper's
    the sum carries             sum_k tau_k^2 sigma^2 in_k                  the paper's Theorem 2
    client k is protected by    1 / (Sigma_H^-1)_kk                         joint view, `niss.views`

where `out_k` and `in_k` are the unit shares client k sends and receives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from niss.claims import digits
from niss.errors import ConfigError
from niss.graph import GRAPHS, Drawing, ShareGraph
from niss.mechanism.shares import Common, distortion_named
from niss.methods.base import (
    CarriedEdges,
    FloatArray,
    IntArray,
    Method,
    UploadRows,
    marginal_variance,
    of_participants,
    server_adversary,
)
from niss.methods.look import BLUE, GREEN, Look
from niss.methods.sharing import everyone, too_sparse, why_no_bound
from niss.randomness import SimStream
from niss.views import Corruption, WorstCase, calibrate_for, effective_variance, exact_limit, worst_case

if TYPE_CHECKING:
    from niss.accounting.plans import Plan, RoundPlan

# Factors per coordinate can be accounted for in rounds of at most this many clients, and this many numbers.
_MOST_CLIENTS, _MOST_FACTORS = 40, 2e7
_TRUST = ("collusion", "dropout", "mode")


class Niss(Method):
    """Noise shares that cancel, with a residual that is calibrated for the joint view unless tau^2 is given.

    With strong shares (a large kappa) the sum carries about `sigma_k^2 / (1 - rho)` per coordinate against a share rho
    of colluders, where a trusted server would add `sigma_k^2`; no client has to trust the server. The colluders are
    fixed before the beacon, and so before the graph, is known; the graph is public.

    Where noise is carried (`niss-carried`), a client of round t also adds noise that a client of round t + 1 takes out
    again, everyone sharing with everyone within a round and with the next cohort. Over the whole run a client with the
    participations P spends `mu^2 = Delta' G[P, P] Delta`, `G` the inverse of the covariance over all uploads of all
    rounds (`niss.views.run`). A participation is charged what it adds to that, with G of the whole committed run at its
    worst (`plan.committed`); the budget covers the dearest allowed pattern. The model has the fresh noise of all
    rounds, and of what was carried only the latest: less than a trusted server with independent noise leaves in it.
    Dropouts: a lost client's shares stay in the model (`tolerate`), or are taken out (`repair`): those within the
    round, those carried to it, and one round later those it would have carried on. Clients that may be called dropped
    count like colluders: the server knows their shares. A client that is called dropped although it uploaded still has
    its self-mask, of the variance that its charge covers.
    """

    name = "niss"
    look = Look(BLUE, "o")
    trusts = "{clients} not to help the server"
    shares_noise = True
    has_protocol = True
    carrying = "niss-carried"
    settings = frozenset(
        ("kappa", "neighbours", "graph", "groups", "distortion", "tau2", "collusion", "dropout", "mode")
    )

    def share(self, round: RoundPlan, beacon: bytes) -> RoundPlan:
        """The graph of the round, the unit variance `kappa min_k sigma_k^2 / v`, and tau^2.

        A client that needs more noise sends and receives in proportion, so that shares have one unit variance.
        """
        if self.carries:
            return _committed_shares(round)
        plan, participants, own = round.plan, round.participants, round.own_variance
        size, least = participants.size, float(own.min())
        unit = plan.kappa * least / plan.neighbours
        counts = plan.neighbours * own / least
        shares = None if np.allclose(counts, counts[0], rtol=1e-12) else counts
        drawing = Drawing(participants.tolist(), plan.neighbours, beacon, plan.groups, shares)
        shared = replace(round, graph=GRAPHS[plan.graph](drawing), unit_variance=unit)
        if plan.tau2 is not None:
            return replace(shared, tau2=np.array(of_participants(plan.tau2, participants, "tau2")))
        # In units of the least own variance, where the same graph needs the same tau^2 for any epsilon.
        target, assumed = (own / least).tobytes(), plan.assumed(size)
        common, opponent = calibrated_tau2(shared.graph, assumed, plan.kappa / plan.neighbours, target)
        if opponent.alone:
            raise too_sparse(size, plan.neighbours, assumed)
        return replace(shared, tau2=np.full(size, common), opponent=opponent)

    def add_client_noise(self, uploads: UploadRows, round: RoundPlan, stream: SimStream) -> RoundPlan:
        if self.carries:
            return self._add_spread(uploads, round, stream)
        keep = round.keep_factors
        if keep is None:
            # One matrix of the cohort per coordinate.
            factors = round.graph.senders.size * uploads.shape[1]
            keep = round.participants.size <= _MOST_CLIENTS and factors <= _MOST_FACTORS
        scales = uploads.add_shares(
            round.edges,
            unit_variance=round.unit_variance,
            tau2=round.tau2,
            distortion=round.plan.distortion,
            stream=stream,
            keep_factors=keep,
        )
        return replace(round, scales=None if scales is None else scales.astype(np.float64))

    def _add_spread(self, uploads: UploadRows, round: RoundPlan, stream: SimStream) -> RoundPlan:
        """All noise of a round in which everyone shares with everyone, one draw a client (`mechanism.shares`)."""
        size, share = round.participants.size, self._share(round)
        before, after = self._carried(round, stream)
        # Of a repaired round the noise of its survivors, else everyone's.
        seats = round.here if round.repaired else np.arange(size)
        count = seats.size
        fresh = float(round.residual_variance[0])
        weight = float(round.graph.weights[0]) if round.graph.weights.size else 0.0
        spread = 2.0 * count * weight * round.unit_variance + fresh
        common: list[Common] = [(math.sqrt(fresh / count), stream.child("residual"))]
        if after is not None and share:
            spread += size * share
            common.append((math.sqrt(count * size * share) / count, after.stream.child("carried")))
        if before is not None and share:
            senders = before.senders(size)
            spread += senders * share
            common.append((-math.sqrt(senders * size * share) / count, before.stream.child("carried")))
        uploads.add_spread(seats, spread, common, stream)
        return round

    def _carried(
        self, round: RoundPlan, stream: SimStream | None = None
    ) -> tuple[CarriedEdges | None, CarriedEdges | None]:
        """From the round before and to the one after; where nothing is known of them, they are as planned."""
        if not self.carries or round.history is not None:
            return round.before, round.after
        plan, number, origin = round.plan, round.number, stream or SimStream(0)
        return (
            CarriedEdges(origin.child("gap", number - 1)) if number else None,
            CarriedEdges(origin.child("gap", number))
            if number + 1 < plan.planned_rounds + plan.closing
            else None,
        )

    def _share(self, round: RoundPlan) -> float:
        """Variance of a carried share, as it is added."""
        size = round.participants.size
        return round.plan.committed(size).noise.carried * _square(round) / size

    def joint_variance(self, round: RoundPlan) -> FloatArray | None:
        """Exact without colluders, up to some thousand clients; else the worst ratio of any client, or a bound on it,
        for every client. Where noise is carried, Delta^2 over what the participation adds to mu^2: independent noise of
        that variance would cost as much."""
        if self.carries:
            return self._committed_variance(round)
        # Against colluders or reveals no worst case is computed for a multiplicative distortion.
        if _is_multiplied(round):
            unknown = round.scales is None or round.plan.assumed(round.participants.size).removed
            return None if unknown else self.variance_against(round, ())
        worst = round.worst
        return self.variance_against(round, ()) if worst is None else worst.ratio * round.own_variance

    def _committed_variance(self, round: RoundPlan) -> FloatArray | None:
        plan, size = round.plan, round.participants.size
        run = plan.committed(size)
        if not run.private:
            return None
        costs: FloatArray | float
        if round.history is None:
            costs = run.cost(round.number, None)
        else:
            costs = _costs(partial(run.charge, round.number), round.participants, round.history)
        return np.asarray(round.sensitivity**2 / costs)

    def planned_mu(
        self, plan: Plan, participants: IntArray, number: int, history: Sequence[IntArray] = ()
    ) -> FloatArray:
        if not self.carries or plan.participants is None:
            return plan.round_mu(participants)
        run = plan.committed(plan.participants)
        if not run.private:
            return np.full(participants.size, np.inf)
        return np.sqrt(_costs(partial(run.cost, number), participants, history))

    def worst(self, round: RoundPlan) -> WorstCase | None:
        """None where noise is carried: colluders are in the plan of the whole run, exactly, since all are alike."""
        size = round.participants.size
        assumed = round.plan.assumed(size)
        if self.carries or (assumed.removed == 0 and size <= exact_limit(round.graph)):
            return None
        if round.opponent is not None or distortion_named(round.plan.distortion).multiplies:
            return round.opponent
        return worst_case(
            round.graph,
            assumed,
            unit_variance=round.unit_variance,
            residual_variance=round.residual_variance,
            target_variance=round.own_variance,
        )

    def variance_against(self, round: RoundPlan, colluders: Collection[int]) -> FloatArray:
        if self.carries:
            raise ConfigError(
                f"the claim of {self.name} is about a whole run, not about one of its rounds",
                field="method",
                hint="use niss.views.run_mu2 on the graphs of all rounds",
            )
        if _is_multiplied(round) and round.scales is None:
            raise ConfigError(
                "the factors of this round were not kept",
                field="keep_factors",
                hint="draw the round with them",
            )
        multiplied = distortion_named(round.plan.distortion).multiplies
        return effective_variance(
            round.graph,
            unit_variance=round.unit_variance,
            residual_variance=0.0 if multiplied else round.residual_variance,
            colluders=colluders,
            scales=round.scales,
        )

    def marginal_variance(self, round: RoundPlan) -> FloatArray:
        carried = sum(edges is not None for edges in self._carried(round))
        return marginal_variance(
            unit_variance=round.unit_variance,
            sent=round.graph.out_weight,
            received=round.graph.in_weight,
            tau2=round.tau2,
            residual_variance=carried * round.participants.size * self._share(round) if carried else 0.0,
        )

    def left_over_variance(self, round: RoundPlan) -> float:
        """`sum_{k here} tau_k^2 sigma^2 in_k`, and unless repaired `sum c_e sigma^2` over edges with one end lost.

        With what is carried on, and what is taken out.
        """
        left = float(round.residual_variance[round.here].sum())
        if round.absent and not round.repaired:
            here = np.zeros(round.participants.size, dtype=bool)
            here[round.here] = True
            crossing = here[round.graph.senders] != here[round.graph.receivers]
            left += round.unit_variance * float(round.graph.weights[crossing].sum())
        return left + self.under_way(round) + self._taken_out(round)[0]

    def earlier_covariances(self, round: RoundPlan) -> FloatArray:
        """The negative variance of what the round before added and this one takes out."""
        if self._carried(round)[0] is None:
            return np.zeros(0)
        return np.array([-self._taken_out(round)[1]])

    def under_way(self, round: RoundPlan) -> float:
        if self._carried(round)[1] is None:
            return 0.0
        return round.here.size * round.participants.size * self._share(round)

    def _taken_out(self, round: RoundPlan) -> tuple[float, float]:
        """The variance of what this round's sum takes out, and of the part of it that was added before."""
        size, before = round.participants.size, self._carried(round)[0]
        if before is None:
            return 0.0, 0.0
        each = self._share(round) * (size if round.repaired else round.here.size)
        return before.senders(size) * each, (size - len(before.absent)) * each

    def joint_mu(self, round: RoundPlan, *, repairing: bool = False) -> FloatArray:
        """mu of the joint view; where rounds are repaired, also against a story that leaves the self-mask alone.

        A self-mask of `sigma_k^2 - residual` is in each upload until it is repaired (`niss.accounting.make_terms`), and
        a server that has a client's edges revealed is left with it and the residual: `max(sigma_k^2, residual)`. Where
        noise is carried the self-mask has the variance that the charge covers, so that nothing is to be added here.
        """
        mu = super().joint_mu(round)
        if not repairing or self.carries:
            return mu
        masked = np.sqrt(np.maximum(round.own_variance, round.residual_variance))
        return np.maximum(mu, round.sensitivity / masked)

    def calibrated(self, plan: Plan) -> bool:
        return plan.tau2 is None

    def adversary(self, plan: Plan) -> str:
        server = server_adversary(plan.collusion, before_graph=plan.failure > 0.0)
        if not self.carries:
            return server
        rest = f"exactly {plan.separation}" if plan.pattern == "cyclic" else f"at least {plan.separation}"
        return (
            f"{server}; over a run of {plan.planned_rounds} committed rounds as a whole, for "
            f"clients that take part {rest} round{'s' if plan.separation != 1 else ''} apart"
        )

    def why_no_guarantee(self, plan: Plan) -> str:
        tau2 = plan.tau2 if isinstance(plan.tau2, tuple) else (plan.tau2,)
        if any(value != 0.0 for value in tau2):
            return why_no_bound(distortion_named(plan.distortion))
        return (
            "The noises of all uploads cancel exactly, so a server that knows the other updates subtracts them from "
            "the sum and is left with the bare one."
        )

    def caveats(self, plan: Plan) -> tuple[str, ...]:
        caveats = []
        if not plan.collusion:
            caveats.append("Clients that collude with the server are not counted here.")
        if plan.failure:
            caveats.append(
                f"{digits(plan.failing_delta, 2)} of delta pays for graphs on which more neighbours of a client "
                "collude than the accountant assumes."
            )
        if plan.graph == "random":
            caveats.append(
                "In a random list clients receive unequal numbers of shares: the worst-off client decides the epsilon, "
                "and the aggregate variance differs from Theorem 2."
            )
        if not self.carries:
            return tuple(caveats)
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
        if not self.carries:
            return {name: getattr(plan, name) for name in _TRUST}
        names = (*_TRUST, "separation", "pattern")
        return {name: getattr(plan, name) for name in names} | {"rounds": plan.planned_rounds}

    def ledger_note(self, basis: Mapping[str, Any]) -> str | None:
        if not self.carries:
            return None
        apart = "exactly" if basis.get("pattern") == "cyclic" else "at least"
        return (
            f"{self.name}: a charge is what the participation adds to mu^2 over the whole committed run of "
            f"{basis.get('rounds')} rounds, for clients that take part {apart} {basis.get('separation')} rounds apart; "
            "noise that cancels between rounds makes it larger after earlier participations."
        )


class NissCarried(Niss):
    """The same under the name of runs that carry noise from one round to the next.

    kappa                as in `niss`
    carried_to_residual  w / r; None: what leaves least noise in the model
    tau2                 given: that much fresh noise, whatever is promised then
    closing              one more round without data takes out what the last one carried
    """

    name = "niss-carried"
    look = Look(GREEN, "D")
    whole_run = True
    correlates = True
    carries = True
    settings = Niss.settings | {"carried_to_residual", "closing"}
    samplings = ("cyclic", "uniform")
    defaults = MappingProxyType({"graph": "complete", "kappa": 20.0})
    needs = MappingProxyType(
        {
            "epsilon": (float, "its noise is planned for one target for all"),
            "tau2": (float, "its noise is planned for one target for all"),
            "mechanism": ("analytic", "its noise is planned with the analytic mechanism"),
            "distortion": ("additive", "its noise is planned with the additive distortion"),
            "graph": ("complete", "noise is carried where everyone shares with everyone"),
            "training.weights": (
                "equal",
                "a round takes out what clients of the one before added, so that all have to weigh the same",
            ),
        }
    )

    def check(self, plan: Plan) -> None:
        super().check(plan)
        turns = math.ceil(plan.planned_rounds / plan.separation)
        if plan.turns < turns:
            raise ConfigError(
                f"{plan.turns} participations of a client, but its turn comes {turns} times; whoever stayed "
                "out would leave noise in the model",
                field="participations",
                hint="leave it out, or take fewer rounds",
            )


def _committed_shares(round: RoundPlan) -> RoundPlan:
    """The round with the shares of a run that carries noise."""
    if np.ptp(round.own_variance) > 1e-9 * round.own_variance.max():
        raise ConfigError(
            "carried shares are planned for clients of equal weight",
            field="weights",
            hint="use training.weights = 'equal'",
        )
    size = round.participants.size
    noise = round.plan.committed(size).noise
    tau2 = noise.residual / (noise.neighbours * noise.unit)
    return replace(
        round, graph=everyone(size), unit_variance=noise.unit * _square(round), tau2=np.full(size, tau2)
    )


def _is_multiplied(round: RoundPlan) -> bool:
    distortion = distortion_named(round.plan.distortion)
    return distortion.multiplies and bool(np.any(round.tau2 > 0.0))


def _square(round: RoundPlan) -> float:
    """Delta^2 of an upload, from the noise that a client would need alone."""
    mu = float(round.plan.round_mu(np.zeros(1, dtype=np.int64))[0])
    return float(round.own_variance.max()) * mu**2


def _costs(
    cost: Callable[[tuple[int, ...]], float], clients: IntArray, history: Sequence[IntArray]
) -> FloatArray:
    """What each client is to be charged, a function of its earlier rounds."""
    rounds: dict[int, list[int]] = {int(client): [] for client in clients}
    for number, participants in enumerate(history):
        for client in participants.tolist():
            if client in rounds:
                rounds[client].append(number)
    past = [tuple(rounds[int(client)]) for client in clients]
    known = {one: cost(one) for one in set(past)}
    return np.array([known[one] for one in past])


@lru_cache(maxsize=32)
def calibrated_tau2(
    graph: ShareGraph, corruption: Corruption, unit: float, target: bytes
) -> tuple[float, WorstCase]:
    """`calibrate_for` the targets in these bytes."""
    return calibrate_for(
        graph, corruption, unit_variance=unit, target_variance=np.frombuffer(target, dtype=np.float64)
    )
