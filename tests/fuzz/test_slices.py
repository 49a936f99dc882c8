"""Short slices of the fuzzers, with seeds of their own: nothing is found, and every kind of outcome is common.

A slice means nothing unless much is accepted and much is refused.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from fuzz.driver import run_chunk


class Slice(NamedTuple):
    """Of one target: seed, chunks, inputs of each, and by outcome how many there are more than."""

    seed: int
    chunks: tuple[int, ...]
    count: int
    least: dict[str, int]


TERMS = {"charged": 20, "refused": 20}
CARRIED = dict.fromkeys(("schedule, covered", "schedule, refused", "opening, refused"), 20)
SLICES = {
    "wire": [
        Slice(
            *(20_000, (0, 1, 2, 3), 5_000),
            {"unchanged, accepted": 100, "damaged, accepted": 100, "damaged, refused": 1_000},
        )
    ],
    "terms": [
        Slice(20_000, (2,), 150, TERMS),
        Slice(20_000, (1,), 300, CARRIED | {"opening, answered": 5}),
    ],
    "machines": [
        Slice(
            *(30_000, (0, 1, 2, 3), 600),
            {"bytes, refused": 50, "fields, refused": 100, "signed, refused": 20, "signed, accepted": 10},
        )
    ],
    "proposal": [
        Slice(
            *(40_000, (0,), 800),
            dict.fromkeys(("unreadable", "beyond the limits, declined", "within the limits, joined"), 15),
        )
    ],
    "flower": [Slice(20_000, (0, 1), 1_500, {"taken": 30, "refused": 500})],
    "tracker": [
        Slice(
            *(50_000, (0,), 800),
            {f"answered {status}": 10 for status in (200, 401, 404, 409, 422)} | {"still usable, 200": 15},
        )
    ],
}
NEEDS = {"proposal": "flwr", "flower": "flwr", "tracker": "fastapi"}


@pytest.mark.parametrize(
    ("name", "part", "chunk"),
    [
        (name, part, chunk)
        for name, parts in SLICES.items()
        for part, one in enumerate(parts)
        for chunk in one.chunks
    ],
)
def test_a_slice_of_each_fuzzer_finds_nothing(name: str, part: int, chunk: int) -> None:
    if find_spec(NEEDS.get(name, "niss")) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    target, one = import_module(f"fuzz.fuzz_{name}").TARGET, SLICES[name][part]
    tally = run_chunk(target, seed=one.seed, chunk=chunk, count=one.count)
    assert tally.findings == []
    assert tally.total >= one.count
    assert all(tally.counts[outcome] > least for outcome, least in one.least.items()), tally.counts
