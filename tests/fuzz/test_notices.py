"""Fuzzers that find nothing would find something: each notices what is broken on purpose."""

from __future__ import annotations

import random
from collections import deque

import pytest

from fuzz import fuzz_terms
from fuzz.driver import run_chunk
from fuzz.fuzz_machines import World, relayed_lie, signed_lie
from fuzz.fuzz_wire import feed
from niss.accounting import CommittedAccount, DrawnAccount
from niss.protocol.client import Client
from niss.protocol.messages import Upload
from niss.protocol.server import Server


def test_the_fuzzer_notices_a_crash_and_a_second_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.fuzz_wire.decode", lambda _: 1 // 0)
    assert feed(b"") == "decode raised ZeroDivisionError"
    monkeypatch.setattr("fuzz.fuzz_wire.decode", lambda _: None)
    monkeypatch.setattr("fuzz.fuzz_wire.encode", lambda _: b"other")
    assert feed(b"") == "encodes to other bytes"


def test_the_fuzzer_notices_a_charge_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    known = DrawnAccount.__call__
    monkeypatch.setattr(DrawnAccount, "__call__", lambda *given: 0.9 * known(*given))
    assert run_chunk(fuzz_terms.TARGET, seed=20_000, chunk=2, count=60).findings


def test_the_fuzzer_notices_a_run_charged_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    known = CommittedAccount.cost
    monkeypatch.setattr(CommittedAccount, "cost", lambda *given: 0.99 * known(*given))
    assert run_chunk(fuzz_terms.TARGET, seed=20_000, chunk=1, count=100).findings


def test_the_fuzzer_notices_a_machine_that_checks_no_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rng = World("no signatures"), random.Random(1)
    monkeypatch.setattr("niss.protocol.client.verify", lambda *_: None)
    monkeypatch.setattr("niss.protocol.server.verify", lambda *_: None)
    assert any(relayed_lie(world, rng)[1] for _ in range(100))


def test_the_fuzzer_notices_a_crash_and_a_round_that_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("broken")
    upload = next(message for message in world.messages if isinstance(message, Upload))
    monkeypatch.setattr(Server, "finish", lambda _self: 1 // 0)
    assert "ZeroDivisionError" in world.feed(upload)
    monkeypatch.setattr(Client, "reveal", lambda _self, _request: 1 // 0)
    monkeypatch.setattr(Client, "accept", lambda *_: 1 // 0)
    rng = random.Random(2)
    with pytest.raises(ZeroDivisionError):
        deque((signed_lie(world, rng) for _ in range(200)), maxlen=0)


def test_the_fuzzer_notices_a_defect_of_the_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from fuzz.fuzz_tracker import TARGET

    monkeypatch.setattr("niss.tracker.rounds.Rounds.run", lambda _self, _run: 1 // 0)
    tally = run_chunk(TARGET, seed=50_000, chunk=0, count=100)
    assert any("status 500" in finding for finding in tally.findings)
