"""The rows of a round, one for each client: first what it learned, then what it uploads; and how they become a sum.

A round does the same with its rows wherever they are: clip each, hide it in noise, sum them. `HostUploads` does
it on the processor and is the reference; `niss.simulation.cuda` does it on the device where the clients were
trained, so that the rows never leave it. Where several processes train (`niss.simulation.ranks`), each has the rows of
some seats and does with them what one process would do: noise is drawn by seat and by edge, and whatever is summed adds
up to the sum of all.

An `Exchange` makes the sum: the only place where a simulated round and one of the protocol differ.

    `Simulated`  the noise of all clients is drawn from the seed and added to their rows; several ranks may do it
    `Played`     a session and its nodes (`niss.session`), in this process: keys, beacon, signatures and all

Keys and noise of a played round come from the operating system, so such a run cannot be repeated to the last bit; its
noise has the same distribution as the simulated one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from niss.accounting import Charge
from niss.errors import ConfigError, PrivacyError
from niss.mechanism import (
    add_gaussian,
    add_shares,
    clip_elements,
    clip_l2,
    distortion_named,
    l2_norm,
    require_finite,
)
from niss.mechanism.blocks import Blocks
from niss.mechanism.clipping import bit_weight, room, was_short
from niss.mechanism.grid import Grid
from niss.mechanism.rounding import beside
from niss.mechanism.shares import (
    Common,
    Distortion,
    Edges,
    SomeEdges,
    add_part_of_spread,
    add_spread,
    find_clique,
)
from niss.methods import UploadRows
from niss.protocol.keys import LINKS_PER_ROUND, Entropy
from niss.randomness import SimStream
from niss.records import Records
from niss.runs import RoundRecord, SumNoise
from niss.session import Paced, together
from niss.session.node import Training
from niss.session.ports import Stage
from niss.session.proposal import Setup
from niss.session.server import drive

if TYPE_CHECKING:
    from torch import Tensor

    from niss.simulation.round import OpenRound


FloatArray = NDArray[np.float64]
Rows = NDArray[np.floating[Any]]
Silo = tuple[Records, FloatArray, Paced]
Learned = Rows | Silo | None
Clipping = Literal["none", "l2", "elements"]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Seats:
    """Whose rows these are: row i is that of seat `mine[i]`, of `count` seats that a round has."""

    count: int
    mine: IntArray

    @classmethod
    def all(cls, count: int) -> Seats:
        return cls(count, np.arange(count))

    @property
    def complete(self) -> bool:
        return self.mine.size == self.count

    @cached_property
    def rows(self) -> IntArray:
        """The row of each seat; -1 where another process has it."""
        found = np.full(self.count, -1, dtype=np.int64)
        found[self.mine] = np.arange(self.mine.size)
        return found

    def rows_of(self, seats: IntArray | None) -> IntArray:
        """The rows that these seats, or all, have here."""
        found = self.rows if seats is None else self.rows[seats]
        return found[found >= 0]


class Uploads(UploadRows, Protocol):
    """The rows of one round, changed in place: what methods add noise to (`UploadRows`), and how they are clipped
    before and summed after."""

    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        """Turn each update x_k into its clipped contribution `p_k x_k`.

        clipping  "l2": ||x_k||_2 <= clip after rounding too; "elements": every |entry| <= clip; "none": neither
        weights   p_k, one for each seat

        A row with NaN or infinite entries becomes zero; returns how many such rows there were here.
        """

    def bound_with_bit(self, clip: float, weights: NDArray[np.float64]) -> tuple[Uploads, int]:
        """Turn each update into `p_k [w_k ; bit]`, within the clip together (`niss.mechanism.clipping`).

        Returns the rows, one entry longer than these, which are not to be used any more; and what `bound` returns.
        """

    def total(self, seats: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """The sum of the rows that these seats, or all, have here, in float64.

        Over all processes these add up to the sum of the round; one alone may have parts in it that cancel in there.
        """

    def rows(self) -> Rows:
        """The rows on the processor, to be read only."""

    def blank(self, seats: Seats) -> Uploads:
        """Rows of zeros of the same length for these seats, where these are."""


def make_uploads(rows: Tensor, seats: Seats) -> Uploads:
    """The updates of a cohort, [clients, h], as uploads that stay where they are.

    float64 rows of a device come to the processor: the device's clipping and noise are for float32.
    """
    if rows.is_cuda and rows.dtype.itemsize == 4:
        from niss.simulation.cuda import DeviceUploads

        return DeviceUploads(rows, seats)
    return HostUploads(rows.cpu().numpy(), seats)


class HostUploads:
    """Rows [clients, h] in the memory of the processor: the reference; `Uploads` says what the methods do."""

    def __init__(self, rows: Rows, seats: Seats | None = None) -> None:
        self._rows = rows
        self._seats = Seats.all(len(rows)) if seats is None else seats
        # Of normals of which the mean over all seats is to be taken, those seats, and the sum of what was drawn here.
        self._spreads: list[tuple[IntArray, NDArray[np.float64]]] = []

    @property
    def shape(self) -> tuple[int, int]:
        return self._seats.count, self._rows.shape[1]

    def bound(self, clipping: Clipping, clip: float, weights: NDArray[np.float64]) -> int:
        lost = 0
        for row, weight in zip(self._rows, weights[self._seats.mine], strict=True):
            bounded, finite = _bounded(row, clipping, clip)
            np.multiply(bounded, weight, out=row, casting="same_kind")
            lost += not finite
        return lost

    def bound_with_bit(self, clip: float, weights: NDArray[np.float64]) -> tuple[HostUploads, int]:
        rows, limit = self._rows, room(clip)
        bits = np.array([was_short(l2_norm(row), limit) for row in rows], dtype=np.float64)
        lost = self.bound("l2", limit, weights)
        tails = (bit_weight(clip) * weights[self._seats.mine] * bits).astype(rows.dtype)
        return HostUploads(np.concatenate([rows, tails[:, None]], axis=1), self._seats), lost

    def add_own_noise(self, deviations: NDArray[np.float64], stream: SimStream) -> None:
        for row, seat in zip(self._rows, self._seats.mine.tolist(), strict=True):
            add_gaussian(row, float(deviations[seat]), stream.child("own", seat))

    def add_shares(
        self,
        edges: Edges,
        *,
        unit_variance: float,
        tau2: ArrayLike,
        distortion: str | Distortion,
        stream: SimStream,
        keep_factors: bool = False,
    ) -> Rows | None:
        # Where everyone shares with everyone, the same law is drawn in one vector for each client.
        if distortion_named(distortion).additive and (clique := find_clique(edges)) is not None:
            self.add_spread(clique.seats, clique.variance(unit_variance), (), stream, "clique")
            # The shares are added; what was received of them is left to be distorted.
            edges = SomeEdges.of(edges, np.zeros(edges.senders.size, dtype=bool))
        return add_shares(
            self._rows, edges, unit_variance=unit_variance, tau2=tau2, distortion=distortion,
            stream=stream, keep_factors=keep_factors, rows=self._seats.rows,
        )  # fmt: skip

    def add_spread(
        self,
        seats: IntArray,
        variance: float,
        common: Sequence[Common],
        stream: SimStream,
        name: str = "spread",
    ) -> None:
        if self._seats.complete:
            add_spread(self._rows, seats, variance, common, stream, name)
            return
        places = self._seats.rows_of(seats)
        streams = [stream.child(name, seat) for seat in self._seats.mine[places].tolist()]
        drawn = add_part_of_spread(self._rows, places, variance, common, streams)
        self._spreads.append((seats, drawn))

    def blank(self, seats: Seats) -> HostUploads:
        return HostUploads(np.zeros((seats.mine.size, self._rows.shape[1]), dtype=self._rows.dtype), seats)

    def total(self, seats: IntArray | None = None) -> NDArray[np.float64]:
        places = self._seats.rows_of(seats)
        rows = self._rows if places.size == len(self._rows) else self._rows[places]
        summed: NDArray[np.float64] = rows.sum(axis=0, dtype=np.float64)
        for spread, drawn in self._spreads:
            # What of the mean belongs to this process, in a sum over these seats.
            share = 1.0 if seats is None else float(np.isin(spread, seats).mean())
            summed -= share * drawn
        return summed

    def rows(self) -> Rows:
        return self._rows


def _bounded(update: Rows, clipping: Clipping, clip: float) -> tuple[Rows, bool]:
    """The clipped update of one client, a new vector or the update itself; zero, and False, where it diverged."""
    try:
        if clipping == "none":
            require_finite(update)
            return update, True
        return (clip_l2 if clipping == "l2" else clip_elements)(update, clip), True
    except PrivacyError:
        return np.zeros_like(update), False


@dataclass(frozen=True)
class Summed:
    """What the exchange of a round gave.

    total   the sum of the uploads that arrived, of this rank
    bare    the same sum without noise, which no server knows
    scale   with which it stands for all participants
    record  what the exchange knows of the round
    """

    total: FloatArray
    bare: FloatArray
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
        bare = uploads.total(here)

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
        return Summed(total, bare, scale, record)


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
        self._records: dict[int, Records] = {}  # by client

    def play(self, opened: OpenRound, uploads: Uploads, absent: list[int]) -> Summed:
        """Every p_k is 1 / m. Where records are hidden, the rows are zero: nodes draw batches and train here."""
        number, clients, rows = opened.number, opened.participants, uploads.rows()
        schedule, following = self.session.proposal.schedule, None

        def charge(cost: Charge, attempt: int) -> None:
            if not opened.closing:
                opened.ledger.charge(clients, cost, attempt)

        if schedule is not None:
            history = [*opened.ledger.history, clients]
            last = number + 1 == schedule.rounds
            following = () if last else opened.federation.participants(number + 1, history)

        def updates(seat: int) -> Learned:
            return (
                self._learned(opened, rows, seat) if opened.trains_in_exchange else rows[seat] * clients.size
            )

        summed = self.exchange(
            number,
            clients,
            updates,
            charge=charge,
            absent=absent,
            clip=opened.plan.clip,
            kept=rows.shape[1] - len(opened.weights),
            following=following,
        )
        # A simulated round remembers numbers, not whose upload was lost.
        bare = uploads.total(np.delete(np.arange(clients.size), absent))
        return replace(summed, bare=bare, record=replace(summed.record, lost={}, problems=()))

    def _learned(self, opened: OpenRound, rows: Rows, seat: int) -> Learned:
        """What the node of a seat trains on in a round that hides records; its row then holds what it adds to the sum.

        A node knows the trained parameters alone; the others have coordinates too, and nothing to add there.
        """
        federation, weight = opened.federation, opened.public_weights[seat]
        if seat in federation.late(opened.number, opened.participants.size):
            return None
        rows[seat] = 0.0
        client, trainer = int(opened.participants[seat]), federation.trainer
        if client not in self._records:
            self._records[client] = trainer.records(federation.inputs.clients.samples(client))
        trained = trainer.trained

        def paced(made: Iterator[tuple[FloatArray, int]]) -> Iterator[tuple[FloatArray, int]]:
            for some, real in made:
                wide = np.zeros((len(some), rows.shape[1]))
                wide[:, trained] = some
                rows[seat] -= (weight * wide[:real].sum(axis=0)).astype(rows.dtype)
                yield wide, real

        return self._records[client], opened.weights.double().numpy()[trained], paced

    def exchange(
        self,
        number: int,
        members: IntArray | Sequence[int],
        updates: Callable[[int], Learned],
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
        updates    gives the bare update of a seat; its client clips and hides it. What else an `Update` may be is
                   handed on
        charge     told what the round costs and which attempt at it that is, once, before the first upload
        absent     seats that never upload
        clip       of this round, at most the plan's; None: the plan's
        kept       how many of the last coordinates rounding to the grid must leave as long as they are
        following  where noise is carried over, the clients of the next round; nobody in the last

        Raises `PrivacyError` where no attempt keeps the promise; nothing is charged then.
        """
        session, nodes = self.session, [int(member) for member in members]
        seats = {node: seat for seat, node in enumerate(nodes)}

        def update(node: int, training: Training) -> Blocks | Silo | None:
            terms, made = training.terms, updates(seats[node])
            if not isinstance(made, np.ndarray):
                return made
            return beside(Grid(terms.grid_bits), Blocks.of(made), terms.clip, len(nodes), kept)

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
        total, record = session.finish()
        if total is None:
            total = np.zeros(current.agreed.terms.coordinates)
        return Summed(total, np.zeros_like(total), current.scale, record)
