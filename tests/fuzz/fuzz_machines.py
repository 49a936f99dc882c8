"""Feeds client and server machines with damaged and lying messages: no crash, no forgery, no false exactness.

Bytes are damaged on their way through `decode`; fields are changed with the old signature (a relay's lie, which must
be refused) or signed anew by their sender (a lie it stands by, which may be refused or taken, but never crash).
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from fuzz.driver import Feed, Target
from fuzz.fuzz_wire import MUTATORS, Specimen
from niss.accounting import DrawnAccount
from niss.errors import ConfigError, PrivacyError, ProtocolError
from niss.protocol.agreement import agree
from niss.protocol.keys import Identity
from niss.protocol.messages import Reveal, RevealRequest, RoundOpen, Upload, decode, encode, signed_part
from niss.protocol.server import Server, ServerStage
from support.protocol_round import Federation

INTENDED = (ProtocolError, PrivacyError, ConfigError)
PURPOSES = {
    RoundOpen: "open",
    Upload: "upload",
    RevealRequest: "request",
    Reveal: "reveal",
}
SIZE, ASKED = 5, 1


class World:
    """One repaired round, with a snapshot of the asked client and of the server before each message."""

    def __init__(self, label: str) -> None:
        self.federation = Federation(SIZE, label, mu=math.inf)
        for seat in self.federation.seats:
            seat.assess = DrawnAccount()
            seat.restart()
        self.seat = self.federation.seats[ASKED]
        self.before: dict[type, Any] = {}
        self.messages: list[Any] = []
        server = self.federation.server
        terms = self.federation.terms(
            mode="repair", coordinates=2, neighbours=4.0, residual_variance=0.1, revealed=2, dropped=1
        )
        opened = self.federation.open(terms)
        self.opened, self.agreed = opened, agree(opened)
        self.note(opened, self.seat.kept[-1])
        updates = self.federation.updates(2)
        uploads = [
            client.upload(opened, updates[seat], self.federation.entropy)
            for seat, client in enumerate(self.federation.clients[:-1])
        ]
        self.note(uploads[ASKED], self.server_now())
        for upload in uploads:
            server.take_upload(upload)
        requests = server.request_reveals()
        self.note(requests[ASKED], self.seat.kept[-1])
        reveals = {seat: self.federation.clients[seat].reveal(one) for seat, one in requests.items()}
        for seat, reveal in reveals.items():
            if seat != ASKED:
                server.take_reveal(reveal)
        self.note(reveals[ASKED], self.server_now())
        server.take_reveal(reveals[ASKED])
        self.specimens = [Specimen(message) for message in self.messages]

    def note(self, message: Any, before: Any) -> None:
        self.messages.append(decode(encode(message)))
        self.before[type(message)] = before

    def server_now(self) -> tuple[ServerStage, Any]:
        """The server's state, copied as far as messages change it."""
        server = self.federation.server
        return server.state, _copied(server._round)

    def signed(self, message: Any) -> Any:
        """The message signed by whoever may send it; None if it cannot even be encoded."""
        kind = type(message)
        identity: Identity = self.seat.identity
        if kind in (RoundOpen, RevealRequest):
            identity = self.federation.server._identity
        elif 0 <= message.seat < SIZE:
            identity = self.federation.seats[message.seat].identity
        try:
            encode(message)
            if kind is RoundOpen:
                message = self._with_beacon(message)
            bare = replace(message, signature=b"")
            return replace(bare, signature=identity.sign(PURPOSES[kind], signed_part(bare)))
        except INTENDED:
            return None

    def _with_beacon(self, opened: RoundOpen) -> RoundOpen:
        """The holder signs whatever terms and list it is shown, with the link of this round."""
        from niss.protocol.agreement import participants_hash, terms_hash
        from niss.protocol.keys import _signed_link

        commitment = participants_hash(opened.participants) + terms_hash(opened.terms)
        beacon = self.opened.beacon
        signature = self.federation.holder.sign(
            "beacon", _signed_link(beacon.index, beacon.value, commitment)
        )
        return replace(opened, beacon=replace(beacon, signature=signature))

    def feed(self, message: Any) -> str:
        """What the machine that gets such messages makes of this one, from its snapshot on."""
        kind = type(message)
        if kind not in PURPOSES:
            return "refused"
        before = self.before[kind]
        try:
            if kind in (RoundOpen, RevealRequest):
                return self._feed_client(message, before)
            return self._feed_server(message, before)
        except INTENDED:
            return "refused"

    def _feed_client(self, message: Any, before: bytes) -> str:
        self.seat.kept[:], self.seat.charges[:] = [before], []
        client = self.seat.start(before)
        if isinstance(message, RoundOpen):
            size = min(max(message.terms.coordinates, 0), 1_000)
            upload = client.upload(message, np.zeros(size), self.federation.entropy)
            if len(self.seat.charges) != 1 or upload.context != agree(message).digest:
                return "uploaded without a charge"
        else:
            reveal = client.reveal(message)
            if not {one.seat for one in reveal.partials} <= set(message.survivors):
                return "gave partials of a client that is called dropped"
        return "accepted"

    def _feed_server(self, message: Any, before: tuple[ServerStage, Any]) -> str:
        server = Server(self.federation.server._identity)
        server.state, server._round = before[0], _copied(before[1])
        take = {Upload: server.take_upload, Reveal: server.take_reveal}
        take[type(message)](message)
        try:
            server.finish()
        except Exception as error:
            return f"the round cannot be finished any more: {type(error).__name__}"
        return "accepted"


def _copied(kept: Any) -> Any:
    current = copy.copy(kept)
    for name in ("uploads", "reveals", "problems", "liars"):
        setattr(current, name, copy.copy(getattr(kept, name)))
    return current


def odd_value(rng: random.Random, value: Any) -> Any:
    """Another value of about the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            [0, 1, value + 1, max(0, value - 1), 2**31, 2**32 - 1, 2**64, -1, rng.randrange(12)]
        )
    if isinstance(value, float):
        return rng.choice(
            [0.0, -1.0, math.inf, math.nan, 5e-324, 1e308, 1e-30, 1e30, value * 2, value / 3, rng.random()]
        )
    if isinstance(value, bytes):
        other = bytearray(value)
        if other:
            other[rng.randrange(len(other))] ^= 1 << rng.randrange(8)
        return rng.choice([bytes(other), bytes(len(value)), value[:-1], value + b"x", b""])
    if isinstance(value, str):
        return rng.choice(["tolerate", "repair", "", "other"])
    return value


def change_field(rng: random.Random, message: Any) -> Any:
    """The message with one field, somewhere inside, changed."""
    name = rng.choice([field.name for field in fields(message) if field.name != "signature"])
    value = getattr(message, name)
    if is_dataclass(value):
        return replace(message, **{name: change_field(rng, value)})
    if isinstance(value, tuple):
        return replace(message, **{name: change_items(rng, value)})
    return replace(message, **{name: odd_value(rng, value)})


def change_items(rng: random.Random, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """One item changed, left out, said twice, or the order turned."""
    if not items:
        return items
    place = rng.randrange(len(items))
    item = items[place]
    other = change_field(rng, item) if is_dataclass(item) else odd_value(rng, item)
    return rng.choice(
        [
            (*items[:place], other, *items[place + 1 :]),
            items[:place] + items[place + 1 :],
            (*items, item),
            items[::-1],
            (),
        ]
    )


def damaged_bytes(world: World, rng: random.Random) -> tuple[str, str]:
    one, two = rng.choices(world.specimens, k=2)
    data = one.data
    for _ in range(rng.choice([1, 1, 2])):
        data = rng.choice(MUTATORS)(rng, data, one, two)
    try:
        message = decode(data)
    except INTENDED:
        return "bytes, refused", ""
    outcome = world.feed(message)
    known = any(data == specimen.data for specimen in world.specimens)
    if outcome == "accepted" and not known:
        return "bytes, accepted", f"forgery accepted: {data.hex()}"
    return f"bytes, {outcome}", "" if outcome in ("accepted", "refused") else f"{outcome}: {data.hex()}"


def relayed_lie(world: World, rng: random.Random) -> tuple[str, str]:
    original = rng.choice(world.messages)
    message = change_field(rng, original)
    if message == original:
        return "fields, unchanged", ""
    outcome = world.feed(message)
    return f"fields, {outcome}", "" if outcome == "refused" else f"{outcome}: {message!r}"


def signed_lie(world: World, rng: random.Random) -> tuple[str, str]:
    message = rng.choice(world.messages)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        message = change_field(rng, message)
    message = world.signed(message)
    if message is None:
        return "signed, cannot be sent", ""
    outcome = world.feed(message)
    return f"signed, {outcome}", "" if outcome in ("accepted", "refused") else f"{outcome}: {message!r}"


KINDS: list[Callable[[World, random.Random], tuple[str, str]]] = [damaged_bytes, relayed_lie, signed_lie]


@contextmanager
def start(label: str) -> Iterator[Feed]:
    """One round, of which every message is accepted as it was sent."""
    world = World(f"fuzz {label}")
    for message in world.messages:
        assert world.feed(message) == "accepted", type(message).__name__
    yield lambda rng: rng.choice(KINDS)(world, rng)


TARGET = Target("machines", 500, start)
