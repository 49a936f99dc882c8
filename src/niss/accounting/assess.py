"""A client's own view of a proposed round: what would it cost me in the worst case?

The protocol asks before anything is uploaded. The answer holds for the graph that was drawn, the colluders this client
assumes, the edges a repair may reveal, and a server that lies about who dropped out: it can make the neighbours reveal
every edge of a client whose upload it holds, but then nobody gives a piece of that client's self-mask, which must be
strong enough alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from niss.accounting.ledger_file import LedgerFile
from niss.errors import ConfigError, RemoteProtocolError
from niss.protocol.agreement import Agreed
from niss.views import Corruption, WorstCase, colluding_neighbours, worst_case

# Narrower noise, in grid steps, is not counted.
LEAST_STEPS = 4.0
RELATIONS = {"zero-out": 1.0, "replace-one": 2.0}


class Assessor:
    """A function (round, colluders) -> mu; `failure` is the collusion bound's, charged to delta elsewhere."""

    def __init__(self, *, relation: str = "zero-out", failure: float = 0.0) -> None:
        if relation not in RELATIONS:
            raise ConfigError(
                f"unknown value {relation!r}", field="relation", hint="use one of: " + ", ".join(RELATIONS)
            )
        self._doubling, self._failure = RELATIONS[relation], failure
        self._known: dict[tuple[bytes, int], tuple[float, WorstCase]] = {}

    def __call__(self, agreed: Agreed, colluders: int) -> float:
        return self._assessed(agreed, colluders)[0]

    def worst_case(self, agreed: Agreed, colluders: int) -> WorstCase:
        """What the answer rests on: the worst set of colluders, and whether all of them were covered."""
        return self._assessed(agreed, colluders)[1]

    def _assessed(self, agreed: Agreed, colluders: int) -> tuple[float, WorstCase]:
        key = agreed.digest, colluders
        if key not in self._known:
            self._known.clear()
            self._known[key] = _worst_mu(agreed, colluders, self._doubling, self._failure)
        return self._known[key]


def _worst_mu(agreed: Agreed, colluders: int, doubling: float, failure: float) -> tuple[float, WorstCase]:
    terms = agreed.terms
    size = len(agreed.participants)
    if colluders > size - 2:
        raise RemoteProtocolError(f"{size} participants are too few against {colluders} colluders")
    repairing = terms.mode == "repair"
    if repairing:
        _check_quorum(agreed, colluders, failure)
    found = worst_case(
        agreed.graph,
        Corruption(
            colluders=colluders,
            revealed=terms.revealed if repairing else 0,
            dropped=terms.dropped if repairing else 0,
            failure=failure,
        ),
        unit_variance=terms.unit_variance,
        residual_variance=terms.residual_variance,
        target_variance=1.0,
    )
    share = float(agreed.graph.weights.min()) * terms.unit_variance
    variance = found.ratio if _wide_enough(agreed, share) else terms.residual_variance
    if repairing:
        alone = terms.self_variance if _wide_enough(agreed, terms.self_variance) else 0.0
        variance = min(variance, terms.residual_variance + alone)
    mu = doubling * terms.clip / size / math.sqrt(variance) if variance > 0.0 else math.inf
    return mu, found


def _wide_enough(agreed: Agreed, variance: float) -> bool:
    """Whether noise may count as Gaussian next to the residual noise, though both are rounded to the grid.

    At 4 grid steps rounding costs less than 1e-40 a share and coordinate (`niss.mechanism.discretisation`); narrower
    noise gets no credit at all, since a server could choose a grid on which it rounds to nothing. The residual
    noise alone always counts: the upload is a function of it.
    """
    return agreed.grid.deviation_steps(min(variance, agreed.terms.residual_variance)) >= LEAST_STEPS


def _check_quorum(agreed: Agreed, colluders: int, failure: float) -> None:
    """The quorum and the threshold must hold against as many colluding neighbours as this client assumes."""
    size = len(agreed.participants)
    for seat in range(size):
        degree = len(agreed.neighbours(seat))
        feared = colluding_neighbours(size, degree, colluders, failure)
        if agreed.terms.colluding_neighbours < feared or feared >= degree:
            raise RemoteProtocolError(
                f"{feared} of the {degree} neighbours of a client may collude, the quorum allows for "
                f"{agreed.terms.colluding_neighbours}",
                hint="more neighbours, or fewer colluders to be assumed",
            )


def charge_to(ledger: LedgerFile, client: str) -> Callable[[Agreed, float], None]:
    """A function that charges one client's durable ledger, or refuses."""

    def charge(agreed: Agreed, mu: float) -> None:
        terms = agreed.terms
        shared = math.sqrt(2.0 * terms.unit_variance * terms.neighbours)
        alone = terms.clip / len(agreed.participants) / shared if shared else math.inf
        basis = {"mode": terms.mode, "revealed": terms.revealed, "dropped": terms.dropped}
        ledger.charge(terms.round, terms.attempt, {client: (mu, alone)}, basis)

    return charge
