"""Feeds `decode` with damaged encodings: it must refuse them, or give a message that encodes to the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fuzz.driver import Feed, Target
from niss.errors import RemoteProtocolError
from niss.protocol.messages import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Message,
    Partials,
    Participant,
    RoundCohorts,
    Vote,
    decode,
    encode,
)
from niss.protocol.wire import Writer, record_of
from support.protocol_messages import example_prekey, examples

Span = tuple[int, int]


class Tracer(Writer):
    """Remembers where numbers (lengths among them) and pieces lie in the encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Span] = []
        self.spans: list[Span] = []
        self.size = 0

    def raw(self, data: bytes) -> None:
        self.spans.append((self.size, self.size + len(data)))
        self.size += len(data)
        super().raw(data)

    def varint(self, value: int) -> None:
        start = self.size
        super().varint(value)
        self.numbers.append((start, self.size))


class Specimen:
    """A valid encoding and where its parts lie."""

    def __init__(self, message: Message) -> None:
        tracer = Tracer()
        tracer.raw(encode(message)[:HEADER_BYTES])
        record_of(type(message)).write(tracer, message)
        self.data = b"".join(tracer.parts)
        self.numbers, self.spans = tracer.numbers, tracer.spans
        self.cuts = sorted({place for span in tracer.spans for place in span})


def random_message(rng: random.Random) -> Message:
    """A variation on one of the examples: other lengths, other seats, signed or not."""
    name, message = rng.choice(sorted(examples().items()))
    seats = sorted(rng.sample(range(rng.choice([8, 300, 9_000])), rng.randrange(6)))
    changes: dict[str, Any] = {"signature": rng.choice([b"", rng.randbytes(64)])}
    pieces = rng.randbytes(rng.choice([0, 32, 96, 500]))
    if name in ("RoundOpen", "CarriedOpen"):
        listed = tuple(Participant(rng.randbytes(32), example_prekey(seat**4)) for seat in seats)
        changes["participants"] = listed
        if message.cohorts is not None:
            previous = rng.choice([None, replace(message.cohorts.previous, participants=listed)])
            changes["cohorts"] = RoundCohorts(rng.choice([(), listed]), previous)
        changes["terms"] = replace(message.terms, mode=rng.choice(["tolerate", "repair"]), clip=rng.random())
    elif name == "Upload":
        changes |= {"vector": rng.randbytes(rng.randrange(200)), "pieces": pieces}
        changes["fresh_prekeys"] = tuple(example_prekey(seat**4) for seat in seats)
        changes["commitment"] = rng.choice([b"", rng.randbytes(32)])
    elif name in ("RevealRequest", "CarriedRequest"):
        changes |= {"survivors": tuple(seats), "pieces": pieces}
        if message.verdict is not None:
            votes = tuple(Vote(seat, rng.randbytes(64)) for seat in seats)
            changes["verdict"] = replace(message.verdict, survivors=tuple(seats), votes=votes)
    elif name in ("Reveal", "CarriedReveal"):
        changes["vote"] = rng.choice([None, rng.randbytes(64)])
        changes["partials"] = tuple(
            Partials(seat, rng.randbytes(32 * rng.randrange(1, 4)), rng.randbytes(48)) for seat in seats
        )
    elif name == "Refusal":
        changes["reason"] = "".join(rng.choices("abc äß€\U0001f600", k=rng.randrange(30)))
    return replace(message, **changes)


def varint(value: int, padding: int = 0) -> bytes:
    """A varint, on demand with needless zeros at its end."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    for _ in range(padding):
        out[-1] |= 0x80
        out.append(0)
    return bytes(out)


def flip_bits(rng: random.Random, data: bytes, _: Specimen, __: Specimen) -> bytes:
    """Turns a few bits."""
    out = bytearray(data)
    for _bit in range(rng.randrange(1, 5) if out else 0):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def edit_number(rng: random.Random, data: bytes, one: Specimen, _: Specimen) -> bytes:
    """Replaces a number or length: one off, nothing, huge, too long, not in shortest form."""
    start, end = rng.choice(one.numbers)
    value = int(sum((byte & 0x7F) << 7 * place for place, byte in enumerate(one.data[start:end])))
    edited = rng.choice(
        [
            varint(value + 1),
            varint(max(0, value - 1)),
            varint(0),
            varint(rng.choice([32, 64, 127, 128, 255, 2**31, 2**63, 2**64 - 1, 2**64, 2**70])),
            varint(value, padding=rng.randrange(1, 12)),
            varint(rng.getrandbits(rng.randrange(1, 66))),
            b"\xff" * rng.randrange(1, 20),
        ]
    )
    return data[:start] + edited + data[end:]


def splice(rng: random.Random, data: bytes, one: Specimen, two: Specimen) -> bytes:
    """The front of one message and the back of another, cut where parts meet."""
    return data[: rng.choice(one.cuts)] + two.data[rng.choice(two.cuts) :]


def transplant(rng: random.Random, data: bytes, one: Specimen, two: Specimen) -> bytes:
    """Puts a part of another message where a part of this one was."""
    (start, end), (first, last) = rng.choice(one.spans), rng.choice(two.spans)
    return data[:start] + two.data[first:last] + data[end:]


def truncate(rng: random.Random, data: bytes, _: Specimen, __: Specimen) -> bytes:
    """Cuts off the end."""
    return data[: rng.randrange(len(data) + 1)]


def duplicate(rng: random.Random, data: bytes, one: Specimen, _: Specimen) -> bytes:
    """Says a stretch twice, or leaves it out."""
    start, end = sorted(rng.choices(one.cuts, k=2))
    return data[:end] + data[start:] if rng.random() < 0.6 else data[:start] + data[end:]


def swap(rng: random.Random, data: bytes, one: Specimen, _: Specimen) -> bytes:
    """Exchanges two neighbouring stretches."""
    first, second, third = sorted(rng.choices(one.cuts, k=3))
    return data[:first] + data[second:third] + data[first:second] + data[third:]


def insert(rng: random.Random, data: bytes, _: Specimen, __: Specimen) -> bytes:
    """Puts bytes in, anywhere or at the end."""
    place = rng.choice([len(data), rng.randrange(len(data) + 1)])
    extra = rng.choice([bytes(rng.randrange(1, 9)), rng.randbytes(rng.randrange(1, 70))])
    return data[:place] + extra + data[place:]


def header(rng: random.Random, data: bytes, _: Specimen, __: Specimen) -> bytes:
    """Another version or type before the same body, or nothing but noise after a good header."""
    if rng.random() < 0.3:
        return MAGIC + bytes([VERSION, rng.randrange(1, 9)]) + rng.randbytes(rng.randrange(200))
    return MAGIC + bytes([rng.choice([VERSION, rng.randrange(256)]), rng.randrange(10)]) + data[HEADER_BYTES:]


Mutator = Callable[[random.Random, bytes, Specimen, Specimen], bytes]
MUTATORS: list[Mutator] = [
    flip_bits, edit_number, edit_number, splice, transplant, truncate, duplicate, swap, insert, header
]  # fmt: skip


def feed(data: bytes) -> str:
    """What `decode` makes of the bytes: accepted, refused, or what went wrong."""
    try:
        message = decode(data)
    except RemoteProtocolError:
        return "refused"
    except BaseException as error:
        return f"decode raised {type(error).__name__}"
    try:
        return "accepted" if encode(message) == data else "encodes to other bytes"
    except Exception as error:
        return f"encode raised {type(error).__name__}"


@contextmanager
def start(label: str) -> Iterator[Feed]:
    """Some specimens, and what damages and feeds them."""
    drawn = random.Random(f"specimens {label}")
    specimens = [Specimen(random_message(drawn)) for _ in range(60)]

    def one_input(rng: random.Random) -> tuple[str, str]:
        one, two = rng.choices(specimens, k=2)
        data = one.data
        for _step in range(rng.choice([0, 1, 1, 1, 1, 1, 2, 2, 3])):
            data = rng.choice(MUTATORS)(rng, data, one, two)
        outcome = feed(data)
        changed = "unchanged" if data == one.data else "damaged"
        right = outcome == "accepted" or (outcome == "refused" and changed == "damaged")
        return f"{changed}, {outcome}", "" if right else data.hex()

    yield one_input


TARGET = Target("wire", 5_000, start)
