"""Short slices of the fuzzers of wire format and terms in `tests/fuzz`, with seeds of their own."""

from __future__ import annotations

import pytest

from fuzz import fuzz_carried, fuzz_terms, fuzz_wire
from fuzz.driver import run_chunk
from fuzz.fuzz_wire import feed
from niss.accounting import CommittedAccount, DrawnAccount


@pytest.mark.parametrize("chunk", range(4))
def test_damaged_messages_are_refused_or_encode_to_themselves(chunk: int) -> None:
    tally = run_chunk(fuzz_wire.TARGET, seed=20_000, chunk=chunk, count=5_000)
    counts = tally.counts
    assert tally.findings == []
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


def test_odd_terms_are_refused_or_charged_for() -> None:
    tally = run_chunk(fuzz_terms.TARGET, seed=20_000, chunk=1, count=150)
    assert tally.findings == []
    assert min(tally.counts[kind] for kind in ("charged", "refused")) > 20


def test_the_fuzzer_notices_a_charge_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    known = DrawnAccount.__call__
    monkeypatch.setattr(DrawnAccount, "__call__", lambda *given: 0.9 * known(*given))
    assert run_chunk(fuzz_terms.TARGET, seed=20_000, chunk=1, count=60).findings


def test_odd_runs_with_carried_shares_are_refused_or_charged_for() -> None:
    tally = run_chunk(fuzz_carried.TARGET, seed=20_000, chunk=1, count=300)
    assert tally.findings == []
    kinds = ("schedule, covered", "schedule, refused", "opening, refused")
    assert min(tally.counts[kind] for kind in kinds) > 20
    assert tally.counts["opening, answered"] > 5


def test_the_fuzzer_notices_a_run_charged_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    known = CommittedAccount.cost
    monkeypatch.setattr(CommittedAccount, "cost", lambda *given: 0.99 * known(*given))
    assert run_chunk(fuzz_carried.TARGET, seed=20_000, chunk=1, count=100).findings
