"""How the uploads of a round become a sum: the only place where a simulated round and one of the protocol differ.

    `Simulated`  the noise of all clients is drawn from the seed and added to their rows; several ranks may do it
    `Played`     a session and its nodes (`niss.session`), in this process: keys, beacon, signatures and all

Keys and noise of a played round come from the operating system, so such a run cannot be repeated to the last bit; its
noise has the same distribution as the simulated one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from niss.accounting import Charge, RoundPlan
from niss.errors import ConfigError, PrivacyError, RunFolderError
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import beside
from niss.protocol import LINKS_PER_ROUND, Entropy
from niss.runs import RoundRecord, SumNoise
from niss.session.node import Training
from niss.session.parties import together
from niss.session.ports import Stage
from niss.session.proposal import Setup
from niss.session.server import drive
from niss.simulation.uploads import Uploads

if TYPE_CHECKING:
    from niss.simulation.round import OpenRound

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Summed:
    """What the exchange of a round gave.

    total   the sum of the uploads that arrived, of this rank
    scale   with which it stands for all participants
    record  what the exchange knows of the round
    """

    total: FloatArray
    scale: float
    record: RoundRecord


class Exchange(Protocol):
    """How uploads are exchanged; `real` is whether by the protocol."""

    real: bool

    def prepare(self, opened: OpenRound) -> RoundPlan | None:
        """The noise of the round, before anyone trains for it; None where the parties agree on it themselves."""

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int]) -> Summed:
        """Hide the rows, charge the ledger, and sum what arrives from all seats but those `absent`."""

    def close(
        self, opened: OpenRound, uploads: Uploads, cohort: IntArray, absent: list[int]
    ) -> tuple[FloatArray, SumNoise]:
        """One more round without data, by `cohort`: its noise takes out what the last round, `opened`, carried.

        Nothing is charged: an update of zero reveals nothing. Returns the sum, of this rank, and the noise in it.
        """


class Simulated:
    """Noise from the seed."""

    real = False

    def prepare(self, opened: OpenRound) -> RoundPlan:
        federation, number, participants = opened.federation, opened.number, opened.participants
        plan = opened.plan.for_round(
            participants,
            weights=opened.public_weights,
            records=opened.sizes,
            beacon=federation.beacon(number),
            number=number,
        )
        return federation.beside(plan, opened.ledger.history)

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int]) -> Summed:
        """A dropout changes no charge: the server might only pretend it. Of a round that is repaired, the shares to
        lost clients are never drawn; it is charged as one in which the server was given them.
        """
        federation, noise = opened.federation, opened.stream.child("noise")
        assert opened.round_plan is not None
        plan = federation.without(opened.round_plan, absent)
        method, here = plan.plan.kind, plan.here

        # Each client adds its shares, the negatives of its neighbours' and its distortion (or what its method says).
        plan = method.add_client_noise(uploads, plan, noise)
        # What that costs each client is on record before anything is summed.
        joint_mu = method.joint_mu(plan, repairing=federation.repairing)
        opened.ledger.charge(plan.participants, Charge.of(joint_mu, plan.marginal_mu))
        # In the sum of the uploads the shares cancel; a trusted server may add noise of its own.
        total = uploads.total(here)
        if federation.trainer.ranks.first:
            method.add_server_noise(total, plan, noise, federation.history)

        lost, balance = method.loses(plan), plan.balance()
        predicted = 0.0 if lost else method.left_over_variance(plan)
        # Those who are left stand for all: dividing by their weight instead is post-processing. Not where it would
        # tell how many were drawn in secret, nor where noise is taken out again in another round.
        scale, weights = 1.0, opened.client_weights
        if absent and not lost and federation.sampling != "poisson" and not method.whole_run:
            scale = float(weights.sum() / weights[here].sum())
        record = RoundRecord(
            round=opened.number + 1,
            participants=plan.participants.size,
            survivors=here.size,
            exact=not (absent and method.shares_noise) or plan.repaired,
            tau2=float(plan.tau2.mean()),
            aggregate_variance_predicted=predicted,
            noise=SumNoise(scale**2 * predicted, tuple(method.earlier_covariances(plan).tolist())),
            carried_variance=method.under_way(plan),
            mu_joint=float(joint_mu.max()),
            mu_marginal=float(plan.marginal_mu.max()),
            balance=None if balance is None else asdict(balance),
            void=lost,
        )
        return Summed(total, scale, record)

    def close(
        self, opened: OpenRound, uploads: Uploads, cohort: IntArray, absent: list[int]
    ) -> tuple[FloatArray, SumNoise]:
        federation, number = opened.federation, opened.number + 1
        assert opened.round_plan is not None
        plan = replace(opened.round_plan, participants=cohort, number=number)
        plan = federation.without(federation.beside(plan, opened.ledger.history), absent)
        method, rows = plan.plan.kind, uploads.blank(federation.trainer.ranks.seats(cohort.size))
        method.add_client_noise(rows, plan, federation.stream_of(number).child("noise"))
        covariances = tuple(method.earlier_covariances(plan).tolist())
        return rows.total(plan.here), SumNoise(method.left_over_variance(plan), covariances)


class Played:
    """A session and its nodes.

    setup    of the session; its method must have a protocol
    entropy  returns so many random bytes; keys, beacons and noise come from it. Anything but the operating system's is
             for tests: whoever knows it knows every secret

    Where noise is carried over, the keys of a cohort are announced one round ahead and live in this process, so that a
    run goes on in the process that began it, or not at all.
    """

    real = True

    def __init__(self, setup: Setup, entropy: Entropy = os.urandom) -> None:
        if setup.plan.attempts > LINKS_PER_ROUND:
            raise ConfigError(f"a round has {LINKS_PER_ROUND} attempts at most", field="plan.attempts")
        self._coordinates, self._next = setup.coordinates, 0
        self.session, self.parties = together(setup, entropy)

    def prepare(self, opened: OpenRound) -> None:
        """Refuse (`RunFolderError`) a round whose cohort this process did not announce."""
        if self.session.proposal.schedule is not None and opened.number != self._next:
            raise RunFolderError(
                f"round {opened.number + 1} of a run whose noise is carried over cannot be played after round "
                f"{self._next}: the keys that its clients were announced with are gone with the process that made them",
                hint="start the run again, or resume runs with exchange = 'simulated'",
            )

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int]) -> Summed:
        """Every p_k is 1 / m."""
        number, clients, rows = opened.number, opened.participants, uploads.rows()
        schedule, following = self.session.proposal.schedule, None

        def charge(cost: Charge, attempt: int) -> None:
            opened.ledger.charge(clients, cost, attempt)

        if schedule is not None:
            history = [*opened.ledger.history, clients]
            last = number + 1 == schedule.rounds
            following = () if last else opened.federation.participants(number + 1, history)
        summed = self.exchange(
            number,
            clients,
            lambda seat: rows[seat] * clients.size,
            charge=charge,
            absent=absent,
            clip=opened.plan.clip,
            kept=rows.shape[1] - len(opened.weights),
            following=following,
        )
        # A simulated round remembers numbers, not whose upload was lost.
        return replace(summed, record=replace(summed.record, lost={}, problems=()))

    def close(
        self, opened: OpenRound, uploads: Uploads, cohort: IntArray, absent: list[int]
    ) -> tuple[FloatArray, SumNoise]:
        zero = np.zeros_like(uploads.rows()[0])
        summed = self.exchange(opened.number + 1, cohort, lambda _seat: zero, absent=absent, following=())
        return summed.total, summed.record.noise

    def exchange(
        self,
        number: int,
        members: IntArray | Sequence[int],
        updates: Callable[[int], NDArray[np.floating[Any]]],
        *,
        charge: Callable[[Charge, int], None] = lambda *_: None,
        absent: Collection[int] = (),
        clip: float | None = None,
        kept: int = 0,
        following: IntArray | Sequence[int] | None = None,
    ) -> Summed:
        """One round, from drawing its graph to the repaired sum.

        number     of the round, from 0
        members    the clients, a seat each
        updates    gives the bare update of a seat; its client clips and hides it
        charge     told what the round costs and which attempt at it that is, once, before the first upload; not of one
                   without updates
        absent     seats that never upload
        clip       of this round, at most the plan's; None: the plan's
        kept       how many of the last coordinates rounding to the grid must leave as long as they are
        following  where noise is carried over, the clients of the next round; nobody in the last

        Raises `PrivacyError` where no attempt keeps the promise; nothing is charged then.
        """
        session, nodes = self.session, [int(member) for member in members]
        seats, schedule = {node: seat for seat, node in enumerate(nodes)}, session.proposal.schedule

        def update(node: int, training: Training) -> FloatArray:
            terms = training.terms
            return beside(Grid(terms.grid_bits), updates(seats[node]), terms.clip, len(nodes), kept)

        gone = {nodes[seat] for seat in absent}
        deliver = self.parties.with_updates(update, self._coordinates, gone)
        after = None if following is None else [int(member) for member in following]
        session.begin(number, nodes, coordinates=self._coordinates, clip=clip, following=after)
        drive(session, deliver, until=Stage.ROUND)
        current = session.round
        if session.refused is not None or current is None or list(current.nodes) != nodes:
            why = (
                "others take part than were announced" if session.refused is None else session.refused.message
            )
            hint = None if session.refused is None else session.refused.hint
            raise PrivacyError(f"round {number + 1}: {why}", hint=hint)
        pending = session.books.pending(current)
        if schedule is None or number < schedule.horizon:
            mus = np.broadcast_to(np.asarray(pending.joint, dtype=np.float64), len(nodes))
            charge(Charge.of(mus, pending.marginal), current.agreed.terms.attempt)
        drive(session, deliver)
        _, record = session.finish()
        self._next = number + 1
        return Summed(current.summed.total, current.scale, record)
