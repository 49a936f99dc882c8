"""A short slice of the fuzzer of the tracker's API in `tests/fuzz`, with a seed of its own."""

from __future__ import annotations

import pytest

from fuzz.driver import run_chunk
from fuzz.fuzz_tracker import TARGET
from niss.tracker.rounds import Rounds


def test_odd_requests_are_answered_and_leave_the_tracker_usable() -> None:
    tally = run_chunk(TARGET, seed=50_000, chunk=0, count=800)
    assert tally.findings == []
    for outcome in ("answered 200", "answered 401", "answered 404", "answered 409", "answered 422"):
        assert tally.counts[outcome] > 10
    assert tally.counts["still usable, 200"] == 16


def test_the_fuzzer_notices_a_defect_of_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "run", lambda _self, _run: 1 // 0)
    tally = run_chunk(TARGET, seed=50_000, chunk=0, count=100)
    assert any("status 500" in finding for finding in tally.findings)
