"""Small federations of protocol machines, joined by function calls through the wire format: of single rounds, and of
runs that carry noise from round to round."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from niss.accounting import CommittedAccount
from niss.errors import RemoteProtocolError
from niss.mechanism import Grid, clip_l2
from niss.mechanism.noise import Noise
from niss.protocol.agreement import Agreed, agree, commitment_of, previous_of
from niss.protocol.client import Client, rounds_answered
from niss.protocol.keys import BeaconChain, Entropy, Identity, _signed_link, link_of
from niss.protocol.messages import (
    Beacon,
    Participant,
    Prekey,
    RoundOpen,
    Terms,
    Upload,
    decode,
    encode,
    signed_part,
)
from niss.protocol.schedule import Policy, Schedule
from niss.protocol.server import Outcome, Server
from niss.protocol.shares import EdgeKeys
from niss.redaction import SecretBytes


def seeded_entropy(label: str) -> Callable[[int], bytes]:
    """Deterministic bytes for tests: SHAKE-256 of a label and a counter."""
    counter = 0

    def draw(count: int) -> bytes:
        nonlocal counter
        counter += 1
        return hashlib.shake_256(f"{label}/{counter}".encode()).digest(count)

    return draw


def quantised(grid: Grid, values: np.ndarray) -> np.ndarray:
    """In grid steps, cut toward zero: what is on the grid stays as it is."""
    return np.trunc(grid.in_steps(values)).astype(np.int64)


def carried(message: Any) -> Any:
    """A message as it arrives."""
    return decode(encode(message))


class Uploader(Client):
    """A client that has its update at hand when it is asked."""

    def upload(self, opened: RoundOpen, update: np.ndarray, entropy: Entropy) -> Upload:
        """Accept the round, and answer it at once."""
        self.accept(opened, entropy)
        return self.answer(update, entropy)


@dataclass
class Seat:
    """One client with its identity, its durable storage and what it was charged; `privates` of all prekeys it made."""

    identity: Identity
    policy: Policy
    kept: list[bytes] = field(default_factory=list)
    charges: list[tuple[int, int, float]] = field(default_factory=list)
    assess: Callable[[Agreed, int], float] = lambda _agreed, _colluders: 0.5
    book: Callable[[Agreed, float], None] = lambda _agreed, _mu: None
    client: Uploader = field(init=False)
    privates: dict[int, SecretBytes] = field(default_factory=dict)

    def start(self, kept: bytes | None = None) -> Uploader:
        """Start, or restart from what was kept; a crash loses everything else."""
        self.client = Uploader(
            self.identity,
            self.policy,
            assess=self.assess,
            charge=self._charge,
            persist=self._persist,
            kept=kept,
        )
        return self.client

    def restart(self) -> Uploader:
        return self.start(self.kept[-1])

    def _persist(self, kept: bytes) -> None:
        self.kept.append(kept)
        self.privates |= self.client._prekeys.privates

    def _charge(self, agreed: Agreed, mu: float) -> None:
        self.book(agreed, mu)
        self.charges.append((agreed.terms.round, agreed.terms.attempt, mu))


class Federation:
    """`size` clients with so many prekeys each, a server and a beacon's holder, with seeded entropy."""

    def __init__(
        self, size: int, label: str = "federation", *, prekeys: int = 6, colluders: int = 0, **policy: Any
    ) -> None:
        self.colluders = colluders
        self.entropy = seeded_entropy(label)
        self.holder = Identity.generate(self.entropy)
        self.chain = BeaconChain(50, holder=self.holder, entropy=self.entropy)
        self.server = Server(Identity.generate(self.entropy))
        settings: dict[str, Any] = {
            "participants": 2,
            "collusion": colluders / size,
            "mu": 1.0,
            "clip": 10.0,
            "attempts": 3,
            "run": RUN,
            "server": self.server.public,
            "holder": self.holder.public,
            "anchor": self.chain.anchor,
        }
        self.policy = Policy(**{**settings, **policy})
        self.seats = [Seat(Identity.generate(self.entropy), self.policy) for _ in range(size)]
        self.prekeys: list[list[Prekey]] = []
        for seat in self.seats:
            self.prekeys.append(list(seat.start().enrol(prekeys, self.entropy)))

    def restart(self, one: int) -> Uploader:
        """Start a client from its memory."""
        return self.seats[one].restart()

    @property
    def clients(self) -> list[Uploader]:
        return [seat.client for seat in self.seats]

    def terms(self, **changes: Any) -> Terms:
        values: dict[str, Any] = {
            "run": b"run",
            "round": 1,
            "attempt": 0,
            "mode": "tolerate",
            "coordinates": 16,
            "grid_bits": 20,
            "modulus_bits": 64,
            "clip": 2.0,
            "neighbours": 3.0,
            "unit_variance": 0.5,
            "residual_variance": 0.0,
            "self_variance": 0.0,
            "revealed": 0,
            "dropped": 0,
            "committee": 0,
            "threshold": 0,
        }
        if changes.get("mode") == "repair":
            size = len(self.seats)
            values |= {"self_variance": 1.0, "revealed": 3, "dropped": 4}
            values |= {"committee": size, "threshold": size // 2 + 1}
        return Terms(**{**values, **changes})

    def open(self, terms: Terms | None = None) -> RoundOpen:
        """Open a round with a fresh prekey of every client."""
        terms = terms or self.terms()
        participants = tuple(
            Participant(seat.client.public, keys.pop(0))
            for seat, keys in zip(self.seats, self.prekeys, strict=True)
        )
        beacon = self.beacon(participants, terms)
        return carried(self.server.open_round(terms, participants, beacon))

    def beacon(
        self,
        participants: tuple[Participant, ...],
        terms: Terms,
        following: tuple[Participant, ...] = (),
    ) -> Beacon:
        """The link of that attempt, as often as it is asked for: this holder obeys the server."""
        index = link_of(terms.round, terms.attempt)
        value = self.chain._links[index]
        commitment = commitment_of(terms, participants, following)
        return Beacon(index, value, self.holder.sign("beacon", _signed_link(index, value, commitment)))

    def updates(self, coordinates: int = 16) -> list[np.ndarray]:
        """Updates that are on the grid of `terms` once weighted: rounding leaves them alone, sums are exact."""
        rows = [np.frombuffer(self.entropy(8 * coordinates), dtype="<u8") for _ in self.seats]
        each = len(self.seats) * 2.0**-20
        return [np.trunc((row / 2.0**64 - 0.5) / each) * each for row in rows]

    def upload(self, opened: RoundOpen, updates: list[np.ndarray], absent: tuple[int, ...] = ()) -> None:
        for seat, client in enumerate(self.clients):
            if seat not in absent:
                self.server.take_upload(carried(client.upload(opened, updates[seat], self.entropy)))

    def repair(self, silent: tuple[int, ...] = ()) -> None:
        """The reveals of every member of the committee that still answers."""
        for seat, request in self.server.request_reveals().items():
            if seat not in silent:
                self.server.take_reveal(carried(self.clients[seat].reveal(carried(request))))

    def play(
        self, terms: Terms | None = None, absent: tuple[int, ...] = (), silent: tuple[int, ...] = ()
    ) -> tuple[Outcome, np.ndarray]:
        """A whole round; returns its outcome and the exact sum of the survivors' parts."""
        opened = self.open(terms)
        updates = self.updates(opened.terms.coordinates)
        self.upload(opened, updates, absent)
        if opened.terms.mode == "repair":
            self.repair(silent)
        grid = agree(opened).grid
        size = len(self.seats)
        exact = sum(
            quantised(grid, clip_l2(updates[seat], opened.terms.clip) / size)
            for seat in range(size)
            if seat not in absent
        )
        return self.server.finish(), grid.to_float(exact)


def resigned(server: Server, message: Any, purpose: str) -> Any:
    """The message signed again by the server: a lie it stands by."""
    return signed_by(server._identity, message, purpose)


def signed_by(identity: Identity, message: Any, purpose: str) -> Any:
    """The message signed by this client: a lie it stands by."""
    bare = replace(message, signature=b"")
    return carried(replace(bare, signature=identity.sign(purpose, signed_part(bare))))


# Runs that carry noise from round to round.

RUN, GRID, COORDINATES = b"run", 20, 8
# Fresh noise of 2^18 grid steps, so that something is promised.
NOISY = {"residual": 0.0625}
_NOISE = {field.name for field in fields(Noise)}
_BASE = Schedule(
    rounds=5,
    separation=2,
    cyclic=True,
    closing=False,
    coordinates=COORDINATES,
    grid_bits=GRID,
    modulus_bits=64,
    clip=2.0,
    noise=Noise(participants=4, neighbours=3.0, unit=0.5, carried=1.0, residual=0.0),
)


def changed(committed: Schedule, **changes: Any) -> Schedule:
    """With other numbers, of the run or of its noise, and what follows from them unless it is given."""
    noise = {name: changes.pop(name) for name in _NOISE.intersection(changes)}
    if (size := noise.get("participants")) is not None:
        noise = {"neighbours": size - 1.0, "carried": 0.25 * size, **noise}
    if "dropped" in noise:
        noise = {"revealed": noise["dropped"], **noise}
    return replace(committed, noise=replace(committed.noise, **noise), **changes)


def schedule(**changes: Any) -> Schedule:
    """Two cohorts of four clients that take turns, everyone sharing with everyone; no fresh noise."""
    return changed(_BASE, **changes)


def repairing(**changes: Any) -> Schedule:
    """The same with five clients in a cohort, one of whom may drop out; all are in the committee."""
    size = changes.get("participants", 5)
    values = {"participants": size, "dropped": 1, "committee": size, "threshold": size // 2 + 1}
    return schedule(**{**values, "self_mask": 0.5, **changes})


class CarriedFederation(Federation):
    """`separation` cohorts that take turns; those of round t are `cohort(t)`, members by number.

    `opened`, `outcomes` and `sums` (what the sums would be without noise) are by number of the rounds played; `seen` is
    what left the clients.
    """

    def __init__(
        self,
        committed: Schedule,
        label: str = "carried",
        account: dict[str, Any] | None = None,
        **policy: Any,
    ) -> None:
        self.schedule, self.account = committed, account or {}
        settings = {"mu": np.inf, "attempts": 1, "schedule": committed, "clip": committed.clip}
        settings["collusion"] = policy.get("colluders", 0) / committed.participants
        super().__init__(committed.participants * committed.separation, label, **{**settings, **policy})
        self.booked: dict[int, list[tuple[int, Any]]] = defaultdict(list)
        for one in range(len(self.seats)):
            self.restart(one)
        self.opened: dict[int, RoundOpen] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.seated: dict[int, tuple[Participant, ...]] = {}
        self.sums: dict[int, np.ndarray] = {}
        self.seen = Seen(committed)

    def restart(self, one: int) -> Uploader:
        """With an account that knows what the memory does."""
        seat = self.seats[one]
        account = CommittedAccount(
            self.schedule,
            colluders=self.colluders,
            earlier=rounds_answered(seat.kept[-1]),
            **self.account,
        )
        seat.assess, seat.book = account, account.charging(_Book(self.booked[one]), "self")
        return seat.restart()

    def cohort(self, number: int) -> list[int]:
        size = self.schedule.participants
        first = number % self.schedule.separation * size
        return list(range(first, first + size))

    def seat_of(self, one: int) -> Participant:
        """A client with an unused prekey."""
        return Participant(self.seats[one].client.public, self.prekeys[one].pop(0))

    def listed(self, number: int) -> tuple[Participant, ...]:
        """The participants of a round, drawn once; () past the end."""
        if number >= self.schedule.rounds:
            return ()
        if number not in self.seated:
            self.seated[number] = tuple(self.seat_of(one) for one in self.cohort(number))
        return self.seated[number]

    def open_next(self, number: int) -> RoundOpen:
        """The next round as an honest server opens it."""
        terms, people, after = self.schedule.terms(RUN, number), self.listed(number), self.listed(number + 1)
        beacon = self.chain.release(number, 0, commitment_of(terms, people, after))
        survived = self.outcomes[number - 1].survivors if number - 1 in self.outcomes else ()
        previous = previous_of(self.opened[number - 1]) if number else None
        opened: RoundOpen = carried(
            self.server.open_round(
                terms, people, beacon, following=after, previous=previous, survived=survived
            )
        )
        self.opened[number] = opened
        return opened

    def forged(self, opened: RoundOpen, **changes: Any) -> RoundOpen:
        """The round with other parts, signed again by the server, and by a holder of the beacon that obeys it."""
        bare = replace(opened, **changes)
        following = () if bare.cohorts is None else bare.cohorts.following
        beacon = self.beacon(bare.participants, bare.terms, following)
        return resigned(self.server, replace(bare, beacon=beacon), "open")

    def answer(self, one: int, opened: RoundOpen, steps: np.ndarray | None = None) -> Upload:
        """Have a client upload; whatever it adds is noted. `steps` is p_k x_k on the grid."""
        if steps is None:
            steps = np.zeros(self.schedule.coordinates, dtype=np.int64)
        client = self.seats[one].client
        privates = dict(client._prekeys.privates)
        upload = client.upload(opened, steps * self.schedule.participants * 2.0**-GRID, self.entropy)
        self.seen.take(client.public, opened, privates, upload)
        self.prekeys[one] += list(upload.fresh_prekeys)
        return upload

    def play_round(
        self,
        number: int,
        absent: Collection[int] = (),
        *,
        silent: Collection[int] = (),
        pretended: Collection[int] = (),
        restarts: bool = False,
    ) -> Outcome:
        """A whole round without the seats `absent`; members in the seats `silent` upload, but reveal nothing.

        Of those in the seats `pretended` the server says that they did not upload. With `restarts` every client starts
        again from its memory before each of its answers to a repair.
        """
        opened = self.upload_round(number, (*absent, *pretended))
        for seat in pretended:
            self.answer(self.cohort(number)[seat], opened)
        if self.schedule.noise.committee:
            self.repair_round(number, silent=silent, restarts=restarts)
        self.outcomes[number] = self.server.finish()
        if self.schedule.noise.committee and number:
            self.close(number - 1)
        return self.outcomes[number]

    def close(self, number: int) -> None:
        """Nobody will be asked about that round any more."""
        for one in self.cohort(number):
            current = self.seats[one].client._memory.current
            if current is not None and decode(current.opened).terms.round == number:
                self.seats[one].client.close_round()

    def repair_round(self, number: int, *, silent: Collection[int] = (), restarts: bool = False) -> None:
        """What the committee of the round reveals, and that of the one before, as far as they agree to."""
        server = self.server
        for when, request_all in (
            (number, server.request_reveals),
            (number - 1, server.request_carried_reveals),
        ):
            for seat, request in request_all().items():
                if seat in silent:
                    continue
                one = self.cohort(when)[seat]
                client = self.restart(one) if restarts else self.seats[one].client
                try:
                    answer = client.reveal(carried(request))
                except RemoteProtocolError:
                    continue
                server.take_reveal(carried(answer))

    def upload_round(self, number: int, absent: Collection[int] = ()) -> RoundOpen:
        """A round up to its uploads."""
        opened = self.open_next(number)
        self.sums[number] = np.zeros(self.schedule.coordinates, dtype=np.int64)
        for seat, one in enumerate(self.cohort(number)):
            if seat in absent:
                continue
            # On the grid once it is divided by the number of participants: rounding leaves it alone.
            steps = np.frombuffer(self.entropy(2 * self.schedule.coordinates), dtype="<i2").astype(np.int64)
            self.sums[number] += steps
            self.server.take_upload(carried(self.answer(one, opened, steps)))
        return opened


class Seen:
    """All uploads that left the clients of a run, and of what noise each was made: the server's whole view.

    A share is known by its seed, taken from the keys of the client that used it: whatever rounds, lists or versions it
    was told of, two uploads have noise in common exactly if they used the same seed.
    """

    def __init__(self, committed: Schedule) -> None:
        self.schedule = committed
        self.uploads: list[tuple[bytes, int, list[tuple[bytes, bytes, float, int]]]] = []

    def take(self, owner: bytes, opened: RoundOpen, privates: dict[int, Any], upload: Upload) -> None:
        agreed = agree(opened)
        own = agreed.participants[upload.seat].prekey.number
        secrets = EdgeKeys(agreed, upload.seat, privates[own])
        shares = [
            (bytes(secrets.seed(edge)), edge.other, edge.variance * 4.0**GRID, edge.sign)
            for edge in agreed.edges(upload.seat)
        ]
        self.uploads.append((owner, opened.terms.round, shares))

    def check_shares(self) -> None:
        """No share is in more than two uploads, and where it is in two, once added and once subtracted."""
        signs: dict[bytes, list[int]] = defaultdict(list)
        for _, _, shares in self.uploads:
            for seed, _, _, sign in shares:
                signs[seed].append(sign)
        assert all(sorted(found) in ([1], [-1], [-1, 1]) for found in signs.values())

    def mu2(
        self, colluders: Collection[bytes] = (), stripped: Collection[tuple[bytes, int]] = ()
    ) -> dict[bytes, float]:
        """By honest client, its mu^2 over all its uploads: `Delta^2 1' (Sigma^-1)[P, P] 1`, in grid steps.

        Sigma is built share by share: an upload's column is the sum of all noise in it that no colluder knows. Of the
        uploads `stripped` (whose, and in which round) all shares are known, and their self-masks are not.
        """
        gone = {
            seed
            for owner, number, shares in self.uploads
            if (owner, number) in stripped
            for seed, *_ in shares
        }
        known = set(colluders)
        kept = [one for one in self.uploads if one[0] not in known]
        places: dict[bytes, dict[int, tuple[int, float]]] = defaultdict(dict)
        residual = []
        for row, (owner, number, shares) in enumerate(kept):
            own = self.schedule.noise.residual
            own += self.schedule.noise.self_mask if (owner, number) in stripped else 0.0
            residual.append(own * 4.0**GRID)
            for seed, other, variance, sign in shares:
                if other not in known and seed not in gone:
                    places[seed][row] = (sign, variance)
        sigma = np.diag(residual)
        for ends in places.values():
            for row, (sign, variance) in ends.items():
                for column, (other, _) in ends.items():
                    sigma[row, column] += sign * other * variance
        inverse = np.linalg.inv(sigma)
        moved = self.schedule.clip / self.schedule.participants * 2.0**GRID
        found: dict[bytes, float] = {}
        for owner in {one[0] for one in kept}:
            rows = [
                row
                for row, (who, number, _) in enumerate(kept)
                if who == owner and number < self.schedule.horizon
            ]
            found[owner] = moved**2 * float(inverse[np.ix_(rows, rows)].sum())
        return found


def covered(federation: CarriedFederation) -> float:
    """The closest that a client's true mu^2, whoever colludes within its policy, came to what it was charged."""
    federation.seen.check_shares()
    size, apart = federation.schedule.participants, federation.schedule.separation
    charged = {seat.identity.public: sum(mu**2 for _, _, mu in seat.charges) for seat in federation.seats}
    closest = 0.0
    for first in range(size):
        # As many of every cohort as the clients assume, in turn.
        bad = {
            federation.seats[cohort * size + (first + other) % size].identity.public
            for cohort in range(apart)
            for other in range(federation.colluders)
        }
        for owner, spent in federation.seen.mu2(bad).items():
            assert spent <= charged[owner] * (1.0 + 1e-9)
            closest = max(closest, spent / charged[owner]) if charged[owner] else closest
    return closest


class _Book:
    """A ledger that refuses nothing, and notes (round, charge) of what it was charged."""

    def __init__(self, entries: list[tuple[int, Any]]) -> None:
        self.entries = entries

    def charge(self, round: int, attempt: int, charges: Any, basis: Any) -> None:
        del attempt, basis
        self.entries.append((round, charges["self"]))
