"""What a run did to its clients: a line for each round, and the statement of what was promised.

A round is charged to everyone who may have answered it, in two views: the joint one, which counts what the server and
its colluders see of all uploads together, and the marginal one, of a single upload looked at alone.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from niss.accounting import Ledger, Plan, Statement, grid_delta, make_statement, upload_mu
from niss.flower.session import Member, Round, Session
from niss.protocol import Outcome

# What a client that does not pin it takes on trust, in words.
_TRUSTED = {
    "server": "the server's key",
    "holder": "the beacon holder's key",
    "coalition": "the other clients' identities",
    "epsilon": "the budget",
    "state": "Flower's Context for their memory",
}


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round, as `report.json` shows it.

    round           counts from 1, as Flower does
    participants    how many were asked for an upload
    survivors       how many uploads are in the sum
    lost            by node: why its upload is not
    exact           whether all noise shares cancelled
    uncancelled     how many noise shares were left in the sum
    masked          how many self-masks were left in the sum
    deviation       standard deviation of the noise in a coordinate of the mean update
    mu              what the round cost each client in the joint view; None: unbounded
    bytes_uploaded  size of all uploads that were accepted
    problems        what went wrong in the repair
    skipped         why the round did not take place
    void            uniform masks could not all be taken out: there is no sum, and the model stays as it was
    """

    round: int
    participants: int
    survivors: int
    lost: dict[str, str]
    exact: bool
    uncancelled: int
    masked: int
    deviation: float
    mu: float | None
    bytes_uploaded: int
    problems: tuple[str, ...] = ()
    skipped: str | None = None
    void: bool = False

    @classmethod
    def skip(cls, number: int, reason: str) -> RoundReport:
        """The report of round `number`, counted from 0, that did not take place."""
        return cls(number + 1, 0, 0, {}, True, 0, 0, 0.0, None, 0, (), reason)


@dataclass(frozen=True)
class Pending:
    """What a round that was opened costs, should nothing more be heard of it.

    round       counts from 1
    members     numbers of those who may have answered
    joint       mu of each in the joint view
    marginal    mu of each in the marginal view
    grid_delta  what its grid adds to delta
    """

    round: int
    members: tuple[int, ...]
    joint: float
    marginal: float
    grid_delta: float


@dataclass
class Account:
    """Everything that is charged and everything that happened, as the server knows it.

    Each client keeps its own ledger and trusts it alone; this one serves the report, and spares clients a round
    that they would refuse.

    plan           what the clients are promised
    charges        for each round: numbers of the members charged, and their mu in the joint and the marginal view
    rounds         the reports, skipped rounds too
    evaluations    how many messages of `evaluate` were sent, whose metrics nothing protects
    clear_metrics  names of the metrics of `train` that clients sent unprotected
    grid_delta     the most that the grid of any round adds to delta
    resumed        how often the server ended and the run went on
    """

    plan: Plan
    charges: list[tuple[tuple[int, ...], float, float]] = field(default_factory=list)
    rounds: list[RoundReport] = field(default_factory=list)
    evaluations: int = 0
    clear_metrics: set[str] = field(default_factory=set)
    grid_delta: float = 0.0
    resumed: int = 0

    def pending(self, current: Round, members: dict[int, Member], mu: float) -> Pending:
        """What a round costs, at `mu` each, everyone who may have answered it."""
        terms, size = current.agreed.terms, len(current.nodes)
        return Pending(
            current.number + 1,
            tuple(members[node].number for node in current.nodes if node not in current.refused),
            mu,
            upload_mu(terms, size, self.plan.relation),
            grid_delta(self.plan, terms, size),
        )

    def _charge(self, pending: Pending) -> None:
        self.charges.append((pending.members, pending.joint, pending.marginal))
        self.grid_delta = max(self.grid_delta, pending.grid_delta)

    def lose(self, pending: Pending, why: str) -> None:
        """Charge a round whose result was lost: its participants may have answered, and so spent it."""
        self._charge(pending)
        self.rounds.append(RoundReport.skip(pending.round - 1, why))

    def enter(self, current: Round, outcome: Outcome, members: dict[int, Member], mu: float) -> RoundReport:
        """Charge a round, at `mu` each, to everyone who may have answered it, whether the answer arrived or not."""
        terms, size = current.agreed.terms, len(current.nodes)
        self._charge(self.pending(current, members, mu))
        variance = len(outcome.survivors) * terms.residual_variance + outcome.extra_variance
        scale = size / len(outcome.survivors) if outcome.survivors else 0.0
        report = RoundReport(
            round=current.number + 1,
            participants=size,
            survivors=len(outcome.survivors),
            lost={str(node): current.lost[node] for node in current.nodes if node in current.lost},
            exact=outcome.exact,
            uncancelled=outcome.uncancelled,
            masked=len(outcome.masked),
            deviation=math.sqrt(variance) * scale,
            mu=mu if math.isfinite(mu) else None,
            bytes_uploaded=current.bytes_uploaded,
            problems=outcome.problems
            + tuple(f"node {node}: {why}" for node, why in current.unhelpful.items()),
            void=outcome.void,
        )
        self.rounds.append(report)
        return report

    def saved(self) -> dict[str, Any]:
        """All of it but the plan, as JSON: for a server that goes on with the run."""
        values = {name: getattr(self, name) for name in ("charges", "evaluations", "grid_delta", "resumed")}
        rounds = [asdict(one) for one in self.rounds]
        return values | {"rounds": rounds, "clear_metrics": sorted(self.clear_metrics)}

    @classmethod
    def restored(cls, plan: Plan, values: dict[str, Any]) -> Self:
        """What `saved` gave."""
        return cls(
            plan,
            [(tuple(members), joint, marginal) for members, joint, marginal in values["charges"]],
            [RoundReport(**one | {"problems": tuple(one["problems"])}) for one in values["rounds"]],
            values["evaluations"],
            set(values["clear_metrics"]),
            values["grid_delta"],
            values["resumed"],
        )

    def with_room(self, nodes: list[int], members: dict[int, Member]) -> list[int]:
        """Those of these nodes whose budget, by the plan, leaves them another round."""
        if not self.plan.calibrated:
            return nodes
        numbers = np.array([members[node].number for node in nodes], dtype=np.int64)
        room = self._ledger(len(members)).room(numbers, self.plan.round_mu(numbers))
        return [node for node, has_room in zip(nodes, room.tolist(), strict=True) if has_room]

    def statement(self, session: Session) -> Statement:
        """The guarantee of the run, with what happened in it."""
        return make_statement(
            self.plan,
            self._ledger(max(1, len(session.members))),
            notes=self._caveats(session),
            noise_from="clients",
        )

    def to_json(self, session: Session) -> dict[str, Any]:
        """Statement, rounds, members and those who were left out, as `report.json` holds them."""
        return {
            "statement": self.statement(session).to_json(),
            "rounds": [asdict(one) for one in self.rounds],
            "left_out": {str(node): why for node, why in session.left_out.items()},
            "members": {str(node): one.identity.hex() for node, one in session.members.items()},
        }

    def _ledger(self, clients: int) -> Ledger:
        ledger = Ledger.empty(clients)
        for numbers, joint, marginal in self.charges:
            charged = np.array([number for number in numbers if number < clients], dtype=np.int64)
            ledger.charge(charged, np.full(charged.size, joint), np.full(charged.size, marginal))
        ledger.budget = self.plan.budget(clients) if self.plan.calibrated else None
        return ledger

    def _caveats(self, session: Session) -> tuple[str, ...]:
        caveats = []
        if self.charges and self.plan.calibrated:
            caveats.append(
                "Rounding to the grid, and the sampler's distance from the Gaussian, cost at most "
                f"{self.grid_delta:.2g} of delta, which is part of it; the claim is "
                "computational, as are the keys behind it."
            )
        if not session.proposal.tracker:
            placed = ": colluders are counted as if they were placed after it was drawn."
            caveats.append(
                "The server holds the beacon itself (no tracker), so it could have chosen the graph"
                + (
                    placed
                    if self.plan.colluders
                    else ", which would matter only if clients colluded with it."
                )
            )
        caveats += _taken_on_trust(session)
        if lost := sum(len(one.lost) for one in self.rounds):
            noisy = sum(not (one.exact or one.void) for one in self.rounds)
            caveats.append(
                f"Uploads lost or declined: {lost}; rounds in which noise was left uncancelled: {noisy}. Every round "
                "is charged as if the server had lied about it."
            )
        if void := sum(one.void for one in self.rounds):
            caveats.append(
                f"Rounds that are void, since uniform masks could not be taken out: {void}. They left the model as it "
                "was, and are charged all the same."
            )
        caveats += [f"Node {node} was left out: {why}." for node, why in session.left_out.items()]
        if skipped := [one.skipped for one in self.rounds if one.skipped]:
            caveats.append(f"Rounds that were skipped: {len(skipped)}; the last because {skipped[-1]}.")
        if self.resumed:
            caveats.append(
                f"Times that the server ended and the run went on: {self.resumed}. A round that was under way then is "
                "charged, and not in the model."
            )
        if inside := session.proposal.metrics.names:
            names = ", ".join(inside)
            caveats.append(f"Metrics of `train` inside the noisy sum, protected as the updates are: {names}.")
        if self.evaluations:
            caveats.append("Metrics of `evaluate` travel in the clear and are not counted here.")
        if self.clear_metrics:
            names = ", ".join(sorted(self.clear_metrics))
            caveats.append(f"Metrics of `train` that travel in the clear and are not counted here: {names}.")
        return tuple(caveats)


def _taken_on_trust(session: Session) -> list[str]:
    """What the clients did not pin, in a sentence; none where everyone pinned everything."""
    size = len(session.members)
    trusting = Counter(
        name for member in session.members.values() for name in _TRUSTED if name not in member.pinned
    )
    if not trusting:
        return []
    if set(trusting.values()) == {size}:
        return [f"All {size} clients took on trust: {', '.join(_TRUSTED[name] for name in trusting)}."]
    counts = ", ".join(f"{_TRUSTED[name]} ({count})" for name, count in trusting.items())
    return [f"Of {size} clients, some took on trust: {counts}."]
