"""A short slice of the fuzzer of the machines in `tests/fuzz`, with a seed of its own."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest

from fuzz.driver import run_chunk
from fuzz.fuzz_machines import ASKED, TARGET, World, relayed_lie, signed_lie
from niss.protocol.client import Client
from niss.protocol.messages import Reveal, Upload
from niss.protocol.server import Server


@pytest.mark.parametrize("chunk", range(4))
def test_damaged_and_lying_messages_crash_nothing_and_forge_nothing(chunk: int) -> None:
    tally = run_chunk(TARGET, seed=30_000, chunk=chunk, count=600)
    counts = tally.counts
    assert tally.findings == []
    assert counts.total() == 600
    # The slice means nothing unless every kind of outcome is common.
    assert counts["bytes, refused"] > 50
    assert counts["fields, refused"] > 100
    assert counts["signed, refused"] > 20
    assert counts["signed, accepted"] > 10


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
    monkeypatch.setattr(Client, "upload", lambda *_: 1 // 0)
    rng = random.Random(2)
    with pytest.raises(ZeroDivisionError):
        deque((signed_lie(world, rng) for _ in range(200)), maxlen=0)


@pytest.mark.parametrize("points", [bytes(32), b"\xff" * 64, bytes(31) + b"\x80" + bytes(32), bytes(96)])
def test_malformed_points_do_not_keep_the_round_from_ending(points: bytes) -> None:
    """Found by the fuzzer's forebear: one malformed piece, signed, and the server could never finish."""
    world = World("malformed")
    reveal = next(message for message in world.messages if isinstance(message, Reveal))
    partials = tuple(replace(one, points=points) for one in reveal.partials)
    assert reveal.seat == ASKED
    assert world.feed(world.signed(replace(reveal, partials=partials))) == "accepted"
