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

from niss.accounting import Plan, RoundPlan
from niss.errors import ConfigError, PrivacyError, RunFolderError
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import beside
from niss.methods import mu_of
from niss.protocol import LINKS_PER_ROUND, Entropy
from niss.runs import RoundRecord, SumNoise
from niss.session.node import Training
from niss.session.parties import together
from niss.session.proposal import Setup
from niss.session.requests import Stage, drive
from niss.simulation.carrying import beacon_of, beside_rounds, close_run, next_cohort
from niss.simulation.sampling import absent_seats
from niss.simulation.uploads import Uploads

if TYPE_CHECKING:
    from niss.simulation.round import Federation, OpenRound

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Charge = Callable[[FloatArray, float, int], None]
"""(mu of each seat in the joint view, mu of an upload looked at alone, which attempt at the round it is)"""


@dataclass(frozen=True)
class Summed:
    """What a round gave.

    total   the sum of the uploads, standing for all participants
    record  what is known of it so far
    zeroed  participants whose training diverged, of all ranks
    """

    total: FloatArray
    record: RoundRecord
    zeroed: int


class Exchange(Protocol):
    """How uploads are exchanged; `real` is whether by the protocol."""

    real: bool

    def prepare(self, opened: OpenRound) -> RoundPlan | None:
        """The noise of the round, before anyone trains for it; None where the parties agree on it themselves."""

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int], zeroed: int) -> Summed:
        """Hide the rows, charge the ledger, and sum what arrives from all seats but those `absent`.

        zeroed  rows of this rank that are zero because training diverged
        """


class Simulated:
    """Noise from the seed."""

    real = False

    def prepare(self, opened: OpenRound) -> RoundPlan:
        federation, number, participants = opened.federation, opened.number, opened.participants
        plan = opened.plan.for_round(
            participants,
            weights=opened.public_weights,
            records=federation.materials.clients.sizes[participants],
            beacon=beacon_of(federation, number),
            number=number,
        )
        return beside_rounds(federation, plan, opened.ledger.history)

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int], zeroed: int) -> Summed:
        """A dropout changes no charge: the server might only pretend it. Of a round that is repaired, the shares to
        lost clients are never drawn; it is charged as one in which the server was given them.
        """
        federation, plan, noise = opened.federation, opened.round_plan, opened.stream.child("noise")
        assert plan is not None
        method, ranks = plan.plan.kind, federation.trainer.ranks
        plan = federation.without(plan, absent)
        here, repaired = plan.here, plan.repaired
        without_noise = uploads.total(here)

        # Each client adds its shares, the negatives of its neighbours' and its distortion (or what its method says).
        plan = method.add_client_noise(uploads, plan, noise)
        # What that costs each client is on record before anything is summed.
        joint_mu = method.joint_mu(plan, repairing=federation.repairing)
        opened.ledger.charge(plan.participants, joint_mu, plan.marginal_mu)
        # In the sum of the uploads the shares cancel; a trusted server may add noise of its own.
        total = uploads.total(here)
        if ranks.first:
            method.add_server_noise(total, plan, noise, federation.history)
        total, without_noise, diverged = ranks.pool(total, without_noise, np.array([float(zeroed)]))

        predicted, covariances = method.left_over_variance(plan), method.earlier_covariances(plan)
        lost = method.loses(plan)
        if lost:
            total, without_noise, predicted = np.zeros_like(total), np.zeros_like(total), 0.0
        # Those who are left stand for all: dividing by their weight instead is post-processing. Not where it would
        # tell how many were drawn in secret, nor where noise is taken out again in another round.
        scale, weights = 1.0, opened.client_weights
        if absent and not lost and federation.sampling != "poisson" and not method.whole_run:
            scale = float(weights.sum() / weights[here].sum())
        measured = float(np.mean((total - without_noise) ** 2))
        left = SumNoise(scale**2 * predicted, tuple(covariances.tolist()))
        under_way = federation.config.training.server_rate**2 * method.under_way(plan)
        if plan.plan.closing and opened.number + 1 == plan.plan.planned_rounds:
            closed, extra = self._close(federation, plan, uploads)
            total, left, under_way = total + closed, left.joined(extra), 0.0
        balance = plan.balance()
        record = RoundRecord(
            round=opened.number + 1,
            participants=plan.participants.size,
            survivors=here.size,
            exact=not (absent and method.shares_noise) or repaired,
            tau2=float(plan.tau2.mean()),
            aggregate_variance=measured,
            aggregate_variance_predicted=predicted,
            noise=left,
            carried_variance=under_way,
            mu_joint=float(joint_mu.max()),
            mu_marginal=float(plan.marginal_mu.max()),
            mu_outsider=plan.outsider_mu(predicted),
            balance=None if balance is None else asdict(balance),
            void=lost,
        )
        return Summed(total * scale, record, int(diverged[0]))

    def _close(
        self, federation: Federation, plan: RoundPlan, uploads: Uploads
    ) -> tuple[FloatArray, SumNoise]:
        """One more round without data, after the last: its sum, and the noise in it."""
        method = plan.plan.kind
        closed, closing = close_run(federation, plan, uploads)
        return closed, SumNoise(
            method.left_over_variance(closing), tuple(method.earlier_covariances(closing).tolist())
        )


class Played:
    """A session and its nodes.

    plan          what every client is promised; its method must have a protocol
    rounds        most rounds that will be played: the beacon's chain has a link for each attempt at each
    participants  fewest participants of a round; where noise is carried over, of every round
    coordinates   entries of an upload
    mode          `tolerate` leaves the noise of lost clients in the sum, `repair` has it revealed and taken out
    grid_bits     the grid has steps of 2^-grid_bits; None: chosen for the noise
    modulus_bits  of an uploaded number
    entropy       returns so many random bytes; keys, beacons and noise come from it. Anything but the operating
                  system's is for tests: whoever knows it knows every secret

    Where noise is carried over, the keys of a cohort are announced one round ahead and live in this process, so that a
    run goes on in the process that began it, or not at all.
    """

    real = True

    def __init__(
        self,
        plan: Plan,
        *,
        rounds: int,
        coordinates: int,
        participants: int | None = None,
        mode: str = "tolerate",
        grid_bits: int | None = None,
        modulus_bits: int = 64,
        entropy: Entropy = os.urandom,
    ) -> None:
        if plan.attempts > LINKS_PER_ROUND:
            raise ConfigError(f"a round has {LINKS_PER_ROUND} attempts at most", field="plan.attempts")
        setup = Setup(
            plan=plan,
            rounds=rounds,
            # Two honest ones. What a small round costs is bounded by mu.
            participants=plan.colluders + 2 if participants is None else participants,
            mode=mode,
            coordinates=coordinates,
            grid_bits=grid_bits,
            modulus_bits=modulus_bits,
        )
        self._coordinates, self._next = coordinates, 0
        self.session, self.parties = together(setup, entropy)

    def prepare(self, opened: OpenRound) -> None:
        """Refuse (`RunFolderError`) a round whose cohort this process did not announce."""
        if self.session.proposal.schedule is not None and opened.number != self._next:
            raise RunFolderError(
                f"round {opened.number + 1} of a run whose noise is carried over cannot be played after round "
                f"{self._next}: the keys that its clients were announced with are gone with the process that made them",
                hint="start the run again, or resume runs with exchange = 'simulated'",
            )

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int], zeroed: int) -> Summed:
        """Every p_k is 1 / m."""
        federation, number, clients = opened.federation, opened.number, opened.participants
        rows, size, schedule = uploads.rows(), opened.participants.size, self.session.proposal.schedule

        def charge(joint: FloatArray, marginal: float, attempt: int) -> None:
            opened.ledger.charge(clients, joint, np.full(size, marginal), attempt)

        following = None
        if schedule is not None:
            history = [*opened.ledger.history, clients]
            following = next_cohort(federation, number + 1, history) if number + 1 < schedule.rounds else ()
        total, record = self.exchange(
            number,
            clients,
            lambda seat: rows[seat] * size,
            charge=charge,
            absent=absent,
            clip=opened.plan.clip,
            kept=rows.shape[1] - len(opened.weights),
            following=following,
        )
        here = np.delete(np.arange(size), absent)
        without_noise = rows[here].sum(axis=0, dtype=np.float64)
        predicted = record.aggregate_variance_predicted or 0.0
        scale, noise = self._scale, record.noise
        rate, under_way = federation.config.training.server_rate, record.carried_variance
        measured = float(np.mean((total - without_noise) ** 2))
        if schedule is not None and schedule.horizon == number + 1 < schedule.rounds:
            stream, dropout = federation.stream.child("round", number + 1), federation.config.protocol.dropout
            zero, missing = np.zeros_like(rows[0]), absent_seats(size, dropout, stream.child("dropout"))
            assert following is not None
            closed, after = self.exchange(
                number + 1, following, lambda _seat: zero, charge=charge, absent=missing, following=()
            )
            total, noise, under_way = total + closed, noise.joined(after.noise), 0.0
        record = replace(
            record,
            lost={},
            problems=(),
            clip=None,
            aggregate_variance=measured,
            noise=noise,
            carried_variance=rate**2 * under_way,
            mu_outsider=float(mu_of(opened.plan.sensitivity(1.0 / size, 1.0), predicted)),
        )
        return Summed(total * scale, record, zeroed)

    def exchange(
        self,
        number: int,
        members: IntArray | Sequence[int],
        updates: Callable[[int], NDArray[np.floating[Any]]],
        *,
        charge: Charge = lambda *_: None,
        absent: Collection[int] = (),
        clip: float | None = None,
        kept: int = 0,
        following: IntArray | Sequence[int] | None = None,
    ) -> tuple[FloatArray, RoundRecord]:
        """One round, from drawing its graph to the repaired sum.

        number     of the round, from 0
        members    the clients, a seat each
        updates    gives the bare update of a seat; its client clips and hides it
        charge     told what the round costs, once, before the first upload; not of one without updates
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
            charge(mus, pending.marginal, current.agreed.terms.attempt)
        drive(session, deliver)
        _, record = session.finish()
        self._next, self._scale = number + 1, current.scale
        return current.summed.total, record
