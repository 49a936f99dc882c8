"""Entropy that is the same every time, for tests of formats and round trips."""

from __future__ import annotations

import hashlib
from typing import Any

from niss.protocol.agreement import Context, round_context


class FixedEntropy:
    """SHAKE-256 of a label, read on and on; two of the same label give the same bytes."""

    def __init__(self, label: str = "test") -> None:
        self._label = label.encode()
        self._read = 0

    def __call__(self, count: int) -> bytes:
        end = self._read + count
        drawn = hashlib.shake_256(self._label).digest(end)[self._read :]
        self._read = end
        return drawn


ROUND: dict[str, Any] = {
    "run": b"run 1",
    "round": 7,
    "attempt": 0,
    "beacon": b"beacon output",
    "participants_hash": bytes(range(32)),
    "graph_hash": bytes(range(32, 64)),
}


def context(**changes: Any) -> Context:
    """A round, with some fields changed."""
    return round_context(**{**ROUND, **changes})
