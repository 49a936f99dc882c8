"""What the wire refuses: too much, malformed fields of our own, and memory on a liar's word."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from niss.protocol.messages import Message, Partials, Prekey, Reveal, RevealRequest, Upload
from niss.protocol.wire import WireLimits, decode, encode
from support.protocol_messages import example_prekey, examples, filler

NAMES = sorted(examples())
CONTEXT = filler("context", 32)
HEAD = b"NISS\x01"
GENEROUS = WireLimits(*[2**40] * 5)


def refused(data: bytes, match: str, limits: WireLimits | None = None) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        decode(data, limits=limits or WireLimits())


def ours(message: Any, match: str) -> None:
    with pytest.raises(LocalProtocolError, match=match):
        encode(message)


@pytest.mark.parametrize(
    ("limits", "name", "match"),
    [
        (WireLimits(max_participants=3), "RoundOpen", "RoundOpen.terms.dropped"),
        (WireLimits(max_participants=4), "RevealRequest", r"survivors\[2\]"),
        (WireLimits(max_participants=3), "RevealRequest", "survivors: must hold at most 3 items"),
        (WireLimits(max_coordinates=199_999), "RoundOpen", "terms.coordinates"),
        (WireLimits(max_coordinates=2), "Upload", "Upload.vector: must hold between 0 and 16 bytes"),
        (WireLimits(max_message_bytes=50), "Reveal", "message: larger than 50 bytes"),
        (WireLimits(max_participants=2), "Reveal", r"Reveal.seat|Reveal.partials\[0\].points"),
        (WireLimits(max_reason_bytes=5), "Refusal", "Refusal.reason"),
    ],
)
def test_limits_hold_on_both_sides(limits: WireLimits, name: str, match: str) -> None:
    message = examples()[name]
    refused(encode(message), match, limits)
    with pytest.raises(LocalProtocolError, match=match):
        encode(message, limits=limits)


def test_prekeys_are_limited_and_limits_make_sense() -> None:
    upload = replace(examples()["Upload"], fresh_prekeys=tuple(example_prekey(number) for number in range(3)))
    refused(encode(upload), "fresh_prekeys: must hold at most 2 items", WireLimits(max_prekeys=2))
    for value in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="max_prekeys"):
            WireLimits(max_prekeys=value)  # type: ignore[arg-type]


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
    for limits in (WireLimits(), GENEROUS):
        tracemalloc.start()
        refused(data, "must hold|ends too early", limits)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000


N = 16_000  # seats of two bytes each, too large for the small numbers Python keeps anyway
CROWDS: dict[str, Message] = {
    "survivors": RevealRequest(CONTEXT, tuple(range(N)), b""),
    "pieces": RevealRequest(CONTEXT, (), bytes(96 * N)),
    "partials": Reveal(CONTEXT, 0, tuple(Partials(seat, CONTEXT, bytes(48)) for seat in range(N))),
    "points": Reveal(CONTEXT, 0, (Partials(0, bytes(32 * N), bytes(48)),)),
    "prekeys": Upload(CONTEXT, 0, b"", tuple(Prekey(seat, CONTEXT, b"") for seat in range(N)), b"", b""),
}


def peak_of_decoding(message: Message) -> float:
    """Most memory held while decoding, for each byte of the encoding."""
    data = encode(message, limits=GENEROUS)
    tracemalloc.start()
    try:
        assert decode(data, limits=GENEROUS) == message
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
    ],
)
def test_what_would_be_refused_is_not_sent(name: str, change: dict[str, Any], match: str) -> None:
    ours(replace(examples()[name], **change), match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mode": "ignore"}, "mode: must be one of"),
        ({"mode": 1}, "mode: must be one of"),
        ({"run": b""}, "run: must hold"),
        ({"modulus_bits": 15}, "modulus_bits: must lie between 16 and 64"),
        ({"coordinates": 0}, "coordinates: must lie"),
        ({"clip": float("nan")}, "clip: must be finite"),
        ({"clip": float("inf")}, "clip: must be finite"),
        ({"clip": -0.0}, "clip: must be finite and not negative"),
        ({"clip": 1}, "clip: must be a float"),
    ],
)
def test_terms_are_checked_before_they_are_sent(change: dict[str, Any], match: str) -> None:
    opened = examples()["RoundOpen"]
    ours(replace(opened, terms=replace(opened.terms, **change)), f"RoundOpen.terms.{match}")
