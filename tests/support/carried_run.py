"""A small federation that carries shares from round to round: machines of the protocol, joined through the wire."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from niss.accounting.carried_rounds import CarriedAccount
from niss.protocol.agreement import commitment_of
from niss.protocol.carried import Schedule
from niss.protocol.carrying import previous_of
from niss.protocol.messages import Participant, Previous, RoundOpen
from niss.protocol.server import Outcome
from niss.protocol.states import rounds_answered
from support.protocol_round import Federation, Seat, carried

RUN, GRID, COORDINATES = b"run", 20, 8


def schedule(**changes: Any) -> Schedule:
    """Two cohorts of four clients that take turns, everyone sharing with everyone; no fresh noise."""
    size = changes.get("participants", 4)
    values: dict[str, Any] = {
        "participants": size,
        "rounds": 5,
        "separation": 2,
        "cyclic": True,
        "closing": False,
        "coordinates": COORDINATES,
        "grid_bits": GRID,
        "modulus_bits": 64,
        "clip": 2.0,
        "neighbours": size - 1.0,
        "unit_variance": 0.5,
        "carried_neighbours": float(size),
        "carried_variance": 0.25,
        "residual_variance": 0.0,
    }
    return Schedule(**{**values, **changes})


class CarriedFederation(Federation):
    """`separation` cohorts that take turns; cohort t of round t is `cohort(t)`, members by number.

    `opened`, `outcomes` and `sums` (what the sums would be without noise) are by number of the rounds played.
    """

    def __init__(self, committed: Schedule, label: str = "carried", **policy: Any) -> None:
        self.schedule = committed
        settings = {"mu": np.inf, "attempts": 1, "schedule": committed, "clip": committed.clip}
        super().__init__(committed.participants * committed.separation, label, **{**settings, **policy})
        for seat in self.seats:
            account_for(seat, committed)
        self.opened: dict[int, RoundOpen] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.seated: dict[int, tuple[Participant, ...]] = {}
        self.sums: dict[int, np.ndarray] = {}

    def cohort(self, number: int) -> list[int]:
        size = self.schedule.participants
        first = number % self.schedule.separation * size
        return list(range(first, first + size))

    def listed(self, number: int) -> tuple[Participant, ...]:
        """The participants of a round, drawn once; () past the end."""
        if number >= self.schedule.rounds:
            return ()
        if number not in self.seated:
            self.seated[number] = tuple(
                Participant(self.seats[one].client.public, self.prekeys[one].pop(0))
                for one in self.cohort(number)
            )
        return self.seated[number]

    def previous(self, number: int) -> Previous | None:
        return previous_of(self.opened[number - 1]) if number else None

    def open_next(self, number: int) -> RoundOpen:
        terms, people, after = self.schedule.terms(RUN, number), self.listed(number), self.listed(number + 1)
        beacon = self.chain.release(number, 0, commitment_of(terms, people, after))
        survived = self.outcomes[number - 1].survivors if number else ()
        opened: RoundOpen = carried(
            self.server.open_round(
                terms, people, beacon, following=after, previous=self.previous(number), survived=survived
            )
        )
        self.opened[number] = opened
        return opened

    def play_round(self, number: int, absent: Collection[int] = ()) -> Outcome:
        """A whole round without the seats `absent`; what should be its sum is in `sums`, in grid steps."""
        opened = self.open_next(number)
        size = self.schedule.participants
        self.sums[number] = np.zeros(self.schedule.coordinates, dtype=np.int64)
        for seat, one in enumerate(self.cohort(number)):
            if seat in absent:
                continue
            # On the grid once it is divided by the number of participants: rounding leaves it alone.
            steps = np.frombuffer(self.entropy(2 * self.schedule.coordinates), dtype="<i2").astype(np.int64)
            update = steps * size * 2.0**-GRID
            self.sums[number] += steps
            upload = self.seats[one].client.upload(opened, update, self.entropy)
            self.prekeys[one] += list(upload.fresh_prekeys)
            self.server.take_upload(carried(upload))
        self.outcomes[number] = self.server.finish()
        return self.outcomes[number]


def account_for(seat: Seat, committed: Schedule, **settings: Any) -> None:
    """Have the client of this seat charge itself by an account of its own, restored from its memory."""
    kept = seat.kept[-1] if seat.kept else None
    account = CarriedAccount(
        committed, colluders=seat.policy.colluders, earlier=rounds_answered(kept, RUN), **settings
    )
    seat.assess, seat.account = account.assess, account  # type: ignore[attr-defined]
    charge = account.charging(_Book(seat), "self")
    seat.book = charge
    seat.start(kept)


class _Book:
    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def charge(self, round: int, attempt: int, mus: Any, basis: Any) -> None:
        """Nothing is refused: what was charged is kept by the seat."""
