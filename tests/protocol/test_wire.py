"""The wire format: one encoding a message, nothing else sent or accepted, no memory on a liar's word."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings

from niss.errors import LocalProtocolError, RemoteProtocolError
from niss.protocol.agreement import agree, pack
from niss.protocol.messages import (
    SIGNING_DOMAIN,
    Message,
    Partials,
    Prekey,
    Reveal,
    RevealRequest,
    RoundOpen,
    Upload,
    decode,
    encode,
    signed_part,
)
from niss.protocol.wire import MAX_MESSAGE_BYTES, MAX_PARTICIPANTS, MAX_PREKEYS, Sequence, record_of
from support.protocol_messages import example_prekey, examples, filler, messages

GOLDEN = Path(__file__).with_name("golden_wire.txt")
NAMES = sorted(examples())
CONTEXT = filler("context", 32)
HEAD = b"NISS\x01"
REVEALED: Any = examples()["Reveal"].partials


def refused(data: bytes, match: str) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        decode(data)


def ours(message: Any, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        encode(message)


@settings(max_examples=300)
@given(messages())
def test_every_message_comes_back(message: Message) -> None:
    data = encode(message)
    assert decode(data) == message
    assert encode(decode(data)) == data


@settings(max_examples=300)
@given(messages(), messages())
def test_different_messages_have_different_encodings(one: Message, two: Message) -> None:
    assert (encode(one) == encode(two)) == (one == two)
    unsigned = replace(one, signature=b"") == replace(two, signature=b"")
    assert (signed_part(one) == signed_part(two)) == (unsigned and type(one) is type(two))


def test_models_of_a_hundred_million_numbers_have_room() -> None:
    opened = examples()["RoundOpen"]
    assert isinstance(opened, RoundOpen)
    large = replace(opened, terms=replace(opened.terms, coordinates=100_000_000))
    assert decode(encode(large)) == large
    assert MAX_MESSAGE_BYTES > 8 * 100_000_000


@pytest.mark.parametrize("name", NAMES)
def test_the_format_has_not_changed(name: str) -> None:
    golden = dict(line.split() for line in GOLDEN.read_text().splitlines())
    assert encode(examples()[name]).hex() == golden[name]
    assert decode(bytes.fromhex(golden[name])) == examples()[name]
    assert sorted(golden) == NAMES


def test_a_round_says_how_and_between_whom_noise_is_carried_or_neither() -> None:
    plain, carrying = examples()["RoundOpen"], examples()["CarriedOpen"]
    for half in (replace(carrying, cohorts=None), replace(plain, cohorts=carrying.cohorts)):
        with pytest.raises(RemoteProtocolError, match="or the reverse"):
            agree(replace(decode(encode(half)), terms=replace(half.terms, committee=3, threshold=2)))


def test_whether_there_is_a_round_before_is_one_of_two_bytes() -> None:
    first = replace(examples()["CarriedOpen"], signature=b"")
    first = replace(first, cohorts=replace(first.cohorts, previous=None))
    data = encode(first)
    assert data[-1] == 0
    refused(data[:-1] + b"\x02", "RoundOpen.cohorts.previous: must be there or not")
    refused(data[:-1] + b"\x01", "RoundOpen.cohorts.previous.participants: the message ends too early")


@pytest.mark.parametrize("name", NAMES)
def test_cut_anywhere_it_is_refused(name: str) -> None:
    data = encode(examples()[name])
    for length in range(len(data)):
        refused(data[:length], "magic" if length < 6 else "ends too early")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_may_follow(name: str) -> None:
    message = examples()[name]
    data, kind = encode(message), type(message).__name__
    refused(data + b"\0", f"{kind}: 1 bytes too many")
    refused(data + data, f"{kind}: {len(data)} bytes too many")


def test_unknown_versions_types_and_strangers_are_refused_by_name() -> None:
    data = encode(examples()["Reveal"])
    refused(data[:4] + b"\x02" + data[5:], "version 2, this side speaks version 1: upgrade niss on this side")
    refused(data[:4] + b"\x00" + data[5:], "wire version 0, .* upgrade niss on the side that sent it")
    for tag in (0, 6, 255):
        refused(data[:5] + bytes([tag]) + data[6:], f"no message of type {tag}")
    refused(b"SSIN" + data[4:], "magic")
    refused(b"", "magic")
    with pytest.raises(LocalProtocolError):
        decode(bytearray(data))  # type: ignore[arg-type]


def request(body: bytes) -> bytes:
    """A request with this for its survivors, its pieces and its signature."""
    return HEAD + b"\x03" + CONTEXT + body


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"\x02\x01\x01\x00\x00", "RevealRequest.survivors: must be in rising order"),
        (b"\x02\x02\x01\x00\x00", "RevealRequest.survivors: must be in rising order"),
        (b"\x01\x81\x00\x00", r"RevealRequest.survivors\[0\]: the number is not in its shortest form"),
        (b"\x81\x00\x01\x00", "RevealRequest.survivors: the number is not in its shortest form"),
        (b"\x01" + b"\xff" * 9 + b"\x02\x00", r"survivors\[0\]: the number is too large"),
        (b"\x01" + b"\x80" * 10 + b"\x01\x00", r"survivors\[0\]: the number is too long"),
        (b"\x01\x90\x4e\x00", r"survivors\[0\]: must lie between 0 and 9999"),
        (b"\x00\x00\x01\x07", "RevealRequest.signature: must be 64 bytes, or empty"),
    ],
)
def test_what_is_not_canonical_is_refused(body: bytes, match: str) -> None:
    refused(request(body), match)


def test_the_largest_number_is_read() -> None:
    upload = replace(examples()["Upload"], fresh_prekeys=(example_prekey(2**64 - 1),))
    assert decode(encode(upload)) == upload


@pytest.mark.parametrize(
    "word", ["0000000000000080", "000000000000f07f", "000000000000f87f", "00000000000000c0"]
)
def test_floats_that_are_not_finite_or_negative_are_refused(word: str) -> None:
    data = encode(examples()["RoundOpen"])
    place = data.index(bytes.fromhex("000000000000f83f"))  # clip = 1.5
    refused(data[:place] + bytes.fromhex(word) + data[place + 8 :], "RoundOpen.terms.clip: must be finite")


def test_an_unknown_mode_a_listed_twice_and_bad_text_are_refused() -> None:
    opened = examples()["RoundOpen"]
    data = encode(opened)
    place = data.index(filler("run", 16)) + 18
    assert data[place] == 1
    refused(data[:place] + b"\x02" + data[place + 1 :], "terms.mode: must be one of tolerate, repair")
    twice = data.replace(filler("identity 1", 32), filler("identity 2", 32))
    refused(twice, "RoundOpen.participants: must all differ")
    refused(HEAD + b"\x05" + CONTEXT + b"\x02\xc0\x80\x00", "Refusal.reason: must be text in UTF-8")


def test_only_messages_are_encoded() -> None:
    for thing in (None, example_prekey(1), b"bytes"):
        ours(thing, "message: must be one of the messages")
        with pytest.raises(LocalProtocolError):
            signed_part(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_the_signed_part_leaves_out_the_signature_alone(name: str) -> None:
    message = examples()[name]
    part = signed_part(message)
    assert part == signed_part(replace(message, signature=b""))
    assert part == SIGNING_DOMAIN + encode(message).replace(b"\x40" + message.signature, b"\x00")
    refused(part, "magic")  # what is signed is never itself a message


def test_an_upload_costs_hardly_more_than_its_floats() -> None:
    """200,000 parameters and 4 prekeys: at most 1.01 times what plain float32 would take."""
    steps = np.arange(200_000, dtype=np.int64) * 7_919 - 10**9
    prekeys = tuple(example_prekey(number) for number in range(1_000, 1_004))
    upload = Upload(CONTEXT, 999, pack(steps, 32), prekeys, b"", b"", bytes(64))
    size = len(encode(upload))
    assert size <= 1.01 * 4 * 200_000
    vector, prekeys, pieces, signature, rest = 800_003, 1 + 4 * (2 + 32 + 65), 1, 65, 6 + 32 + 2 + 1
    assert size == vector + prekeys + pieces + signature + rest


# What is too much, or malformed; and memory on a liar's word.


@pytest.mark.parametrize(
    ("name", "path", "high", "match"),
    [
        ("RoundOpen", "terms.dropped", 3, "RoundOpen.terms.dropped: must lie between 0 and 3"),
        ("RoundOpen", "terms.coordinates", 199_999, "terms.coordinates: must lie between 1 and 199999"),
        ("RevealRequest", "survivors", 3, "survivors: must hold at most 3 items"),
        ("Upload", "vector", 16, "Upload.vector: must hold between 0 and 16 bytes"),
        ("Upload", "fresh_prekeys", 0, "fresh_prekeys: must hold at most 0 items"),
        ("Refusal", "reason", 5, "Refusal.reason: must hold between 0 and 5 bytes"),
    ],
)
def test_bounds_hold_on_both_sides(
    name: str, path: str, high: int, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = examples()[name]
    data, field = encode(message), cast("Any", record_of(type(message)))
    for part in path.split("."):
        field = field.layout[part]
    if isinstance(field, Sequence):
        monkeypatch.setattr(field, "items", replace(field.items, high=high))
    else:
        monkeypatch.setattr(field, "high", high)
    refused(data, match)
    ours(message, match)


def test_a_message_that_is_too_large_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    message = examples()["Reveal"]
    data = encode(message)
    monkeypatch.setattr("niss.protocol.messages.MAX_MESSAGE_BYTES", 50)
    refused(data, "message: larger than 50 bytes")
    ours(message, "message: larger than 50 bytes")


HUGE = b"\xff\xff\xff\x7f"  # 268,435,455


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"\x03" + CONTEXT + HUGE,
        HEAD + b"\x02" + CONTEXT + b"\x00" + HUGE,
        HEAD + b"\x02" + CONTEXT + b"\x00\x00" + HUGE,
        HEAD + b"\x03" + CONTEXT + b"\x00" + HUGE,
        HEAD + b"\x04" + CONTEXT + b"\x00" + HUGE,
        HEAD + b"\x05" + CONTEXT + HUGE,
        HEAD + b"\x05" + CONTEXT + b"\xff" * 9 + b"\x01",
    ],
)
def test_claimed_lengths_take_no_memory(data: bytes) -> None:
    tracemalloc.start()
    refused(data, "must hold|ends too early")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


N = MAX_PARTICIPANTS  # seats of two bytes each, too large for the small numbers Python keeps anyway
CROWDS: dict[str, Message] = {
    "survivors": RevealRequest(CONTEXT, tuple(range(N)), b""),
    "pieces": RevealRequest(CONTEXT, (), bytes(96 * N)),
    "partials": Reveal(CONTEXT, 0, tuple(Partials(seat, CONTEXT, bytes(48)) for seat in range(N))),
    "points": Reveal(CONTEXT, 0, (Partials(0, bytes(32 * N), bytes(48)),)),
    "prekeys": Upload(
        CONTEXT, 0, b"", tuple(Prekey(seat, CONTEXT, b"") for seat in range(MAX_PREKEYS)), b"", b""
    ),
}


def peak_of_decoding(message: Message) -> float:
    """Most memory held while decoding, for each byte of the encoding."""
    data = encode(message)
    tracemalloc.start()
    try:
        assert decode(data) == message
        return tracemalloc.get_traced_memory()[1] / len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", sorted(CROWDS))
def test_memory_is_bounded_by_the_size_of_the_message(name: str) -> None:
    """Python's objects are larger than seats of two bytes; the rest is room for other versions of Python."""
    assert peak_of_decoding(CROWDS[name]) < 50


def test_a_vector_is_held_once() -> None:
    assert peak_of_decoding(Upload(CONTEXT, 0, bytes(4_000_000), (), b"", b"")) < 1.1


@pytest.mark.parametrize("name", NAMES)
def test_refusals_quote_nothing(name: str) -> None:
    """No run of four bytes of the payload, as text, hex or repr, shows up in what is said about it."""
    marker = b"SECRET"
    data = encode(examples()[name])
    said = []
    for place in range(6, len(data) - 6, 3):
        try:
            decode(data[:place] + marker + data[place + 6 :])
        except RemoteProtocolError as error:
            said.append(f"{error} {error.__cause__}")
    assert said
    assert not [line for line in said if "SECR" in line or marker.hex()[:8] in line]


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("Reveal", {"context": bytes(31)}, "Reveal.context: must be 32 bytes"),
        ("Reveal", {"context": bytearray(32)}, "Reveal.context: must be 32 bytes"),
        ("Reveal", {"signature": bytes(63)}, "Reveal.signature: must be 64 bytes, or empty"),
        ("Reveal", {"signature": None}, "Reveal.signature: must be bytes"),
        ("Reveal", {"seat": -1}, "Reveal.seat: must lie between"),
        ("Reveal", {"seat": True}, "Reveal.seat: must be a whole number"),
        ("Reveal", {"seat": np.int64(1)}, "Reveal.seat: must be a whole number"),
        ("Reveal", {"partials": (None,)}, r"Reveal.partials\[0\]: must be a Partials"),
        ("RevealRequest", {"survivors": [1, 2]}, "RevealRequest.survivors: must be a tuple"),
        ("RevealRequest", {"survivors": (2, 2)}, "RevealRequest.survivors: must be in rising order"),
        ("RevealRequest", {"pieces": "no bytes"}, "RevealRequest.pieces: must be bytes"),
        ("Upload", {"commitment": bytes(16)}, "Upload.commitment: must be 32 bytes, or empty"),
        ("Upload", {"vector": "no bytes"}, "Upload.vector: must be bytes"),
        ("Upload", {"pieces": ()}, "Upload.pieces: must be bytes"),
        ("Upload", {"pieces": bytes(1_600_097)}, "Upload.pieces: must hold between 0 and 1600096 bytes"),
        ("Upload", {"fresh_prekeys": (Prekey(1, bytes(31), b""),)}, r"fresh_prekeys\[0\].public: must be 32"),
        ("Upload", {"fresh_prekeys": (Prekey(-1, bytes(32), b""),)}, r"fresh_prekeys\[0\].number"),
        ("Upload", {"fresh_prekeys": (None,)}, r"fresh_prekeys\[0\]: must be a Prekey"),
        ("Refusal", {"reason": "x" * 501}, "Refusal.reason: must hold"),
        ("Refusal", {"reason": "\ud800"}, "Refusal.reason: must be text that UTF-8 can hold"),
        ("Refusal", {"reason": b"bytes"}, "Refusal.reason: must be text"),
        ("Reveal", {"partials": REVEALED[::-1]}, "Reveal.partials: must be in rising order"),
        ("Reveal", {"partials": REVEALED[:1] * 2}, "Reveal.partials: must be in rising order"),
        *(
            ("Reveal", {"partials": (Partials(1, bytes(size), bytes(48)),)}, r"partials\[0\]")
            for size in (0, 31, 33)
        ),
        (
            "Reveal",
            {"partials": (Partials(1, bytes(32), bytes(64)),)},
            r"partials\[0\].proof: must be 48 bytes",
        ),
        ("RoundOpen", {"terms": {"mode": "ignore"}}, "RoundOpen.terms.mode: must be one of"),
        ("RoundOpen", {"terms": {"mode": 1}}, "RoundOpen.terms.mode: must be one of"),
        ("RoundOpen", {"terms": {"run": b""}}, "RoundOpen.terms.run: must hold"),
        (
            "RoundOpen",
            {"terms": {"modulus_bits": 31}},
            "RoundOpen.terms.modulus_bits: must lie between 32 and 64",
        ),
        ("RoundOpen", {"terms": {"coordinates": 0}}, "RoundOpen.terms.coordinates: must lie"),
        ("RoundOpen", {"terms": {"clip": float("nan")}}, "RoundOpen.terms.clip: must be finite"),
        ("RoundOpen", {"terms": {"clip": float("inf")}}, "RoundOpen.terms.clip: must be finite"),
        ("RoundOpen", {"terms": {"clip": -0.0}}, "RoundOpen.terms.clip: must be finite and not negative"),
        ("RoundOpen", {"terms": {"clip": 1}}, "RoundOpen.terms.clip: must be a float"),
    ],
)
def test_what_would_be_refused_is_not_sent(name: str, change: dict[str, Any], match: str) -> None:
    message = examples()[name]
    if "terms" in change:
        change = {"terms": replace(message.terms, **change["terms"])}
    ours(replace(message, **change), match)
