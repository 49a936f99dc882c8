"""Feeds `decode` with damaged encodings: it must refuse them, or give a message that encodes to the same bytes.

    python tests/fuzz/fuzz_wire.py --count 1000000 --seed 1 [--workers 2]

The same count and seed feed the same bytes, whatever the number of workers. Exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `support`, when run as a script

from niss.errors import RemoteProtocolError
from niss.protocol.messages import Message, Participant, RevealedEdge, RevealedPiece, SealedPiece, Verdict
from niss.protocol.wire import HEADER_BYTES, MAGIC, decode, encode, write
from niss.protocol.wire_fields import Limits, Writer
from support.protocol_messages import example_prekey, examples

CHUNK = 5_000
Span = tuple[int, int]


class Tracer(Writer):
    """Remembers where numbers (lengths among them) and pieces lie in the encoding."""

    def __init__(self) -> None:
        super().__init__(Limits())
        self.numbers: list[Span] = []
        self.spans: list[Span] = []

    def raw(self, data: bytes) -> None:
        self.spans.append((self.size, self.size + len(data)))
        super().raw(data)

    def varint(self, value: int) -> None:
        start = self.size
        super().varint(value)
        self.numbers.append((start, self.size))


class Specimen:
    """A valid encoding and where its parts lie."""

    def __init__(self, message: Message) -> None:
        tracer = Tracer()
        write(message, tracer)
        self.data = b"".join(tracer.parts)
        self.numbers, self.spans = tracer.numbers, tracer.spans
        self.cuts = sorted({place for span in tracer.spans for place in span})


def random_message(rng: random.Random) -> Message:
    """A variation on one of the examples: other lengths, other seats, signed or not."""
    name, message = rng.choice(sorted(examples().items()))
    seats = sorted(rng.sample(range(rng.choice([8, 300, 9_000])), rng.randrange(6)))
    changes: dict[str, Any] = {"signature": rng.choice([b"", rng.randbytes(64)])}
    sealed = tuple(SealedPiece(seat, rng.randbytes(rng.randrange(1, 60))) for seat in seats)
    if name == "RoundOpen":
        changes["participants"] = tuple(
            Participant(rng.randbytes(32), example_prekey(seat**4)) for seat in seats
        )
        changes["terms"] = replace(message.terms, mode=rng.choice(["tolerate", "repair"]), clip=rng.random())
    elif name == "Upload":
        changes |= {"vector": rng.randbytes(rng.randrange(200)), "pieces": sealed}
        changes["fresh_prekeys"] = tuple(example_prekey(seat**4) for seat in seats)
        changes["commitment"] = rng.choice([b"", rng.randbytes(32)])
    elif name == "SurvivorClaim":
        changes["survivors"] = tuple(seats)
    elif name == "RevealRequest":
        verdicts = (Verdict(rng.randbytes(32), seat, rng.randbytes(32), rng.randbytes(64)) for seat in seats)
        changes |= {"survivors": tuple(seats), "pieces": sealed, "verdicts": tuple(verdicts)}
    elif name == "Reveal":
        own = 9_500
        changes["seat"] = own
        changes["edges"] = tuple(
            RevealedEdge(sender, receiver, rng.randbytes(32))
            for seat in seats
            for sender, receiver in [(own, seat), (seat, own)]
        )
        changes["pieces"] = tuple(
            RevealedPiece(seat, rng.randrange(300), rng.randbytes(33)) for seat in seats
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
        return MAGIC + bytes([1, rng.randrange(1, 8)]) + rng.randbytes(rng.randrange(200))
    return MAGIC + bytes([rng.choice([1, rng.randrange(256)]), rng.randrange(10)]) + data[HEADER_BYTES:]


Mutator = Callable[[random.Random, bytes, Specimen, Specimen], bytes]
MUTATORS: list[Mutator] = [
    flip_bits, edit_number, edit_number, splice, transplant, truncate, duplicate, swap, insert, header
]  # fmt: skip


def run_chunk(seed: int, chunk: int, count: int) -> tuple[Counter[str], list[str], float]:
    """Feeds `count` inputs; says what came out, what should not have, and how long the slowest took."""
    rng = random.Random(f"fuzz_wire {seed} {chunk}")
    specimens = [Specimen(random_message(rng)) for _ in range(60)]
    counts: Counter[str] = Counter()
    findings: list[str] = []
    slowest = 0.0
    for _ in range(count):
        one, two = rng.choices(specimens, k=2)
        data = one.data
        for _step in range(rng.choice([0, 1, 1, 1, 1, 1, 2, 2, 3])):
            data = rng.choice(MUTATORS)(rng, data, one, two)
        started = time.perf_counter()
        outcome = feed(data)
        slowest = max(slowest, time.perf_counter() - started)
        changed = "unchanged" if data == one.data else "damaged"
        if outcome == "accepted" or (outcome == "refused" and changed == "damaged"):
            counts[f"{changed}, {outcome}"] += 1
        else:
            findings.append(f"{changed}, {outcome}: {data.hex()}")
    return counts, findings, slowest


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


def _job(chunk: tuple[int, int], seed: int) -> tuple[Counter[str], list[str], float]:
    return run_chunk(seed, *chunk)


def main() -> int:
    """Runs the chunks, over all cores, and reports as it goes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chunks = [(place, min(CHUNK, options.count - place)) for place in range(0, options.count, CHUNK)]
    counts: Counter[str] = Counter()
    findings: list[str] = []
    slowest, started = 0.0, time.perf_counter()
    with multiprocessing.Pool(options.workers) as pool:
        for part, found, slow in pool.imap_unordered(partial(_job, seed=options.seed), chunks):
            counts += part
            findings += found
            slowest = max(slowest, slow)
            done, passed = counts.total() + len(findings), time.perf_counter() - started
            sys.stdout.write(f"{done:>10,} fed, {done / passed:,.0f} a second, {len(findings)} findings\n")
            sys.stdout.flush()
    for kind, number in sorted(counts.items()):
        sys.stdout.write(f"{number:>10,} {kind}\n")
    sys.stdout.write(f"slowest input: {1e3 * slowest:.1f} ms\n")
    for finding in findings[:20]:
        sys.stdout.write(f"FOUND {finding}\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
