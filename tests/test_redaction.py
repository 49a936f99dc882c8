"""What a log says of an error: words stay, whatever could be key material or a password goes."""

from __future__ import annotations

import base64
import re

import pytest

from niss.protocol.keys import fingerprint
from niss.redaction import REDACTED, printable, redact, safe_traceback

SEED = bytes(range(100, 132))


@pytest.mark.parametrize(
    "text",
    [
        "division by zero",
        "[Errno 2] No such file or directory: '/usr/share/a-rather-long-folder/with-more-below/and-a-file.json'",
        "shape (200, 25450) against (200, 25451)",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "expected 32 bytes, got 31",
    ],
)
def test_words_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("bad key " + SEED.hex(), "bad key [redacted]"),
        ("bad key 0x" + SEED.hex(), "bad key [redacted]"),
        (f"bad key {SEED!r} here", "bad key [redacted] here"),
        (f"bad key {SEED[:9]!r}", "bad key [redacted]"),
        (f"bad key {bytearray(SEED)!r}", "bad key bytearray([redacted])"),
        (f"share {int.from_bytes(SEED, 'big')}", "share [redacted]"),
        (f"bad key {base64.b64encode(SEED).decode()}", "bad key [redacted]"),
        ("cannot reach redis://user:word@host:6379/0", "cannot reach redis://[redacted]@host:6379/0"),
    ],
)
def test_what_could_be_a_secret_goes(text: str, kept: str) -> None:
    assert redact(text) == kept


def test_lists_of_numbers_go() -> None:
    for values in (list(SEED), [value / 7 for value in SEED], " ".join(map(str, SEED))):
        shown = redact(f"values {values}")
        assert REDACTED in shown
        assert not re.search(r"\d", shown)


def test_redacting_long_texts_ends() -> None:
    for text in ("1" * 100_000, "1," * 50_000, "b'" + "\\x00" * 50_000, "a" * 100_000, "1.e+-" * 20_000):
        assert len(redact(text)) <= 4000


def test_a_fingerprint_is_for_people_and_stays() -> None:
    assert redact(fingerprint(SEED)) == fingerprint(SEED)


def test_a_traceback_keeps_its_places_and_causes() -> None:
    try:
        try:
            raise KeyError(SEED)
        except KeyError as cause:
            raise ValueError("no such key") from cause
    except ValueError as error:
        text = safe_traceback(error)
    assert __file__ in text
    assert "ValueError: no such key" in text
    assert f"KeyError: {REDACTED}" in text


def test_what_is_printable_stays_as_it_is() -> None:
    assert printable("state is at step 1, ä€😀") == "state is at step 1, ä€😀"
    assert printable("1\u202f000\u00a0%") == "1\u202f000\u00a0%"
    assert printable("a\n" * 300, longest=None, keep="\n") == "a\n" * 300
    assert printable("a\x1b[31mb\nc\u202ed\ud800e\x9bf") == "a?[31mb?c?d?e?f"
    assert len(printable("x" * 10**6)) < 1000
