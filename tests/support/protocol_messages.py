"""Messages of the protocol: one fixed example of each kind, and strategies that draw them all."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from niss.protocol.messages import (
    TAGS,
    Beacon,
    CarryTerms,
    Message,
    Partials,
    Participant,
    Prekey,
    PreviousRound,
    RecordTerms,
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
from niss.protocol.wire import (
    Blob,
    Choice,
    Exact,
    Field,
    Optional,
    Real,
    Record,
    Sequence,
    Text,
    Uint,
    record_of,
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
        "RecordOpen": RoundOpen(
            replace(example_terms(), records=RecordTerms(0.05, 3000.0)), everyone, beacon, signature
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


# Of what is drawn: bytes at most, and items of a sequence.
_LONGEST, _MOST = 300, 4


def _strategy(field: Field) -> st.SearchStrategy[Any]:
    """Any value of a field that may be on the wire, though short."""
    if isinstance(field, Record):
        return st.builds(field.kind, **{name: _strategy(one) for name, one in field.layout.items()})
    if isinstance(field, Sequence):
        key = field.items.rising or field.items.unique
        drawn = st.lists(_strategy(field.item), unique_by=key, max_size=_MOST)
        return drawn.map(lambda found: tuple(sorted(found, key=key) if field.items.rising else found))
    if isinstance(field, Optional):
        return st.none() | _strategy(field.item)
    if isinstance(field, Text):
        return st.text(max_size=100).filter(lambda text: len(text.encode("utf-8", "replace")) <= 500)
    if isinstance(field, Blob):
        low, high = field.low, min(field.high, _LONGEST)
        counts = st.integers(-(-low // field.step), high // field.step)
        return counts.flatmap(lambda count: st.binary(min_size=(n := count * field.step), max_size=n))
    if isinstance(field, Exact):
        return st.binary(min_size=field.smallest, max_size=field.smallest)
    if isinstance(field, Choice):
        return st.sampled_from(field.words)
    if isinstance(field, Uint):
        return st.integers(field.low, field.high)
    assert isinstance(field, Real)
    return st.floats(min_value=0.0, allow_nan=False, allow_infinity=False).map(abs)


def messages() -> st.SearchStrategy[Message]:
    """Any message of the protocol."""
    return st.one_of(*(_strategy(record_of(kind)) for kind in TAGS))
