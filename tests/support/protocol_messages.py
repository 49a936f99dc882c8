"""Messages of the protocol: one fixed example of each kind, and strategies that draw them all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from niss.protocol.messages import (
    MODES,
    Beacon,
    CarryTerms,
    Message,
    Partials,
    Participant,
    Prekey,
    PreviousRound,
    Refusal,
    Reveal,
    RevealRequest,
    RoundCohorts,
    RoundOpen,
    Terms,
    Upload,
    Verdict,
    Vote,
)


def filler(name: str, length: int) -> bytes:
    """Bytes that depend on a name alone."""
    return hashlib.shake_256(name.encode()).digest(length)


def example_prekey(number: int) -> Prekey:
    """A prekey whose bytes follow from its number."""
    return Prekey(number, filler(f"prekey {number}", 32), filler(f"prekey signature {number}", 64))


def example_terms() -> Terms:
    """Terms in which every field differs from its neighbours."""
    return Terms(
        run=filler("run", 16),
        round=7,
        attempt=1,
        mode="repair",
        coordinates=200_000,
        grid_bits=20,
        modulus_bits=32,
        clip=1.5,
        neighbours=10.0,
        unit_variance=0.25,
        residual_variance=0.0625,
        self_variance=2.0,
        revealed=2,
        dropped=4,
        committee=9,
        threshold=6,
    )


def example_cohort(name: str) -> tuple[Participant, ...]:
    """Three participants whose bytes follow from a name."""
    return tuple(Participant(filler(f"{name} {seat}", 32), example_prekey(seat)) for seat in range(3))


def examples() -> dict[str, Message]:
    """One message of each kind, always the same; those called `Carried...` are of a run that carries noise over."""
    context, signature = filler("context", 32), filler("signature", 64)
    everyone = example_cohort("identity")
    beacon = Beacon(300, filler("beacon", 32), filler("beacon signature", 64))
    carrying = replace(example_terms(), carrying=CarryTerms(filler("plan", 32), 0.125))
    previous = PreviousRound(
        example_cohort("before"), filler("terms", 32), replace(beacon, index=296, value=filler("link", 32))
    )
    return {
        "RoundOpen": RoundOpen(example_terms(), everyone, beacon, signature),
        "CarriedOpen": RoundOpen(
            carrying, everyone, beacon, signature, RoundCohorts(example_cohort("after"), previous)
        ),
        "Upload": Upload(
            context,
            1,
            filler("vector", 24),
            (example_prekey(5),),
            filler("commitment", 32),
            filler("pieces", 96),
            signature,
        ),
        "RevealRequest": RevealRequest(context, (0, 2, 129, 300), filler("pieces for one", 256), signature),
        "CarriedRequest": RevealRequest(
            context,
            (0, 2),
            filler("pieces for one", 128),
            signature,
            Verdict(
                beacon,
                filler("following", 32),
                (0, 1, 200),
                (Vote(1, filler("vote 1", 64)), Vote(200, filler("vote 200", 64))),
            ),
        ),
        "Reveal": Reveal(
            context,
            2,
            (
                Partials(0, filler("points 0", 96), filler("proof 0", 48)),
                Partials(129, filler("points 129", 32), filler("proof 129", 48)),
            ),
            signature,
        ),
        "CarriedReveal": Reveal(
            context,
            2,
            (Partials(0, filler("points 0", 96), filler("proof 0", 48)),),
            signature,
            filler("vote", 64),
        ),
        "Refusal": Refusal(context, "too few participants: 3 \N{LESS-THAN OR EQUAL TO} 5", signature),
    }


_seats = st.integers(0, 400)
_hashes = st.binary(min_size=32, max_size=32)
_signatures = st.just(b"") | st.binary(min_size=64, max_size=64)
_uint32 = st.integers(0, 2**32 - 1)
_reals = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False).map(abs)
_prekeys = st.builds(Prekey, number=st.integers(0, 2**64 - 1), public=_hashes, signature=_signatures)
_participants = st.builds(Participant, identity=_hashes, prekey=_prekeys)
_survivors = st.lists(_seats, unique=True, max_size=12).map(lambda seats: tuple(sorted(seats)))
_pieces = st.binary(max_size=300)
_partials = st.builds(
    Partials,
    seat=_seats,
    points=st.integers(1, 3).flatmap(lambda count: st.binary(min_size=32 * count, max_size=32 * count)),
    proof=st.binary(min_size=48, max_size=48),
)


def _rising(items: st.SearchStrategy[Any], key: Callable[[Any], Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, unique_by=key, max_size=4).map(lambda found: tuple(sorted(found, key=key)))


def terms() -> st.SearchStrategy[Terms]:
    """Any terms that may be on the wire."""
    return st.builds(
        Terms,
        run=st.binary(min_size=1, max_size=64),
        round=_uint32,
        attempt=_uint32,
        mode=st.sampled_from(MODES),
        coordinates=st.integers(1, 2**24),
        grid_bits=st.integers(0, 64),
        modulus_bits=st.integers(16, 64),
        clip=_reals,
        neighbours=_reals,
        unit_variance=_reals,
        residual_variance=_reals,
        self_variance=_reals,
        revealed=_seats,
        dropped=_seats,
        committee=_seats,
        threshold=_seats,
    )


_lists = st.lists(_participants, unique_by=lambda one: one.identity, max_size=4).map(tuple)
_beacons = st.builds(Beacon, index=_uint32, value=_hashes, signature=_signatures)


@st.composite
def round_opens(draw: st.DrawFn) -> RoundOpen:
    """Any opening of a round, with and without noise that is carried over."""
    opened = RoundOpen(draw(terms()), draw(_lists), draw(_beacons), draw(_signatures))
    if draw(st.booleans()):
        return opened
    carrying = draw(st.builds(CarryTerms, plan=_hashes, unit_variance=_reals))
    previous = draw(st.none() | st.builds(PreviousRound, participants=_lists, terms=_hashes, beacon=_beacons))
    return replace(
        opened,
        terms=replace(opened.terms, carrying=carrying),
        cohorts=RoundCohorts(draw(_lists), previous),
    )


_votes = st.builds(Vote, seat=_seats, signature=st.binary(min_size=64, max_size=64))
_verdicts = st.builds(
    Verdict,
    beacon=_beacons,
    following=_hashes,
    survivors=_survivors,
    votes=_rising(_votes, lambda one: one.seat),
)


def uploads() -> st.SearchStrategy[Upload]:
    """Any upload, though a short one."""
    return st.builds(
        Upload,
        context=_hashes,
        seat=_seats,
        vector=st.binary(max_size=300),
        fresh_prekeys=_rising(_prekeys, lambda prekey: prekey.number),
        commitment=st.just(b"") | _hashes,
        pieces=_pieces,
        signature=_signatures,
    )


def reveal_requests() -> st.SearchStrategy[RevealRequest]:
    """Any request to reveal."""
    return st.builds(
        RevealRequest,
        context=_hashes,
        survivors=_survivors,
        pieces=_pieces,
        signature=_signatures,
        verdict=st.none() | _verdicts,
    )


def reveals() -> st.SearchStrategy[Reveal]:
    """Any reveal of a member."""
    return st.builds(
        Reveal,
        context=_hashes,
        seat=_seats,
        partials=_rising(_partials, lambda one: one.seat),
        signature=_signatures,
        vote=st.none() | st.binary(min_size=64, max_size=64),
    )


def messages() -> st.SearchStrategy[Message]:
    """Any message of the protocol."""
    reason = st.text(max_size=100).filter(lambda text: len(text.encode("utf-8", "replace")) <= 500)
    refusals = st.builds(Refusal, context=_hashes, reason=reason, signature=_signatures)
    return st.one_of(round_opens(), uploads(), reveal_requests(), reveals(), refusals)
