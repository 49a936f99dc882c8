"""What a server remembers of a run: a line for each round, what was charged, and the statement of what was promised.

A round is charged to everyone who may have answered it, in two views: the joint one, which counts what the server and
its colluders see of all uploads together, and the marginal one, of a single upload looked at alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from niss.accounting import (
    Charge,
    Ledger,
    Plan,
    Promise,
    Statement,
    grid_delta,
    make_statement,
    run_grid_delta,
    upload_mu,
)
from niss.claims import digits
from niss.mechanism import Slots
from niss.mechanism.clipping import in_words
from niss.mechanism.noise import colluders_among
from niss.protocol.agreement import Agreed, participants_hash, terms_hash
from niss.protocol.server import Outcome
from niss.runs import RoundRecord, SumNoise
from niss.session.members import Members, Turns
from niss.session.metrics import BELOW_CLIP, BLANK, NOISE, OWN_BITS, WEIGHT
from niss.session.proposal import Proposal

_OWN = (*OWN_BITS, WEIGHT)
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
class RoundCharge:
    """What a round costs everyone who may have answered it.

    round       counts from 1
    members     their numbers
    joint       mu of each in the joint view, one for all or one by one
    marginal    mu of each in the marginal view
    grid_delta  what its grid adds to delta
    """

    round: int
    members: tuple[int, ...]
    joint: float | tuple[float, ...]
    marginal: float
    grid_delta: float


@dataclass
class RunState:
    """All that a server remembers of a run between two rounds. Secret, as it has the chain's seed.

    It is kept as JSON, by `niss.settings.to_values` and `check_json`. One-time keys in stock are left out: clients hand
    over new ones when they enrol again.

    proposal       of the run, as it was signed
    clip           of the next round
    coordinator    what it needs to go on with its chain
    members        who joined, and what is held against them
    turns          who sat where, if noise is carried from round to round
    charges        round by round
    pending        what the round that is open costs, should nothing more be heard of it
    rounds         what happened, skipped rounds too
    evaluations    how many messages of `evaluate` were answered, whose metrics nothing protects
    clear_metrics  names of the metrics of `train` that clients sent unprotected
    resumed        how often the server ended and the run went on
    weights        the noisy mean weight of the updates in each round, as a part of the cap
    """

    __pydantic_config__: ClassVar[Any] = {"ser_json_bytes": "hex", "val_json_bytes": "hex"}

    proposal: bytes
    clip: float
    coordinator: dict[str, Any] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    turns: Turns | None = None
    charges: list[RoundCharge] = field(default_factory=list)
    pending: RoundCharge | None = None
    rounds: list[RoundRecord] = field(default_factory=list)
    evaluations: int = 0
    clear_metrics: set[str] = field(default_factory=set)
    resumed: int = 0
    weights: list[float] = field(default_factory=list)


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
    outcome         what is left in the sum, once the round is over, and of the sum itself the hidden metrics
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


class Books:
    """Everything that is charged and everything that happened, as the server knows it.

    Each client keeps its own ledger and trusts it alone; this one serves the report, and spares clients a round
    that they would refuse.

    assess   (round, colluders) -> the worst mu of any client in it
    charges  round by round
    rounds   what happened, skipped rounds too
    """

    def __init__(self, proposal: Proposal, state: RunState, assess: Callable[[Agreed, int], float]) -> None:
        """`proposal` is what the clients are promised; what happens is noted in `state`."""
        self._proposal, self._state, self.assess = proposal, state, assess
        self._plan, self._schedule, self._members = proposal.plan, proposal.schedule, state.members
        self.charges, self.rounds = state.charges, state.rounds

    def weigh(self, weight: float) -> float:
        """What to divide the mean of weighted updates by: the mean of this noisy mean weight and all before it."""
        self._state.weights.append(weight)
        return self._mean_weight

    @property
    def _mean_weight(self) -> float:
        weights = self._state.weights
        return max(math.fsum(weights) / len(weights), _LEAST_WEIGHT)

    def pending(self, current: SessionRound) -> RoundCharge:
        """What a round costs everyone who may have answered it: where noise is carried over, each what it adds to the
        participations before."""
        terms, size, relation = current.agreed.terms, len(current.nodes), self._plan.relation
        numbers = [
            self._members.by_node[node].number for node in current.nodes if node not in current.refused
        ]
        charged, number = tuple(numbers), current.number + 1
        if self._schedule is None:
            mu = self.assess(current.agreed, colluders_among(self._plan.collusion, size))
            marginal = upload_mu(terms, size, relation)
            return RoundCharge(number, charged, mu, marginal, grid_delta(self._plan, terms, size))
        return RoundCharge(
            number,
            charged,
            tuple(self._planned_mu(np.array(charged, dtype=np.int64)).tolist()),
            upload_mu(terms, size, relation, self._schedule.rounds),
            run_grid_delta(self._schedule, Promise.of(self._plan)),
        )

    def lose(self, pending: RoundCharge, why: str) -> None:
        """Charge a round whose result was lost: its participants may have answered, and so spent it."""
        self.charges.append(pending)
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
        terms, outcome, pending = current.agreed.terms, current.summed, self.pending(current)
        self.charges.append(pending)
        before = (self._last.model_noise_variance or 0.0) - self._last.carried_variance
        carried = outcome.under_way * current.scale**2
        hidden, survivors = self.means(current), len(outcome.survivors)
        record = RoundRecord(
            round=current.number + 1,
            participants=len(current.nodes),
            survivors=survivors,
            blanks=survivors * hidden[BLANK] if BLANK in hidden else None,
            blanks_deviation=survivors * hidden.get(BLANK + NOISE, 0.0),
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

    def means(self, current: SessionRound) -> dict[str, float]:
        """The metrics inside the uploads that were summed, by name, and the deviation of the noise in each."""
        metrics, outcome = self._proposal.metrics, current.summed
        if not metrics.ranges or not outcome.survivors:
            return {}
        weight = len(current.nodes) / len(outcome.survivors)
        tail = outcome.total * weight
        return metrics.means(tail, current.agreed.terms.clip, math.sqrt(current.variance) * weight)

    @property
    def blanks(self) -> tuple[float, float] | None:
        """What part of all uploads so far was a blank, and the deviation of the noise in that; None: not counted.

        Noise that one round takes out of another only makes it smaller.
        """
        counted = [one for one in self.rounds if one.blanks is not None and one.survivors]
        if not counted:
            return None
        uploads = sum(one.survivors for one in counted)
        noise = math.sqrt(math.fsum(one.blanks_deviation**2 for one in counted))
        return math.fsum(one.blanks or 0.0 for one in counted) / uploads, noise / uploads

    @property
    def summed(self) -> Counter[int]:
        """By member: of the rounds that were charged to it, how many ended in a sum."""
        sums = {one.round for one in self.rounds if one.survivors}
        return Counter(one for charge in self.charges if charge.round in sums for one in charge.members)

    def with_room(self, nodes: Iterable[int]) -> list[int]:
        """Those of these nodes, all of which joined, that can pay for another round: by the plan, and in their word."""
        nodes = list(nodes)
        if not self._plan.calibrated or not nodes:
            return nodes
        numbers = np.array([self._members.by_node[node].number for node in nodes], dtype=np.int64)
        planned = Charge.of(self._planned_mu(numbers), batch=self._plan.batch)
        room = self._ledger(len(self._members.by_node)).room(numbers, planned)
        paid = Counter(one for charge in self.charges for one in charge.members)
        members = [self._members.by_node[node] for node in nodes]
        return [
            member.node
            for member, has_room in zip(members, room.tolist(), strict=True)
            if has_room and paid[member.number] < member.rounds
        ]

    def _planned_mu(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the next round will cost these members; with carried noise, every round so far was charged once."""
        history = [np.array(charge.members, dtype=np.int64) for charge in self.charges]
        if self._schedule is not None and len(history) >= self._schedule.horizon:
            return np.zeros(numbers.size)  # A closing round has no updates.
        return self._plan.kind.planned_mu(self._plan, numbers, len(history), history)

    @property
    def statement(self) -> Statement:
        """The guarantee of the run, with what happened in it."""
        return make_statement(
            self._plan,
            self._ledger(max(1, len(self._members.by_node))),
            notes=self._caveats(),
            noise_from="clients",
        )

    def to_json(self) -> dict[str, Any]:
        """Statement, what each client spent, rounds, members and who was left out, as `report.json` holds them."""
        statement = self.statement
        return {
            "statement": statement.to_json(),
            "clients": statement.clients.to_json(),
            "rounds": [one.to_json() for one in self.rounds],
            "left_out": {str(node): why for node, why in self._members.left_out.items()},
            "members": {str(node): one.identity.hex() for node, one in self._members.by_node.items()},
        }

    def _carried_caveats(self) -> list[str]:
        """What noise that was to be carried is still in the model, and how much was under way."""
        if self._schedule is None or not self.charges:
            return []
        last = self._last
        stays = math.sqrt((last.model_noise_variance or 0.0) - last.carried_variance)
        most = math.sqrt(max(one.carried_variance for one in self.rounds))
        caveats = [
            f"Noise in a coordinate of the model: standard deviation {stays:.3g} stays; up to {most:.3g} more was "
            "carried from one round to the next."
        ]
        opened, left = len(self.charges), math.sqrt(last.carried_variance)
        if opened < self._schedule.rounds and last.carried_variance:
            caveats.append(
                f"The run ended after {opened} of {self._schedule.rounds} rounds, which costs nobody more; what the "
                f"last one carried on, standard deviation {left:.3g}, is still in the model."
            )
        return caveats

    def _metric_caveats(self) -> list[str]:
        """What travelled inside the uploads beside the updates."""
        metrics, caveats = self._proposal.metrics, []
        if BELOW_CLIP in metrics.ranges:
            caveats.append(in_words([one.clip for one in self.rounds if one.clip is not None]))
        if (blanks := self.blanks) is not None:
            caveats.append(
                f"About {max(blanks[0], 0.0):.0%} of the uploads were blanks (noise of {blanks[1]:.0%}): an app failed "
                "or was late. They are charged like any other and counted inside the noisy sum, which says of nobody "
                "whether it was one."
            )
        if (weight := metrics.weight) is not None:
            mean = f" over all rounds, {weight[1] * self._mean_weight:.3g}" if self._state.weights else ""
            caveats.append(
                f"Updates were weighted by {weight[0].removeprefix(WEIGHT)!r}, up to {weight[1]:g}. Weights are "
                "coordinates of the upload, hidden and charged with it. The sum, with its noise, is divided by the "
                f"participants and by their noisy mean weight{mean}."
            )
        if inside := [name for name in metrics.ranges if not name.startswith(_OWN)]:
            names = ", ".join(inside)
            caveats.append(f"Metrics of `train` inside the noisy sum, protected as the updates are: {names}.")
        return caveats

    def _ledger(self, clients: int) -> Ledger:
        budget = self._plan.budget(clients) if self._plan.calibrated else None
        ledger = Ledger.empty(clients, budget if isinstance(budget, Slots) else None, unit=self._plan.unit)
        for charge in self.charges:
            everyone = np.array(charge.members, dtype=np.int64)
            known = everyone < clients
            joint = charge.joint if isinstance(charge.joint, float) else np.array(charge.joint)[known]
            cost = Charge.of(joint, charge.marginal, batch=self._plan.batch)
            # Who has no slot left has refused the round, whatever the server made of it.
            ledger.charge(everyone[known][ledger.room(everyone[known], cost)], cost)
        ledger.budget = budget
        return ledger

    def _caveats(self) -> tuple[str, ...]:
        caveats = []
        if self.charges and self._plan.calibrated:
            caveats.append(grid_caveat(self._plan, max(charge.grid_delta for charge in self.charges)))
        if not self._proposal.tracker:
            placed = ": colluders are counted as if they were placed after it was drawn."
            caveats.append(
                "The server holds the beacon itself (no tracker), so it could have chosen the graph"
                + (
                    placed
                    if self._plan.collusion
                    else ", which would matter only if clients colluded with it."
                )
            )
        caveats += _taken_on_trust(self._members)
        if lost := sum(len(one.lost) for one in self.rounds):
            noisy = sum(not one.exact for one in self.rounds)
            caveats.append(
                f"Uploads lost or declined: {lost}; rounds in which noise was left uncancelled: {noisy}. Every round "
                "is charged as if the server had lied about it."
            )
        caveats += [f"Node {node} was left out: {why}." for node, why in self._members.left_out.items()]
        charged = {charge.round for charge in self.charges}
        if skipped := [one.skipped for one in self.rounds if one.skipped and one.round not in charged]:
            caveats.append(f"Rounds that were skipped: {len(skipped)}; the last because {skipped[-1]}.")
        caveats += self._carried_caveats()
        if self._state.resumed:
            caveats.append(
                f"Times that the server ended and the run went on: {self._state.resumed}. A round that was under way "
                "then is charged, and not in the model."
            )
        if self._proposal.metrics.ranges:
            caveats += self._metric_caveats()
        if self._state.evaluations:
            caveats.append("Metrics of `evaluate` travel in the clear and are not counted here.")
        if self._state.clear_metrics:
            names = ", ".join(sorted(self._state.clear_metrics))
            caveats.append(f"Metrics of `train` that travel in the clear and are not counted here: {names}.")
        return tuple(caveats)


def grid_caveat(plan: Plan, spent: float) -> str:
    """What a statement says of the part of delta that the real protocol spent on what is not in the noise."""
    large = " and batches too large to be sent" if plan.unit == "record" else ""
    return (
        f"Rounding to the grid{large}, and the sampler's distance from the Gaussian, cost at most {digits(spent, 2)} "
        "of delta, which is part of it; the claim is computational, as are the keys behind it."
    )


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
