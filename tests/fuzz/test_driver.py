"""The driver of all fuzzers: the same inputs whatever the workers, findings kept, Ctrl-C, and chunks fed again."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fuzz import driver
from fuzz.__main__ import TARGETS
from fuzz.driver import Feed, Tally, Target, fuzz, report, run_chunk


@contextmanager
def start(_label: str) -> Iterator[Feed]:
    def feed(rng: random.Random) -> tuple[str, str]:
        drawn = rng.randrange(100)
        if drawn == 0:
            raise KeyError("secret")
        return ("odd", f"drew {drawn}") if drawn == 1 else ("even" if drawn % 2 == 0 else "odd", "")

    yield feed


TARGET = Target("numbers", 100, start)


def test_counts_do_not_depend_on_the_workers_and_findings_are_kept(tmp_path: Path) -> None:
    one, complete = fuzz(TARGET, count=1_050, seed=1, workers=1, folder=tmp_path / "one")
    two, _ = fuzz(TARGET, count=1_050, seed=1, workers=2, folder=tmp_path / "two")
    assert complete
    assert one.total == two.total == 1_050
    assert one.counts == two.counts
    assert one.counts["crash"] > 0
    kept = (tmp_path / "one" / "numbers.txt").read_text()
    assert all(finding in kept for finding in one.findings)
    assert sorted(one.findings) == sorted(two.findings)
    assert f"{len(one.findings)} findings" in report(TARGET, one)


def test_a_finding_is_fed_again_by_its_chunk(tmp_path: Path) -> None:
    whole, _ = fuzz(TARGET, count=1_000, seed=1, workers=1, folder=tmp_path)
    found = next(one for one in whole.findings if "drew" in one)
    chunk = int(found.split("chunk ")[1].split(",")[0])
    again, _ = fuzz(TARGET, count=1_000, seed=1, workers=1, folder=tmp_path, only=chunk)
    assert found in again.findings
    assert found in run_chunk(TARGET, 1, chunk, 100).findings


def test_what_was_fed_before_an_interrupt_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, fed = Tally.add, []

    def add(self: Tally, other: Tally) -> None:
        known(self, other)
        fed.append(other.total)
        if len(fed) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(driver.Tally, "add", add)
    tally, complete = fuzz(TARGET, count=10_000, seed=1, workers=1, folder=tmp_path)
    assert not complete
    assert tally.total == sum(fed) == 300


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_one(name: str) -> None:
    if name in ("flower", "proposal"):
        pytest.importorskip("flwr")
    target: Any = importlib.import_module(f"fuzz.fuzz_{name}").TARGET
    assert target.name == name
