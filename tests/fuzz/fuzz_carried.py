"""Runs with carried shares of a hostile server's making: a client refuses them uncharged, or charges what covers them.

Two kinds of input. Schedules with odd numbers: refused, or what an account charges along a client's participations
covers its true mu^2, computed here from the shares one by one with nothing of the package's accountant. Openings of
rounds with odd parts, signed by the server and by a holder of the beacon that obeys it: refused and uncharged, or
within the schedule.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from fuzz.driver import Feed, Target
from fuzz.fuzz_machines import change_field
from niss.accounting import CommittedAccount
from niss.errors import NissError
from niss.protocol.messages import RoundOpen, encode
from niss.protocol.schedule import Schedule
from support.protocol_round import NOISY, CarriedFederation, schedule
from support.what_left import rounded_variance

# Uploads that are small enough to be counted share by share.
MOST_UPLOADS = 60
NASTY = [
    0,
    1,
    2,
    3,
    -1,
    2**20,
    2**63,
    2**64,
    0.0,
    1e-300,
    1e300,
    math.inf,
    math.nan,
    True,
    None,
    "",
    "1",
    [],
    {},
]


def change(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Some numbers off by a factor or by one, or something else altogether."""
    values = {
        name: change(rng, value) if isinstance(value, dict) else value for name, value in values.items()
    }
    for name in rng.sample(sorted(values), rng.choice([0, 1, 1, 2, 3])):
        value = values[name]
        if isinstance(value, bool):
            values[name] = rng.choice([not value, not value, 1])
        elif isinstance(value, float) and rng.random() < 0.8:
            values[name] = value * math.exp(rng.gauss(0.0, rng.choice([0.1, 1.0, 5.0])))
        elif isinstance(value, int) and rng.random() < 0.8:
            values[name] = value + rng.randrange(-3, 4)
        else:
            values[name] = rng.choice(NASTY)
    return values


def true_mu2(committed: Schedule, rounds: list[int], colluders: int) -> float:
    """`Delta^2 1' (Sigma^-1)[P, P] 1` of a client in these rounds, everyone sharing with everyone; in grid steps."""
    honest, total = committed.participants - colluders, committed.rounds
    step = 2.0**-committed.grid_bits

    def left(variance: float) -> float:
        return rounded_variance(math.sqrt(variance) / step)

    share = 2.0 * left(committed.noise.unit)
    carried = left(committed.carried_variance)
    sigma = np.zeros((honest * total, honest * total))

    def join(one: int, other: int, variance: float) -> None:
        sigma[[one, other], [one, other]] += variance
        sigma[[one, other], [other, one]] -= variance

    for number in range(total):
        for seat in range(honest):
            here = number * honest + seat
            sigma[here, here] += committed.noise.residual / step**2
            for other in range(seat):
                join(here, number * honest + other, share)
            if number + 1 < total:
                for other in range(honest):
                    join(here, (number + 1) * honest + other, carried)
    places = [number * honest for number in rounds]
    moved = committed.clip / committed.participants / step
    return moved**2 * float(np.linalg.inv(sigma)[np.ix_(places, places)].sum())


def odd_schedule(rng: random.Random, values: dict[str, Any]) -> tuple[str, str]:
    changed, colluders = change(rng, values), rng.randrange(3)
    try:
        committed = Schedule.from_json(json.loads(json.dumps(changed)))
        account = CommittedAccount(committed, colluders=colluders)
        charged, taken = 0.0, []
        for number in range(rng.randrange(committed.separation), committed.horizon, committed.separation):
            account._taken = list(taken)
            charged += account.cost(number)
            taken.append(number)
            if len(taken) == 4:
                break
    except NissError:
        return "schedule, refused", ""
    if not math.isfinite(charged) or not taken:
        return "schedule, nothing promised", ""
    small = (committed.participants - colluders) * committed.rounds <= MOST_UPLOADS
    noises = [committed.noise.unit, committed.noise.residual, committed.carried_variance]
    steps = [math.sqrt(one) * 2.0**committed.grid_bits for one in noises if one]
    # Noise narrower or wider than that is refused once a round is opened.
    if not small or min(steps) < 4.0 or max(steps) > 2.0**30:
        return "schedule, not counted", ""
    worst = true_mu2(committed, taken, colluders)
    covered = worst <= charged * (1.0 + 1e-6)
    return "schedule, covered", "" if covered else f"{charged} charged, {worst} true: {changed}, {taken}"


@contextmanager
def start(label: str) -> Iterator[Feed]:
    """A run of which one round was played, and a client of the next that goes back to that for every input."""
    federation = CarriedFederation(schedule(**NOISY), label)
    federation.play_round(0)
    opened, one = federation.open_next(1), federation.cohort(1)[0]
    seat = federation.seats[one]
    before, values = seat.kept[-1], federation.schedule.to_json()

    def odd_opening(rng: random.Random) -> tuple[str, str]:
        message: RoundOpen = opened
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
            message = change_field(rng, message)
        obeys = rng.random() < 0.7
        try:
            encode(message)
            bare = replace(message, signature=b"")
            message = federation.forged(bare) if obeys else bare
        except (NissError, IndexError):
            return "opening, cannot be sent", ""
        seat.kept[:], seat.charges[:] = [before], []
        federation.restart(one)
        try:
            federation.answer(one, message)
        except NissError:
            return "opening, refused", f"charged, then refused: {message!r}" if seat.charges else ""
        terms = federation.schedule.terms(message.terms.run, message.terms.round)
        right = message.terms == terms and len(seat.charges) == 1
        return "opening, answered", "" if right else f"answered: {message!r}"

    def one_input(rng: random.Random) -> tuple[str, str]:
        return odd_schedule(rng, values) if rng.random() < 0.5 else odd_opening(rng)

    yield one_input


TARGET = Target("carried", 500, start)
