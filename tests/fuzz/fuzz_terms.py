"""Rounds on terms of a hostile server's making: a client refuses them uncharged, or charges what covers them.

What a round could cost at worst is computed in `support.what_left`, with nothing of the package's accountant: over all
colluders the client's policy allows for and all clients that the server may call dropped, and over all edges revealed
with the self-mask still on.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from fuzz.driver import Feed, Target
from niss.accounting import Plan, make_terms
from niss.errors import NissError
from niss.protocol.agreement import agree
from niss.protocol.messages import MODES, RoundOpen, Terms
from support.what_left import COORDINATES, SIZE, Held, assessing, opened_with, spoilt

NAMES = [field.name for field in fields(Terms)]
DEGREES = (1.0, 1.5, 2.0, 3.0, 6.0)


def honest(colluders: int) -> list[Terms]:
    """What an honest server could propose, in both modes, on sparse and on complete graphs."""
    found = []
    for mode, degree in itertools.product(MODES, DEGREES):
        lost = 1 if mode == "repair" else 0
        plan = Plan(
            clip=1.0,
            epsilon=3.0,
            kappa=2.0,
            neighbours=degree,
            colluders=colluders,
            revealed=lost,
            dropped=lost,
        )
        found.append(
            make_terms(plan, participants=SIZE, coordinates=COORDINATES, run=b"run", number=1, mode=mode)
        )
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
def start(label: str) -> Iterator[Feed]:
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


TARGET = Target("terms", 500, start)
