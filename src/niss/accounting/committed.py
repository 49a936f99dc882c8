"""What a plan with carried shares commits to for its whole run: how much noise of which kind, and what rounds cost.

All numbers are in units of the squared sensitivity of one upload, which is the same for all clients in all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from niss.accounting.carried import CarriedPlan, drawn_connectivity
from niss.accounting.carried_charges import CarriedCharges, heaviest
from niss.accounting.carried_planner import plan_carried
from niss.errors import PrivacyError
from niss.views import colluding_neighbours

# A graph that is drawn may be this much worse connected than the planner's sample of its size and degree.
WORSE = 0.1


@dataclass(frozen=True)
class CommittedRun:
    """The noise of a run with carried shares.

    spatial          variance of the shares within the round in one upload, sent and received
    carried_by_lag   w: carried from the sum of a round to that of the next, and of later ones
    residual         r: fresh noise in the sum of a round
    promise          what all that is worth; None without fresh noise, where nothing is promised
    """

    spatial: float
    carried_by_lag: tuple[float, ...]
    residual: float
    promise: CarriedPlan | None

    @property
    def carried(self) -> float:
        """All that the sum of a round carries on."""
        return math.fsum(self.carried_by_lag)

    def cost(self, number: int, earlier: Sequence[int] | None) -> float:
        """What a participation in round `number` (from 0) adds to mu^2, after those in the rounds `earlier`.

        None: after the dearest allowed ones.
        """
        plan = self._kept()
        if not 0 <= number < plan.horizon:
            raise PrivacyError(
                f"round {number + 1} of a run that was committed to {plan.horizon}",
                hint="going on is a new run, with its own budget",
            )
        if earlier is None:
            row = plan.matrix[number]
            past = heaviest(row[: max(number - plan.separation + 1, 0)], plan.separation)
            return float(row[number] + 2.0 * past)
        return CarriedCharges(
            plan.matrix, plan.separation, plan.pattern, plan.worst.cost, taken=[*earlier]
        ).cost(number)

    def charge(self, number: int, earlier: Sequence[int]) -> float:
        """The same, but refused where the plan does not allow that participation."""
        plan = self._kept()
        account = CarriedCharges(
            plan.matrix, plan.separation, plan.pattern, plan.worst.cost, taken=[*earlier]
        )
        return account.charge(number)

    def _kept(self) -> CarriedPlan:
        if self.promise is None:
            raise PrivacyError("without fresh noise nothing is promised", hint="leave tau2 calibrated")
        return self.promise


@lru_cache(maxsize=64)
def committed_run(
    *,
    participants: int,
    rounds: int,
    separation: int,
    pattern: str,
    epsilon: float,
    delta: float,
    kappa: float,
    colluders: int,
    dropped: int,
    dropout: float,
    closing: bool,
    carried_to_residual: float | None,
    lags: int,
    factors: tuple[float, ...],
    neighbours: float | None,
    carried_neighbours: float | None,
    revealed: int,
    failure: float,
    tau2: float | None,
) -> CommittedRun:
    """The run that leaves least noise in the model at this promise; see `plan_carried`.

    dropped                         most clients of a round that repairs may call dropped; 0: nothing is repaired
    dropout                         share of the clients that is expected to drop out
    lags                            rounds ahead to which noise is carried
    factors                         with which rounds enter the model, receivers rescaling by their ratios; (): equal
    neighbours, carried_neighbours  unit shares that a client has within a round and with the next; None: with everyone
    revealed                        most edges of a client within a round that repairs may reveal
    failure                         probability with which more neighbours of some client may collude than is reckoned
                                    with, for each graph that is drawn
    tau2                            fresh noise instead of what the promise needs, over the variance of the shares sent
    """
    connectivity = drawn_connectivity(
        participants,
        neighbours=neighbours,
        carried=carried_neighbours,
        known_neighbours=0
        if neighbours is None
        else _known_neighbours(participants, neighbours, colluders, failure) + revealed,
        worse=WORSE,
    )
    if connectivity.spatial == 0.0:
        raise PrivacyError(
            f"with {neighbours:g} neighbours each, colluders and repairs could cut a client off from the others' noise",
            hint="use more neighbours or graph = 'complete', or assume fewer colluders or fewer that drop out",
        )
    planned = plan_carried(
        participants=participants,
        clients=participants * separation,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        pattern=pattern,
        collusion=colluders / participants,
        dropout=dropout,
        mode="repair" if dropped else "tolerate",
        declared_dropped=dropped,
        kappa=kappa,
        carried_to_residual=carried_to_residual,
        lags=lags,
        factors=factors,
        rescaled=bool(factors),
        closing=closing,
        connectivity=connectivity,
    ).plan
    carried = tuple(ratio * planned.residual for ratio in planned.carried_to_residual)
    if tau2 is None:
        return CommittedRun(planned.spatial, carried, planned.residual, planned)
    residual = tau2 * participants * planned.spatial / 2.0
    promise = None
    if residual > 0.0:
        promise = replace(
            planned, residual=residual, carried_to_residual=tuple(one / residual for one in carried)
        )
    return CommittedRun(planned.spatial, carried, residual, promise)


def _known_neighbours(participants: int, neighbours: float, colluders: int, failure: float) -> int:
    """Neighbours of any client of a graph that collude, but for graphs that are drawn with probability `failure`.

    The graph is drawn after the colluders were fixed, and its check does not depend on who is who: given its shape they
    are a uniform sample of the clients. A union bound over all of them.
    """
    most = min(2 * math.ceil(neighbours), participants - 1)
    return colluding_neighbours(participants, most, colluders, failure / participants)
