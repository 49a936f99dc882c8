"""Rounds and runs of a hostile server's making: a client refuses them uncharged, or charges what covers them.

What a single round could cost at worst is computed in `support.what_left`, with nothing of the package's accountant:
over all colluders the client's policy allows for and all clients that the server may call dropped, and over all edges
revealed with the self-mask still on.

Of runs that carry noise over there are two kinds of input. Schedules with odd numbers: refused, or what an account
charges along a client's participations covers its true mu^2, computed here from the shares one by one. Openings of
rounds with odd parts, signed by the server and by a holder of the beacon that obeys it: refused and uncharged, or
within the schedule.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from fuzz.driver import Feed, Target
from fuzz.fuzz_machines import change_field
from niss.accounting import CommittedAccount, Plan, make_terms
from niss.errors import NissError
from niss.protocol.agreement import agree
from niss.protocol.messages import MODES, RoundOpen, Terms, encode
from niss.protocol.schedule import Schedule
from niss.settings import check_json
from support.protocol_round import NOISY, CarriedFederation, schedule
from support.what_left import COORDINATES, SIZE, Held, assessing, opened_with, rounded_variance, spoilt

NAMES = [field.name for field in fields(Terms)]
DEGREES = (1.0, 1.5, 2.0, 3.0, 6.0)


def honest(colluders: int) -> list[Terms]:
    """What an honest server could propose, in both modes, on sparse and on complete graphs."""
    found = []
    for mode, degree in itertools.product(MODES, DEGREES):
        plan = Plan(
            clip=1.0,
            epsilon=3.0,
            kappa=2.0,
            neighbours=math.ceil(degree),
            collusion=colluders / SIZE,
            # So rarely that in a million rounds none loses two.
            dropout=1e-4,
            mode=mode,
        )
        terms = make_terms(plan, participants=SIZE, coordinates=COORDINATES, run=b"run", number=1)
        found.append(replace(terms, neighbours=degree))
    return found


def change(rng: random.Random, base: Terms) -> Terms:
    """Some numbers from the ends of their ranges, or off by a factor."""
    terms = base
    for name in rng.sample(NAMES, rng.choice([0, 1, 1, 1, 2, 2, 3])):
        value: Any = rng.choice(spoilt(base, name))
        if isinstance(getattr(base, name), float) and rng.random() < 0.6:
            value = getattr(base, name) * math.exp(rng.gauss(0.0, rng.choice([0.1, 1.0, 5.0])))
        elif name in ("revealed", "dropped", "attempt", "round"):
            value = rng.choice([value, rng.randrange(SIZE)])
        terms = replace(terms, **{name: value})
    return terms


def worst_mu(opened: RoundOpen, seat: int, colluders: int) -> float:
    """The most that an upload of `seat` may cost, whoever colludes and whatever is revealed within the terms."""
    agreed, terms, size = agree(opened), opened.terms, len(opened.participants)
    others = [one for one in range(size) if one != seat]
    near = {one: set(agreed.neighbours(one)) for one in range(size)}
    most = terms.dropped if terms.mode == "repair" else 0
    worst = 0.0
    for known in itertools.combinations(others, colluders):
        rest = [one for one in others if one not in known]
        for lost in itertools.combinations(rest, min(most, len(rest))):
            held = Held(opened, known, agreed)
            held.uploads = dict.fromkeys(set(range(size)) - set(lost))  # type: ignore[assignment]
            held.unmasked = set(held.uploads)
            for one in held.uploads:
                if len(near[one] & set(lost)) <= terms.revealed:
                    held.told |= {frozenset((one, other)) for other in near[one] & set(lost)}
            worst = max(worst, held.mu_of(seat))
    if terms.mode == "repair":
        alone = Held(opened, (), agreed)
        alone.uploads = dict.fromkeys([seat])  # type: ignore[assignment]
        alone.told = {frozenset((seat, other)) for other in near[seat]}
        worst = max(worst, alone.mu_of(seat))
    return worst


@contextmanager
def start_single(label: str) -> Iterator[Feed]:
    """A client that has joined, and goes back to that for every input."""
    drawn = random.Random(f"policy {label}")
    colluders = drawn.randrange(3)
    federation = assessing(SIZE, label, colluders=colluders, mu=drawn.choice([0.8, math.inf]), clip=1.0)
    seat = federation.seats[0]
    before, bases = seat.kept[-1], honest(colluders)

    def one_input(rng: random.Random) -> tuple[str, str]:
        opened = opened_with(federation, change(rng, rng.choice(bases)))
        if opened is None:
            return "cannot be sent", ""
        seat.kept[:], seat.charges[:] = [before], []
        client = seat.start(before)
        try:
            client.accept(opened, federation.entropy)
        except NissError:
            return "refused", f"charged, then refused: {opened.terms}" if seat.charges else ""
        ((_, _, charged),) = seat.charges
        worst = worst_mu(opened, 0, colluders)
        covered = worst <= charged * (1.0 + 1e-6)
        return "charged", "" if covered else f"{charged} charged, {worst} true: {opened.terms}"

    yield one_input


# Runs that carry noise over.

# Uploads that are small enough to be counted share by share.
MOST_UPLOADS = 60
NUMBERS = [0, 1, 2, 3, -1, 2**20, 2**63, 2**64, 0.0, 1e-300, 1e300, math.inf, math.nan]
NASTY = [*NUMBERS, True, None, "", "1", [], {}]


def change_values(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Some numbers off by a factor or by one, or something else altogether."""
    values = {
        name: change_values(rng, value) if isinstance(value, dict) else value
        for name, value in values.items()
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
    changed, colluders = change_values(rng, values), rng.randrange(3)
    try:
        committed = check_json(Schedule, json.dumps(changed))
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
def start_carried(label: str) -> Iterator[Feed]:
    """A run of which one round was played, and a client of the next that goes back to that for every input."""
    federation = CarriedFederation(schedule(**NOISY), label)
    federation.play_round(0)
    opened, one = federation.open_next(1), federation.cohort(1)[0]
    seat = federation.seats[one]
    before, values = seat.kept[-1], asdict(federation.schedule)

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


def start(label: str) -> AbstractContextManager[Feed]:
    """Single rounds, or in every other chunk a run that carries noise over."""
    return start_carried(label) if int(label.split()[-1]) % 2 else start_single(label)


TARGET = Target("terms", 500, start)
