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

from niss.accounting import Charge
from niss.errors import ConfigError, PrivacyError
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import beside
from niss.protocol import LINKS_PER_ROUND, Entropy
from niss.runs import RoundRecord, SumNoise
from niss.session import together
from niss.session.node import Training
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

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int]) -> Summed:
        """Hide the rows, charge the ledger, and sum what arrives from all seats but those `absent`.

        A round without data (`opened.closing`) is not charged: an update of zero reveals nothing.
        """


class Simulated:
    """Noise from the seed."""

    real = False

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int]) -> Summed:
        """A dropout changes no charge: the server might only pretend it. Of a round that is repaired, the shares to
        lost clients are never drawn; it is charged as one in which the server was given them.
        """
        federation, noise = opened.federation, opened.stream.child("noise")
        plan = opened.round_plan
        assert plan is not None
        plan = plan.with_lost(absent, repaired=federation.repairs(plan.graph, absent))
        method, here = plan.plan.kind, plan.here

        # Each client adds its shares, the negatives of its neighbours' and its distortion (or what its method says).
        plan = method.add_client_noise(uploads, plan, noise)
        # What that costs each client is on record before anything is summed.
        joint_mu = np.zeros(here.size)
        if not opened.closing:
            joint_mu = method.joint_mu(plan, repairing=federation.repairing)
            opened.ledger.charge(
                plan.participants, Charge.of(joint_mu, plan.marginal_mu, batch=plan.plan.batch)
            )
        # In the sum of the uploads the shares cancel; a trusted server may add noise of its own.
        total = uploads.total(here)
        if federation.trainer.ranks.first:
            method.add_server_noise(total, plan, federation.history)

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
        self._coordinates = setup.coordinates
        self.session, self.parties = together(setup, entropy)

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int]) -> Summed:
        """Every p_k is 1 / m."""
        number, clients, rows = opened.number, opened.participants, uploads.rows()
        schedule, following = self.session.proposal.schedule, None

        def charge(cost: Charge, attempt: int) -> None:
            if not opened.closing:
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
        charge     told what the round costs and which attempt at it that is, once, before the first upload
        absent     seats that never upload
        clip       of this round, at most the plan's; None: the plan's
        kept       how many of the last coordinates rounding to the grid must leave as long as they are
        following  where noise is carried over, the clients of the next round; nobody in the last

        Raises `PrivacyError` where no attempt keeps the promise; nothing is charged then.
        """
        session, nodes = self.session, [int(member) for member in members]
        seats = {node: seat for seat, node in enumerate(nodes)}

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
            refused = session.refused or PrivacyError("others take part than were announced")
            raise PrivacyError(f"round {number + 1}: {refused.message}", hint=refused.hint)
        pending = session.books.pending(current)
        mus = np.broadcast_to(np.asarray(pending.joint, dtype=np.float64), len(nodes))
        records = current.agreed.terms.records
        batch = None if records is None else records.batch
        charge(Charge.of(mus, pending.marginal, batch=batch), current.agreed.terms.attempt)
        drive(session, deliver)
        _, record = session.finish()
        return Summed(current.summed.total, current.scale, record)
