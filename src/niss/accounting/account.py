"""What a round costs a client, and its charge: before anything is uploaded, from what the client itself was told.

Two kinds of account, which are really different. `DrawnAccount` judges each round by the graph that was drawn for it,
at its worst: the colluders this client assumes, the edges a repair may reveal, and a server that lies about who dropped
out. It can have the committee reveal every edge of a client whose upload it holds, but then not that client's
self-mask, which must be strong enough alone. `CommittedAccount` judges a participation by the whole run that was
committed to before the first round (`Committed`): it is charged what it adds to `1' K[P, P] 1`.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from niss.accounting.assumed import committee_threshold, split_failure
from niss.accounting.committed import Committed
from niss.accounting.discretisation import (
    Promise,
    check_run_discretisation,
    is_wide_enough,
    require_affordable,
    round_draws,
    run_grid_delta,
)
from niss.accounting.ledger import Charge, ChargeableLedger
from niss.checks import require_one_of
from niss.errors import ConfigError, LocalProtocolError, PrivacyError, RemoteProtocolError
from niss.methods import RELATIONS, client_sensitivity, marginal_mu
from niss.protocol.agreement import Agreed
from niss.protocol.messages import Terms
from niss.protocol.schedule import Schedule
from niss.views import Corruption, worst_case

# Up to this ratio of carried to fresh noise the matrix of a run is inverted to six digits or more.
MOST_CARRIED = 1e6
# From this ratio of variances on, rounding in the joint view counts.
_FAR_APART = 1e9


class Account(ABC):
    """One client's account. Called with a round and the colluders assumed it says what answering would cost, as mu."""

    @abstractmethod
    def __call__(self, agreed: Agreed, colluders: int) -> float:
        """mu of the joint view; refused (`RemoteProtocolError`) where that cannot be said, or is not allowed."""

    @abstractmethod
    def charge(self, agreed: Agreed, mu: float) -> Charge | None:
        """The whole charge of a round that costs that mu; None: nothing in it is to be charged."""

    @abstractmethod
    def basis(self, terms: Terms) -> dict[str, Any]:
        """What a charge rests on, for the ledger."""

    def charging(self, ledger: ChargeableLedger, client: str) -> Callable[[Agreed, float], None]:
        """A function (round, mu) that charges a ledger under the name `client` before the upload, or refuses."""

        def book(agreed: Agreed, mu: float) -> None:
            terms = agreed.terms
            if (charge := self.charge(agreed, mu)) is not None:
                ledger.charge(terms.round, terms.attempt, {client: charge}, self.basis(terms))
                self.note(terms)

        return book

    def note(self, terms: Terms) -> None:  # noqa: B027
        """Remember that this round was charged."""


class DrawnAccount(Account):
    """Judges a round by its own graph; one serves all clients of a round, whose worst case is the same.

    relation  neighbouring updates, as in `Plan`
    failure   the probability with which bounds on colluding neighbours and members may fail, per graph, charged to
              delta elsewhere (`Plan.failure`)
    promise   to the client, over all rounds; None: the usual one, and no ledger is told what the grid costs

    mu is that of ideal Gaussians. What a real sampler on a grid of the server's choice costs on top has to fit into the
    part of delta that is reserved for it, and terms under which it does not are refused (`RemoteProtocolError`): on too
    fine a grid noise would fall on a lattice coarser than the update.
    """

    def __init__(
        self, *, relation: str = "zero-out", failure: float = 0.0, promise: Promise | None = None
    ) -> None:
        require_one_of(relation, RELATIONS, field="relation")
        self._relation, self._failure, self._promise = relation, failure, promise
        self._known: dict[tuple[bytes, int], float] = {}

    def __call__(self, agreed: Agreed, colluders: int) -> float:
        if agreed.terms.carrying is not None:
            raise LocalProtocolError(
                "what a round with carried shares costs depends on its whole run",
                hint="use a CommittedAccount",
            )
        key = agreed.digest, colluders
        if key not in self._known:
            self._known.clear()
            mu = _worst_mu(agreed, colluders, self._relation, self._failure)
            if mu < math.inf:  # Else nothing is claimed, so nothing can fall short of it.
                drawn = 1.0 if agreed.terms.records is None else agreed.terms.records.batch
                require_affordable(round_draws(agreed).cost(self._promise or Promise(), drawn * mu))
            self._known[key] = mu
        return self._known[key]

    def charge(self, agreed: Agreed, mu: float) -> Charge:
        marginal = upload_mu(agreed.terms, len(agreed.participants), self._relation)
        grid = None
        if self._promise is not None and math.isfinite(mu):
            grid = round_draws(agreed).delta(replace(self._promise, rounds=1))
        records = agreed.terms.records
        batch = None if records is None else records.batch
        return Charge.of(mu, marginal, batch=batch, grid_delta=grid)

    def basis(self, terms: Terms) -> dict[str, Any]:
        return {"mode": terms.mode, "revealed": terms.revealed, "dropped": terms.dropped}


class CommittedAccount(Account):
    """One client's account of a run with carried shares, from the numbers of its schedule: what each round costs it.

    schedule   that the client has agreed to
    relation   neighbouring updates, as in `Plan`
    colluders  assumed in every round
    promise    to the client over the whole run: what the grid costs has to fit into its part of delta
    budget     most mu over the whole run; infinite: any
    failure    with which the bound on colluders in a committee may fail, as in `DrawnAccount`
    earlier    the rounds of this run that it was charged for (`niss.protocol.client.rounds_answered`)

    Round t costs `Delta' K[P + t] Delta - Delta' K[P] Delta`, K that
    of the whole run at its worst; missing uploads, an early end and a server that lies within the rules only
    take something off it. Refused (`RemoteProtocolError`): noise too narrow for its grid, and a participation that the
    budget or the schedule does not allow. A committee that colluders could outvote is refused when the account is made.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        relation: str = "zero-out",
        colluders: int = 0,
        promise: Promise | None = None,
        budget: float = math.inf,
        failure: float = 0.0,
        earlier: Sequence[int] = (),
    ) -> None:
        self.schedule, self.colluders, self._relation = schedule, colluders, relation
        self._promise = replace(Promise() if promise is None else promise, rounds=schedule.rounds)
        self.plan = scheduled_run(schedule, relation=relation, colluders=colluders)
        self._budget, self._taken = budget, [one for one in earlier if one < schedule.horizon]
        if members := schedule.noise.committee:
            _, failure = split_failure(failure, drawn=members < schedule.participants)
            check_committee(schedule.terms(b"run", 0), schedule.participants, colluders, failure)

    def cost(self, number: int) -> float:
        """What taking part in round `number` would add to mu^2; 0 in a round without updates."""
        if number >= self.schedule.horizon:
            return 0.0
        if not self.plan.private:
            return math.inf
        # What rounding may have taken off while the matrix was inverted: some units in the last place of its condition.
        apart = 4.0 * self.schedule.rounds * (1.0 + self.plan.ratio)
        return self.plan.charge(number, self._taken, self._budget**2) * (1.0 + sys.float_info.epsilon * apart)

    def __call__(self, agreed: Agreed, colluders: int) -> float:
        """The square root of what the round adds to mu^2."""
        if colluders != self.colluders:
            raise LocalProtocolError(f"the account assumes {self.colluders} colluders, not {colluders}")
        self.schedule.check_terms(agreed.terms)
        try:
            mu = math.sqrt(self.cost(agreed.terms.round))
        except PrivacyError as error:
            raise RemoteProtocolError(error.message, hint=error.hint) from None
        if 0.0 < mu < math.inf:
            check_run_discretisation(self.schedule, mu, self._promise)
        return mu

    def charge(self, agreed: Agreed, mu: float) -> Charge | None:
        """What the grid adds to delta over the whole run, however often the client takes part, is charged with its
        first participation; a closing round is not charged at all."""
        number, grid = agreed.terms.round, None
        if number >= self.schedule.horizon:
            return None
        if math.isfinite(mu):
            grid = 0.0 if self._taken else run_grid_delta(self.schedule, self._promise)
        alone = upload_mu(agreed.terms, self.schedule.participants, self._relation, self.schedule.rounds)
        return Charge(mu**2, alone**2, grid_delta=grid)

    def basis(self, terms: Terms) -> dict[str, Any]:
        schedule = self.schedule
        return {
            "mode": terms.mode,
            "rounds": schedule.rounds,
            "separation": schedule.separation,
            "pattern": "cyclic" if schedule.cyclic else "any",
            "dropped": schedule.noise.dropped,
        }

    def note(self, terms: Terms) -> None:
        self._taken.append(terms.round)


@lru_cache(maxsize=4)
def scheduled_run(schedule: Schedule, *, relation: str, colluders: int) -> Committed:
    """What a schedule is worth, from its own numbers; nothing where it has no fresh noise.

    Numbers that cannot be accounted for are a `RemoteProtocolError`: a schedule comes from a server.
    """
    noise = replace(schedule.noise, colluders=colluders, revealed=0)
    # Not as a quotient, which may overflow.
    if noise.residual and not noise.carried <= MOST_CARRIED * noise.residual:
        raise RemoteProtocolError(
            f"more than {MOST_CARRIED:g} times the fresh noise of a round is carried, which cannot be accounted for"
        )
    square = float(client_sensitivity(1.0 / noise.participants, schedule.clip, relation)) ** 2
    try:
        noise = noise.scaled(1.0 / square)
        return Committed(
            noise=noise,
            horizon=schedule.horizon,
            separation=schedule.separation,
            pattern="cyclic" if schedule.cyclic else "any",
            closing=schedule.closing,
        )
    except (ArithmeticError, ConfigError, PrivacyError) as error:
        message = error.message if isinstance(error, (ConfigError, PrivacyError)) else str(error)
        raise RemoteProtocolError(f"schedule: {message}") from None


def _worst_mu(agreed: Agreed, colluders: int, relation: str, failure: float) -> float:
    """mu of the joint view at its worst, and what rounding may have taken off it while the covariance was inverted.

    That is some units in the last place for each participant, times how far the variances are apart, which a server
    can make 10^13. In the terms of an honest server it stays below a millionth and is not counted.
    """
    terms, graph, size = agreed.terms, agreed.graph, len(agreed.participants)
    if colluders > size - 2:
        raise RemoteProtocolError(f"{size} participants are too few against {colluders} colluders")
    assumed = Corruption(colluders=colluders, failure=failure)
    if terms.mode == "repair":
        failure, committee_failure = split_failure(failure, drawn=terms.committee < size)
        check_committee(terms, size, colluders, committee_failure)
        assumed = Corruption(colluders, terms.revealed, terms.dropped, failure)
    residual = terms.residual_variance
    worst = worst_case(
        graph,
        assumed,
        unit_variance=terms.unit_variance,
        residual_variance=residual,
        target_variance=1.0,
    )
    share = float(graph.weights.min()) * terms.unit_variance
    variance = worst.ratio if is_wide_enough(agreed, share) else residual
    if terms.mode == "repair":
        mask = terms.self_variance if is_wide_enough(agreed, terms.self_variance) else 0.0
        variance = min(variance, residual + mask)
    if variance <= 0.0:
        return math.inf
    mu = RELATIONS[relation] * terms.clip / terms.divisor(size) / math.sqrt(variance)
    shares = 2.0 * terms.unit_variance * float(graph.weights.max()) * float(graph.degrees.max())
    apart = shares / residual if residual > 0.0 else math.inf
    return mu if apart < _FAR_APART else mu * (1.0 + graph.size * sys.float_info.epsilon * apart)


def check_committee(terms: Terms, size: int, colluders: int, failure: float) -> None:
    """A committee must be safe with as many colluders as this client assumes."""
    wanted = committee_threshold(size, terms.committee, colluders, failure)
    if terms.threshold < wanted:
        raise RemoteProtocolError(
            f"{terms.threshold} of the {terms.committee} members of the committee can repair the round, but {wanted} "
            f"must, if {colluders} of {size} participants collude",
            hint="a higher threshold, a larger committee, or fewer colluders to be assumed",
        )


def upload_mu(terms: Terms, participants: int, relation: str, rounds: int = 1) -> float:
    """mu of one upload under these terms looked at alone, `Delta / sqrt(2 v sigma^2 + eta^2)`: the marginal view.

    With what is carried to it and on from it, in a run of so many rounds. A self-mask, which a repair takes out again,
    is not counted.
    """
    carried = 0.0
    if terms.carrying is not None:
        gaps = (terms.round > 0) + (terms.round < rounds - 1)
        carried = gaps * participants * terms.carrying.unit_variance
    mu = marginal_mu(
        client_sensitivity(1.0 / terms.divisor(participants), terms.clip, relation),
        unit_variance=terms.unit_variance,
        sent=terms.neighbours,
        received=terms.neighbours,
        residual_variance=terms.residual_variance + carried,
    )
    return float(mu)
