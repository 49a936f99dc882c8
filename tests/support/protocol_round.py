"""A small federation of protocol machines, joined by function calls through the wire format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from niss.mechanism import clip_l2
from niss.protocol.agreement import Agreed, agree, participants_hash, terms_hash
from niss.protocol.client import Client, Policy
from niss.protocol.curve import Entropy, SecretBytes
from niss.protocol.keys import BeaconChain, Identity, _signed_link, link_of
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
from niss.protocol.server import Outcome, Server


def seeded_entropy(label: str) -> Callable[[int], bytes]:
    """Deterministic bytes for tests: SHAKE-256 of a label and a counter."""
    counter = 0

    def draw(count: int) -> bytes:
        nonlocal counter
        counter += 1
        return hashlib.shake_256(f"{label}/{counter}".encode()).digest(count)

    return draw


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

    def __init__(self, size: int, label: str = "federation", *, prekeys: int = 6, **policy: Any) -> None:
        self.entropy = seeded_entropy(label)
        self.holder = Identity.generate(self.entropy)
        self.chain = BeaconChain(50, holder=self.holder, entropy=self.entropy)
        self.server = Server(Identity.generate(self.entropy))
        settings: dict[str, Any] = {
            "participants": 2,
            "colluders": 0,
            "mu": 1.0,
            "clip": 10.0,
            "attempts": 3,
            "server": self.server.public,
            "holder": self.holder.public,
            "anchor": self.chain.anchor,
        }
        self.policy = Policy(**{**settings, **policy})
        self.seats = [Seat(Identity.generate(self.entropy), self.policy) for _ in range(size)]
        self.prekeys: list[list[Prekey]] = []
        for seat in self.seats:
            self.prekeys.append(list(seat.start().enrol(prekeys, self.entropy)))

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

    def beacon(self, participants: tuple[Participant, ...], terms: Terms) -> Beacon:
        """The link of that attempt, as often as it is asked for: this holder obeys the server."""
        index = link_of(terms.round, terms.attempt)
        value = self.chain._links[index]
        commitment = participants_hash(participants) + terms_hash(terms)
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
            grid.quantise(clip_l2(updates[seat], opened.terms.clip) / size)
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
