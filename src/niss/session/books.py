"""What a run did to its clients: a line for each round, and the statement of what was promised.

A round is charged to everyone who may have answered it, in two views: the joint one, which counts what the server and
its colluders see of all uploads together, and the marginal one, of a single upload looked at alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from niss.accounting import (
    CommittedAccount,
    Ledger,
    Plan,
    Promise,
    Statement,
    grid_delta,
    make_statement,
    run_grid_delta,
    upload_mu,
)
from niss.mechanism.adaptive import in_words
from niss.protocol import Agreed, Outcome, Schedule, participants_hash, terms_hash
from niss.runs import RoundRecord, SumNoise
from niss.session.members import Members
from niss.session.metrics import BELOW_CLIP, WEIGHT
from niss.session.proposal import Proposal

_OWN = (BELOW_CLIP, WEIGHT)
# Noise must not make a mean weight of nearly nothing, or less, of a small one.
_LEAST_WEIGHT = 0.05
# What a client that does not pin it takes on trust, in words.
_TRUSTED = {
    "server": "the server's key",
    "holder": "the beacon holder's key",
    "coalition": "the other clients' identities",
    "epsilon": "the budget",
    "state": "Flower's Context for their memory",
}


@dataclass(frozen=True)
class Pending:
    """What a round that was opened costs, should nothing more be heard of it.

    round       counts from 1
    members     numbers of those who may have answered
    joint       mu of each in the joint view, one for all or one by one
    marginal    mu of each in the marginal view
    grid_delta  what its grid adds to delta
    """

    round: int
    members: tuple[int, ...]
    joint: float | tuple[float, ...]
    marginal: float
    grid_delta: float

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """What `asdict` and JSON made of one."""
        return cls(**values | {"members": tuple(values["members"]), "joint": _joint(values["joint"])})


@dataclass
class SessionRound:
    """The round under way.

    number          counts rounds from 0
    agreed          participants, terms, beacon and the graph that follows from them
    nodes           the transport's ids of the participants, by seat
    survived        seats of the round before that are in its sum, where it carried noise to this one
    lost            by node: why its upload is missing
    unhelpful       by node: why its part in the repair is missing, or does not count
    refused         by node that declined under its signature, and so uploaded nothing: why
    bytes_uploaded  size of all uploads that were accepted
    outcome         the sum and what is left in it, once the round is over
    """

    number: int
    agreed: Agreed
    nodes: tuple[int, ...]
    survived: tuple[int, ...] = ()
    lost: dict[int, str] = field(default_factory=dict)
    unhelpful: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    bytes_uploaded: int = 0
    outcome: Outcome | None = None

    @property
    def summed(self) -> Outcome:
        """How it ended."""
        assert self.outcome is not None
        return self.outcome

    @property
    def scale(self) -> float:
        """What the sum, with weights 1 / participants, is multiplied by before it moves the model.

        Those who are left stand for all; not where noise is taken out again in another round: all rounds weigh alike.
        """
        if self.agreed.terms.carrying is not None:
            return 1.0
        return len(self.nodes) / max(len(self.summed.survivors), 1)

    @property
    def stays(self) -> float:
        """Variance, in the sum, of the noise that no other round takes out."""
        outcome = self.summed
        return len(outcome.survivors) * self.agreed.terms.residual_variance + outcome.extra_variance

    @property
    def variance(self) -> float:
        """Of all noise in the sum, with what is carried on, and what is taken out of what was carried to it."""
        outcome, before, taken, left = self.summed, self.agreed.before, 0.0, 0.0
        # Of these, the first were put back and the others taken out, in this sum.
        senders, receivers = outcome.repaired
        if before is not None:
            taken = before.taken(outcome.survivors)
            left = before.left(self.survived, outcome.survivors)[1] - senders - receivers
        return self.stays - left + taken - senders + receivers + outcome.under_way

    @property
    def noise(self) -> SumNoise:
        """Of the sum as it moves the model.

        The covariance with the round before is half of what both sums together have less than each alone. Together
        they have what stays, and what is carried on, less what the round before had carried on.
        """
        covariances: tuple[float, ...] = ()
        if (before := self.agreed.before) is not None:
            together = self.stays + self.summed.under_way - before.added(self.survived)
            covariances = ((together - self.variance) / 2.0,)
        return SumNoise(self.variance * self.scale**2, covariances)

    @property
    def public(self) -> dict[str, str]:
        """What everybody saw and from which the graph follows: the beacon, and the hashes it was let out for.

        `graph` is the digest of what was drawn, for whoever draws it again. Where noise is carried over also the
        schedule, and the next cohort.
        """
        opened = self.agreed.opened
        values = {
            "beacon": opened.beacon.value,
            "participants": participants_hash(opened.participants),
            "terms": terms_hash(opened.terms),
            "graph": self.agreed.graph.digest(),
        }
        if opened.cohorts is not None and opened.terms.carrying is not None:
            values["following"] = participants_hash(opened.cohorts.following)
            values["plan"] = opened.terms.carrying.plan
        return {name: value.hex() for name, value in values.items()}


@dataclass
class Books:
    """Everything that is charged and everything that happened, as the server knows it.

    Each client keeps its own ledger and trusts it alone; this one serves the report, and spares clients a round
    that they would refuse.

    proposal       what the clients are promised
    members        who they are
    assess         (round, colluders) -> the worst mu of any client in it
    charges        for each round: numbers of the members charged, and their mu in the joint and the marginal view
    rounds         what happened, skipped rounds too
    evaluations    how many messages of `evaluate` were sent, whose metrics nothing protects
    clear_metrics  names of the metrics of `train` that clients sent unprotected
    grid_delta     the most that the grid of any round adds to delta
    resumed        how often the server ended and the run went on
    weights        the noisy mean weight of the updates in each round
    """

    proposal: Proposal
    members: Members
    assess: Callable[[Agreed, int], float]
    charges: list[tuple[tuple[int, ...], float | tuple[float, ...], float]] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    evaluations: int = 0
    clear_metrics: set[str] = field(default_factory=set)
    grid_delta: float = 0.0
    resumed: int = 0
    weights: list[float] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """What the clients are promised."""
        return self.proposal.plan

    @property
    def schedule(self) -> Schedule | None:
        """What a run that carries noise from round to round is committed to."""
        return self.proposal.schedule

    def weigh(self, weight: float | None) -> float:
        """What to divide the mean of weighted updates by: the mean of this noisy mean weight and all before it.

        None: all weigh the same.
        """
        if weight is None:
            return 1.0
        self.weights.append(weight)
        return max(math.fsum(self.weights) / len(self.weights), _LEAST_WEIGHT)

    def pending(self, current: SessionRound) -> Pending:
        """What a round costs everyone who may have answered it: where noise is carried over, each what it adds to the
        participations before."""
        terms, size, relation = current.agreed.terms, len(current.nodes), self.plan.relation
        numbers = [self.members.by_node[node].number for node in current.nodes if node not in current.refused]
        charged, number = tuple(numbers), current.number + 1
        if self.schedule is None:
            mu = self.assess(current.agreed, self.plan.colluders)
            marginal = upload_mu(terms, size, relation)
            return Pending(number, charged, mu, marginal, grid_delta(self.plan, terms, size))
        return Pending(
            number,
            charged,
            tuple(self._planned_mu(np.array(charged, dtype=np.int64)).tolist()),
            CommittedAccount(self.schedule, relation=relation).marginal_mu(terms.round),
            run_grid_delta(self.schedule, Promise.of(self.plan)),
        )

    def _charge(self, pending: Pending) -> None:
        self.charges.append((pending.members, pending.joint, pending.marginal))
        self.grid_delta = max(self.grid_delta, pending.grid_delta)

    def lose(self, pending: Pending, why: str) -> None:
        """Charge a round whose result was lost: its participants may have answered, and so spent it."""
        self._charge(pending)
        # Nobody took out what the round before had carried to it: that stays.
        left = self._last.carried_variance
        self.rounds.append(replace(self._skipped(pending.round, why), exact=not left, carried_variance=0.0))

    def skip(self, number: int, why: str) -> None:
        """Note that round `number`, counted from 0, did not take place."""
        self.rounds.append(self._skipped(number + 1, why))

    def _skipped(self, number: int, why: str) -> RoundRecord:
        left, carried = self._last.model_noise_variance, self._last.carried_variance
        return RoundRecord(round=number, skipped=why, model_noise_variance=left, carried_variance=carried)

    @property
    def _last(self) -> RoundRecord:
        return self.rounds[-1] if self.rounds else RoundRecord(round=0, model_noise_variance=0.0)

    def enter(self, current: SessionRound) -> RoundRecord:
        """Charge a round to everyone who may have answered it, whether the answer arrived or not."""
        terms, size, outcome, pending = (
            current.agreed.terms,
            len(current.nodes),
            current.summed,
            self.pending(current),
        )
        self._charge(pending)
        before = (self._last.model_noise_variance or 0.0) - self._last.carried_variance
        carried = outcome.under_way * current.scale**2
        record = RoundRecord(
            round=current.number + 1,
            participants=size,
            survivors=len(outcome.survivors),
            lost={str(node): current.lost[node] for node in current.nodes if node in current.lost},
            void=not outcome.survivors,
            problems=outcome.problems
            + tuple(f"node {node}: {why}" for node, why in current.unhelpful.items()),
            exact=outcome.exact,
            uncancelled=outcome.uncancelled,
            masked=len(outcome.masked),
            tau2=terms.residual_variance / (terms.unit_variance * terms.neighbours),
            aggregate_variance_predicted=current.variance,
            noise=current.noise,
            model_noise_variance=before + current.stays * current.scale**2 + carried,
            carried_variance=carried,
            mu_joint=float(np.max(pending.joint, initial=0.0)),
            mu_marginal=pending.marginal,
            grid_delta=pending.grid_delta,
            clip=terms.clip,
            attempts=terms.attempt + 1,
            bytes_uploaded=current.bytes_uploaded,
            public=current.public,
        )
        self.rounds.append(record)
        return record

    def saved(self) -> dict[str, Any]:
        """All of it but the plan, as JSON: for a server that goes on with the run."""
        plain = ("charges", "evaluations", "grid_delta", "resumed", "weights")
        values = {name: getattr(self, name) for name in plain}
        rounds = [one.to_json() for one in self.rounds]
        return values | {"rounds": rounds, "clear_metrics": sorted(self.clear_metrics)}

    def restore(self, values: dict[str, Any]) -> None:
        """Go on from what `saved` gave."""
        self.charges = [
            (tuple(members), _joint(joint), marginal) for members, joint, marginal in values["charges"]
        ]
        self.rounds = [RoundRecord.from_json(record, "a saved round") for record in values["rounds"]]
        self.clear_metrics = set(values["clear_metrics"])
        self.evaluations, self.resumed = values["evaluations"], values["resumed"]
        self.grid_delta, self.weights = values["grid_delta"], values["weights"]

    def with_room(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes, all of which joined, whose budget, by the plan, leaves them another round."""
        nodes = list(nodes)
        if not self.plan.calibrated:
            return nodes
        numbers = np.array([self.members.by_node[node].number for node in nodes], dtype=np.int64)
        room = self._ledger(len(self.members.by_node)).room(numbers, self._planned_mu(numbers))
        return [node for node, has_room in zip(nodes, room.tolist(), strict=True) if has_room]

    def _planned_mu(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the next round will cost these members; with carried noise, every round so far was charged once."""
        history = [np.array(charged, dtype=np.int64) for charged, _, _ in self.charges]
        if self.schedule is not None and len(history) >= self.schedule.horizon:
            return np.zeros(numbers.size)  # A closing round has no updates.
        return self.plan.kind.planned_mu(self.plan, numbers, len(history), history)

    @property
    def statement(self) -> Statement:
        """The guarantee of the run, with what happened in it."""
        return make_statement(
            self.plan,
            self._ledger(max(1, len(self.members.by_node))),
            notes=self._caveats(),
            noise_from="clients",
        )

    def to_json(self) -> dict[str, Any]:
        """Statement, rounds, members and those who were left out, as `report.json` holds them."""
        return {
            "statement": self.statement.to_json(),
            "rounds": [one.to_json() for one in self.rounds],
            "left_out": {str(node): why for node, why in self.members.left_out.items()},
            "members": {str(node): one.identity.hex() for node, one in self.members.by_node.items()},
        }

    def _carried_caveats(self) -> list[str]:
        """What noise that was to be carried is still in the model, and how much was under way."""
        if self.schedule is None or not self.charges:
            return []
        last = self._last
        stays = math.sqrt((last.model_noise_variance or 0.0) - last.carried_variance)
        most = math.sqrt(max(one.carried_variance for one in self.rounds))
        caveats = [
            f"Noise in a coordinate of the model: standard deviation {stays:.3g} stays; up to {most:.3g} more was "
            "carried from one round to the next."
        ]
        opened, left = len(self.charges), math.sqrt(last.carried_variance)
        if opened < self.schedule.rounds and last.carried_variance:
            caveats.append(
                f"The run ended after {opened} of {self.schedule.rounds} rounds, which costs nobody more; what the "
                f"last one carried on, standard deviation {left:.3g}, is still in the model."
            )
        return caveats

    def _ledger(self, clients: int) -> Ledger:
        ledger = Ledger.empty(clients)
        for numbers, joint, marginal in self.charges:
            everyone = np.array(numbers, dtype=np.int64)
            known = everyone < clients
            mus = np.broadcast_to(joint, everyone.shape)[known]
            ledger.charge(everyone[known], mus, np.full(mus.size, marginal))
        ledger.budget = self.plan.budget(clients) if self.plan.calibrated else None
        return ledger

    def _caveats(self) -> tuple[str, ...]:
        caveats = []
        if self.charges and self.plan.calibrated:
            caveats.append(
                "Rounding to the grid, and the sampler's distance from the Gaussian, cost at most "
                f"{self.grid_delta:.2g} of delta, which is part of it; the claim is "
                "computational, as are the keys behind it."
            )
        if not self.proposal.tracker:
            placed = ": colluders are counted as if they were placed after it was drawn."
            caveats.append(
                "The server holds the beacon itself (no tracker), so it could have chosen the graph"
                + (
                    placed
                    if self.plan.colluders
                    else ", which would matter only if clients colluded with it."
                )
            )
        caveats += _taken_on_trust(self.members)
        if lost := sum(len(one.lost) for one in self.rounds):
            noisy = sum(not one.exact for one in self.rounds)
            caveats.append(
                f"Uploads lost or declined: {lost}; rounds in which noise was left uncancelled: {noisy}. Every round "
                "is charged as if the server had lied about it."
            )
        caveats += [f"Node {node} was left out: {why}." for node, why in self.members.left_out.items()]
        if skipped := [one.skipped for one in self.rounds if one.skipped]:
            caveats.append(f"Rounds that were skipped: {len(skipped)}; the last because {skipped[-1]}.")
        caveats += self._carried_caveats()
        if self.resumed:
            caveats.append(
                f"Times that the server ended and the run went on: {self.resumed}. A round that was under way then is "
                "charged, and not in the model."
            )
        if BELOW_CLIP in self.proposal.metrics.names:
            caveats.append(in_words([one.clip for one in self.rounds if one.clip is not None]))
        if (weight := self.proposal.metrics.weight) is not None:
            mean = f" ({self.weights[-1]:.2g} in the last round)" if self.weights else ""
            caveats.append(
                f"Updates were weighted by {weight[0].removeprefix(WEIGHT)!r}, up to {weight[1]:g}. Weights are "
                "coordinates of the upload, hidden and charged with it. The sum, with its noise, is divided by the "
                f"participants and by their noisy mean weight{mean}."
            )
        if inside := [name for name in self.proposal.metrics.names if not name.startswith(_OWN)]:
            names = ", ".join(inside)
            caveats.append(f"Metrics of `train` inside the noisy sum, protected as the updates are: {names}.")
        if self.evaluations:
            caveats.append("Metrics of `evaluate` travel in the clear and are not counted here.")
        if self.clear_metrics:
            names = ", ".join(sorted(self.clear_metrics))
            caveats.append(f"Metrics of `train` that travel in the clear and are not counted here: {names}.")
        return tuple(caveats)


def _joint(saved: float | list[float]) -> float | tuple[float, ...]:
    return tuple(saved) if isinstance(saved, list) else saved


def _taken_on_trust(members: Members) -> list[str]:
    """What the clients did not pin, in a sentence; none where everyone pinned everything."""
    size = len(members.by_node)
    trusting = Counter(
        name for member in members.by_node.values() for name in _TRUSTED if name not in member.pinned
    )
    if not trusting:
        return []
    if set(trusting.values()) == {size}:
        return [f"All {size} clients took on trust: {', '.join(_TRUSTED[name] for name in trusting)}."]
    counts = ", ".join(f"{_TRUSTED[name]} ({count})" for name, count in trusting.items())
    return [f"Of {size} clients, some took on trust: {counts}."]
