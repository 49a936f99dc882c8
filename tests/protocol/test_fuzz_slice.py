"""A short slice of the fuzzer in `tests/fuzz`, with a seed of its own."""

from __future__ import annotations

import pytest

from fuzz.fuzz_wire import feed, run_chunk


@pytest.mark.parametrize("chunk", range(4))
def test_damaged_messages_are_refused_or_encode_to_themselves(chunk: int) -> None:
    counts, findings, _ = run_chunk(seed=20_000, chunk=chunk, count=5_000)
    assert findings == []
    assert counts.total() == 5_000
    # The slice means nothing unless both verdicts are common, on damaged input too.
    assert counts["unchanged, accepted"] > 100
    assert counts["damaged, accepted"] > 100
    assert counts["damaged, refused"] > 1_000


def test_the_fuzzer_notices_a_crash_and_a_second_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.fuzz_wire.decode", lambda _: 1 // 0)
    assert feed(b"") == "decode raised ZeroDivisionError"
    monkeypatch.setattr("fuzz.fuzz_wire.decode", lambda _: None)
    monkeypatch.setattr("fuzz.fuzz_wire.encode", lambda _: b"other")
    assert feed(b"") == "encodes to other bytes"
