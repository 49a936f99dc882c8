"""Noise carried from round to round on the deployment engine, with kill -9 in between; it takes minutes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower.test_deployment import (
    FAULTY,
    WITHOUT_NOISE,
    _server_apps,
    caveats,
    finished,
    nothing_is_left,
    step,
)
from niss.accounting import LedgerFile
from niss.local.deployment import Deployment, Settings
from support.waiting import wait_until

pytestmark = pytest.mark.slow
ROUNDS = 4
RUN_CONFIG = {"rounds": ROUNDS, "mode": "tolerate", "carry": True, "separation": 2, "timeout": 200.0}


def asked(signs: Path) -> dict[int, set[int]]:
    """By round: the nodes that were asked to train."""
    found: dict[int, set[int]] = {}
    for sign in signs.iterdir():
        _, number, _, node = sign.name.split("-")
        found.setdefault(int(number), set()).add(int(node))
    return found


def noise_left(federation: Deployment, summed: dict[int, set[int]], size: int) -> np.ndarray:
    """What the last model has beyond the updates of those nodes, each with weight 1 / size."""
    weights = json.loads((federation.folder / "weights.json").read_text())[str(ROUNDS)]
    return np.array(weights) - sum(
        step(node, number) / size for number, nodes in summed.items() for node in nodes
    )


def options(nodes: int, signs: Path) -> dict[int, dict[str, Any]]:
    signs.mkdir()
    return {number: {"fault-folder": str(signs), **WITHOUT_NOISE} for number in range(nodes)}


def test_a_node_is_killed_between_its_two_rounds(tmp_path):
    """With TLS and a tracker. It was announced for its second round, and leaves its noise in the model."""
    signs = tmp_path / "signs"
    with Deployment(tmp_path / "up", Settings(nodes=6, node_options=options(6, signs))) as federation:
        run = federation.submit(FAULTY, RUN_CONFIG)
        wait_until(lambda: 2 in asked(signs))
        victim = min(asked(signs)[1])
        federation.processes.kill(federation.nodes[victim])
        report = finished(federation, run)
    assert nothing_is_left(federation.home)
    rounds = report["rounds"]
    assert [one["survivors"] for one in rounds] == [3, 3, 2, 3]
    assert [one["exact"] for one in rounds] == [True, True, False, False]
    assert len(rounds[2]["lost"]) == 1
    found = asked(signs)
    assert found[2] == found[4] == set(range(6)) - found[1]
    assert found[1] - {victim} == found[3] - {victim}
    said = np.sqrt(rounds[-1]["model_noise_variance"] - rounds[-1]["carried_variance"])
    left = noise_left(federation, {**found, 3: found[3] - {victim}}, 3)
    assert 0.3 * said < np.sqrt(np.mean(left**2)) < 3.0 * said
    assert "Uploads lost or declined: 1;" in caveats(report)


def test_a_server_that_is_killed_between_two_rounds_goes_on_with_the_cohort_it_announced(tmp_path):
    signs = tmp_path / "signs"
    settings = Settings(nodes=4, tls=False, node_options=options(4, signs))
    with Deployment(tmp_path / "up", settings) as federation:
        weights = federation.folder / "weights.json"
        run_config = RUN_CONFIG | {"resume": str(federation.saved_run), "pause-after": 2}
        run = federation.submit(FAULTY, run_config)
        wait_until(lambda: weights.exists() and '"2"' in weights.read_text())
        for process in _server_apps(federation.superlink.mark):
            os.kill(process, signal.SIGKILL)
        wait_until(lambda: federation.status(run).startswith("finished"))
        report = finished(federation, federation.submit(FAULTY, run_config | {"pause-after": 0}))
    assert [one["survivors"] for one in report["rounds"]] == [2] * ROUNDS
    assert all(one["exact"] for one in report["rounds"])
    np.testing.assert_allclose(noise_left(federation, asked(signs), 2), 0.0, rtol=0, atol=1e-5)
    for number in range(4):
        ledger = LedgerFile.read(federation.state_folder(number) / "ledger.jsonl")
        first = ledger.entries[0].basis["round"]
        assert [entry.basis["round"] for entry in ledger.entries] == [first, first + 2]
