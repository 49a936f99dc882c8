"""What a run did to its clients: a line for each round, and the statement of what was promised."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from niss.accounting import Ledger, Plan, Statement, make_statement, upload_mu
from niss.accounting.terms import grid_delta
from niss.flower.session import Member, Round, Session
from niss.protocol.server import Outcome

# True of the simulator, whose noise can be replayed; here keys and noise come from the operating system.


@dataclass(frozen=True)
class RoundReport:
    """One round: who took part, who was lost and why, and the noise left in the mean update."""

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

    @classmethod
    def skip(cls, number: int, why: str) -> RoundReport:
        return cls(number + 1, 0, 0, {}, True, 0, 0, 0.0, None, 0, (), why)


@dataclass
class Account:
    """Everything that is charged and everything that happened, as the server knows it.

    Each client keeps its own ledger and trusts it alone; this one serves the report, and spares clients a round
    that they would refuse.
    """

    plan: Plan
    charges: list[tuple[tuple[int, ...], float, float]] = field(default_factory=list)
    rounds: list[RoundReport] = field(default_factory=list)
    evaluations: int = 0
    clear_metrics: set[str] = field(default_factory=set)
    grid_delta: float = 0.0

    def enter(self, current: Round, outcome: Outcome, members: dict[int, Member], mu: float) -> RoundReport:
        """Charge a round to everyone who may have answered it, whether the answer arrived or not."""
        terms, size = current.agreed.terms, len(current.nodes)
        charged = tuple(members[node].number for node in current.nodes if node not in current.refused)
        alone = upload_mu(terms, size, self.plan.relation)
        self.charges.append((charged, mu, alone))
        self.grid_delta = max(self.grid_delta, grid_delta(self.plan, terms))
        left = len(outcome.survivors) * terms.residual_variance + outcome.extra_variance
        scale = size / len(outcome.survivors) if outcome.survivors else 0.0
        report = RoundReport(
            round=current.number + 1,
            participants=size,
            survivors=len(outcome.survivors),
            lost={str(node): current.lost[node] for node in current.nodes if node in current.lost},
            exact=outcome.exact,
            uncancelled=outcome.uncancelled,
            masked=len(outcome.masked),
            deviation=math.sqrt(left) * scale,
            mu=mu if math.isfinite(mu) else None,
            bytes_uploaded=current.bytes_uploaded,
            problems=outcome.problems
            + tuple(f"node {node}: {why}" for node, why in current.unhelpful.items()),
        )
        self.rounds.append(report)
        return report

    def with_room(self, nodes: list[int], members: dict[int, Member]) -> list[int]:
        """Those of these nodes whose budget, by the plan, leaves them another round."""
        if not self.plan.calibrated:
            return nodes
        numbers = np.array([members[node].number for node in nodes], dtype=np.int64)
        room = self._ledger(len(members)).room(numbers, self.plan.round_mu(numbers))
        return [node for node, left in zip(nodes, room.tolist(), strict=True) if left]

    def statement(self, session: Session, *, independent: bool) -> Statement:
        """The guarantee of the run, with what happened in it."""
        return make_statement(
            self.plan,
            self._ledger(max(1, len(session.members))),
            notes=self._notes(session, independent=independent),
            noise_from="clients",
        )

    def to_json(self, session: Session, *, independent: bool) -> dict[str, Any]:
        return {
            "statement": self.statement(session, independent=independent).to_json(),
            "rounds": [asdict(one) for one in self.rounds],
            "left_out": {str(node): why for node, why in session.left_out.items()},
            "members": {str(node): one.identity.hex() for node, one in session.members.items()},
        }

    def _ledger(self, clients: int) -> Ledger:
        ledger = Ledger.empty(clients)
        for numbers, mu, alone in self.charges:
            seats = np.array([number for number in numbers if number < clients], dtype=np.int64)
            ledger.charge(seats, np.full(seats.size, mu), np.full(seats.size, alone))
        ledger.budget = self.plan.budget(clients) if self.plan.calibrated else None
        return ledger

    def _notes(self, session: Session, *, independent: bool) -> tuple[str, ...]:
        notes = [
            f"Rounding to the grid, and the sampler's distance from the Gaussian, add at most {self.grid_delta:.2g} "
            "to delta; the claim is computational, as are the keys behind it."
        ]
        if not independent:
            notes.append(
                "The server holds the beacon itself (no tracker), so it could have chosen the graph: colluders are "
                "counted as if they were placed after it was drawn."
            )
        taken = Counter(
            name
            for member in session.members.values()
            for name in ("server", "holder", "coalition", "epsilon", "state")
            if name not in member.pinned
        )
        words = {
            "server": "the server's key",
            "holder": "the beacon holder's key",
            "coalition": "the other clients' identities",
            "epsilon": "the budget",
            "state": "Flower's Context for their memory",
        }
        if taken:
            counted = ", ".join(f"{words[name]} ({count})" for name, count in taken.items())
            notes.append(f"Of {len(session.members)} clients some took on trust: {counted}.")
        if lost := sum(len(one.lost) for one in self.rounds):
            noisy = sum(not one.exact for one in self.rounds)
            notes.append(
                f"Uploads lost or declined: {lost}; rounds in which noise was left uncancelled: {noisy}. Every round "
                "is charged as if the server had lied about it."
            )
        for node, why in session.left_out.items():
            notes.append(f"Node {node} was left out: {why}.")
        if skipped := [one for one in self.rounds if one.skipped]:
            notes.append(f"{len(skipped)} rounds were skipped; the last because {skipped[-1].skipped}.")
        if self.evaluations:
            notes.append("Metrics of `evaluate` travel in the clear and are not counted here.")
        if self.clear_metrics:
            named = ", ".join(sorted(self.clear_metrics))
            notes.append(f"Metrics of `train` that travel in the clear and are not counted here: {named}.")
        return tuple(notes)
