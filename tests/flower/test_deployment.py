"""Faults on the deployment engine: real processes, real sockets, kill -9. Minutes, so only in `make test-all`."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niss.accounting import LedgerFile
from niss.local import marked
from niss.local.deployment import Deployment, Settings, make_node_key
from niss.mechanism import gdp_epsilon, gdp_mu
from niss.protocol.keyfile import load_identity
from support.waiting import wait_until

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
FAULTY = HERE / "fault_app"
EXAMPLE = HERE.parents[1] / "examples" / "flower_app"
# Seconds for which the tracker is away.
AWAY = 120.0
WITHOUT_NOISE = {"niss-uncalibrated": True}


def step(partition: int, server_round: int) -> np.ndarray:
    sys.path.insert(0, str(FAULTY))
    try:
        from fault_app import step as step_of
    finally:
        sys.path.remove(str(FAULTY))
    return step_of(partition, server_round)


def finished(federation: Deployment, run: str) -> dict[str, Any]:
    """The report of a run that completed."""
    wait_until(lambda: federation.status(run).startswith("finished"), seconds=580.0)
    words = (federation.folder / "logs" / "superlink.log").read_text()[-3000:]
    assert federation.status(run) == "finished:completed", words
    report: dict[str, Any] = json.loads(federation.report.read_text())
    return report


def check_sums(federation: Deployment, present: list[set[int]]) -> None:
    """The weights after each round are the mean over those who were there, to the last digits of the grid."""
    weights = json.loads((federation.folder / "weights.json").read_text())
    expected = np.zeros(len(weights["0"]))
    for number, partitions in enumerate(present, start=1):
        expected = expected + np.mean([step(one, number) for one in partitions], axis=0)
        np.testing.assert_allclose(weights[str(number)], expected, rtol=0, atol=1e-5)


def caveats(report: dict[str, Any]) -> str:
    return "\n".join(report["statement"]["caveats"])


def nothing_is_left(folder: Path) -> bool:
    return not any(str(folder).encode() in _environment(entry) for entry in Path("/proc").glob("[0-9]*"))


def played(folder: Path, settings: Settings, **run_config: Any) -> tuple[Deployment, dict[str, Any]]:
    """A whole run of the faulty app, after which nothing is left; the federation as it was, and the report."""
    with Deployment(folder / "up", settings) as federation:
        report = finished(federation, federation.submit(FAULTY, {"timeout": 120.0, **run_config}))
    assert nothing_is_left(federation.home)
    return federation, report


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_a_killed_node_a_restarted_tracker_and_an_unregistered_key(tmp_path):
    """With TLS, node authentication, a tracker and everything pinned; the sum is repaired."""
    signs = tmp_path / "signs"
    signs.mkdir()
    odd = 1
    options = {number: {"fault-folder": str(signs), **WITHOUT_NOISE} for number in range(6)}
    options[odd] |= {"fault": "killed", "fault-round": 2}
    with Deployment(tmp_path / "up", Settings(nodes=6, node_options=options)) as federation:
        strange, _ = make_node_key(tmp_path, "strange")
        stranger = federation.start_node(6, key=strange)
        run = federation.submit(FAULTY, {"rounds": 3, "timeout": 200.0})
        wait_until(lambda: (signs / f"round-2-node-{odd}").exists())
        federation.processes.kill(federation.nodes[odd])
        assert federation.tracker is not None
        federation.processes.kill(federation.tracker)
        federation.start_tracker()
        report = finished(federation, run)
        assert not stranger.running, "a node with a key that nobody registered"
    assert nothing_is_left(federation.home)
    everyone = set(range(6))
    check_sums(federation, [everyone, everyone - {odd}, everyone - {odd}])
    assert [one["survivors"] for one in report["rounds"]] == [6, 5, 5]
    assert all(one["exact"] for one in report["rounds"])
    assert len(report["rounds"][1]["lost"]) == 1
    assert len(report["members"]) == 6
    assert "Uploads lost or declined: 1;" in caveats(report)
    assert "on trust: the server's key" not in caveats(report)


def test_a_stale_context_a_corrupted_reply_a_lying_relay_and_a_node_that_never_answers(tmp_path):
    """Without pins, so that the Context is all the clients have; two faults in each round are repaired."""
    faults = {1: ("swapped", 2), 2: ("corrupt", 2), 3: ("stale", 3), 4: ("silent", 3)}
    options: dict[int, dict[str, Any]] = {
        number: {"fault": fault, "fault-round": due} for number, (fault, due) in faults.items()
    }
    for number in range(8):
        options[number] = {**options.get(number, {}), **WITHOUT_NOISE, "niss-state": None}
    settings = Settings(nodes=8, tls=False, tracker=False, pinned=False, node_options=options)
    federation, report = played(tmp_path, settings, rounds=3)
    everyone = set(range(8))
    # The relay swapped a key in one round only: the client that declined is asked again.
    check_sums(federation, [everyone, everyone - {1, 2}, everyone - {3, 4}])
    assert [one["survivors"] for one in report["rounds"]] == [8, 6, 6]
    assert [one["participants"] for one in report["rounds"]] == [8, 8, 8]
    assert all(one["exact"] for one in report["rounds"])
    second, third = (" ".join(report["rounds"][number]["lost"].values()) for number in (1, 2))
    assert "signature for 'open'" in second, "the relay that swapped a key"
    assert "signature for 'upload'" in second, "the corrupted reply"
    assert "state is at step" in third, "the stale Context"
    assert "no answer in time" in third, "the node that never answers"
    assert "Uploads lost or declined: 4;" in caveats(report)
    assert "The server holds the beacon itself" in caveats(report)


def test_degenerate_keys_and_a_malformed_reply_cost_their_nodes_alone(tmp_path):
    options: dict[int, dict[str, Any]] = {
        number: {"niss-state": None, **WITHOUT_NOISE} for number in range(8)
    }
    options[1] |= {"fault": "degenerate"}
    options[2] |= {"fault": "malformed", "fault-round": 2}
    settings = Settings(nodes=8, tls=False, tracker=False, pinned=False, node_options=options)
    federation, report = played(tmp_path, settings, rounds=3)
    others = set(range(8)) - {1}
    check_sums(federation, [others, others - {2}, others])
    assert [one["survivors"] for one in report["rounds"]] == [7, 6, 7]
    assert all(one["exact"] for one in report["rounds"])
    assert "not a string of bytes" in " ".join(report["rounds"][1]["lost"].values())
    assert "degenerate" in caveats(report)


def test_an_app_that_fails_says_nothing_and_evaluation_is_refused(tmp_path):
    options: dict[int, dict[str, Any]] = {number: dict(WITHOUT_NOISE) for number in range(4)}
    options[1] |= {"fault": "raises", "fault-round": 1}
    settings = Settings(nodes=4, tls=False, tracker=False, node_options=options)
    federation, report = played(tmp_path, settings, rounds=1, evaluate=True)
    weights = json.loads((federation.folder / "weights.json").read_text())
    expected = np.sum([step(one, 1) for one in (0, 2, 3)], axis=0) / 4
    np.testing.assert_allclose(weights["1"], expected, rtol=0, atol=1e-5)
    assert report["rounds"][0]["lost"] == {}
    said = (federation.folder / "logs" / "superlink.log").read_text() + federation.report.read_text()
    assert "index 4312" not in said, "what the app said about its data"
    assert json.loads((federation.folder / "evaluated.json").read_text()) == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_niss_up_leaves_nothing_behind(tmp_path, number):
    kept = tmp_path / "up"
    words = ["--nodes", "2", "--no-tls", "--no-tracker", "--app", str(EXAMPLE), "--keep", str(kept)]
    started = subprocess.Popen([sys.executable, "-m", "niss", "up", *words], stderr=subprocess.PIPE)
    try:
        wait_until(lambda: (kept / "logs" / "node-1.log").exists())
        time.sleep(3.0)
        started.send_signal(number)
        started.wait(60)
    finally:
        started.kill()
    assert started.returncode != 0
    wait_until(lambda: nothing_is_left(kept), seconds=5.0)


def test_a_superlink_that_is_killed_between_rounds_goes_on(tmp_path):
    """kill -9, of its ServerApp too; the nodes keep their ledgers and pay once a round."""
    options = {number: dict(WITHOUT_NOISE) for number in range(3)}
    settings = Settings(nodes=3, tls=False, tracker=False, node_options=options)
    with Deployment(tmp_path / "up", settings) as federation:
        weights = federation.folder / "weights.json"
        run_config = {
            "rounds": 4,
            "mode": "tolerate",
            "timeout": 120.0,
            "pause-after": 2,
            "resume": str(federation.saved_run),
        }
        federation.submit(FAULTY, run_config)
        wait_until(lambda: weights.exists() and '"2"' in weights.read_text())
        federation.processes.kill(federation.superlink)
        for node in list(federation.nodes.values()):
            federation.processes.kill(node)
        federation.start_superlink()
        for number in range(3):
            federation.start_node(number)
        assert len(json.loads(federation.report.read_text())["rounds"]) == 2
        report = finished(federation, federation.submit(FAULTY, run_config | {"pause-after": 0}))
    everyone = set(range(3))
    check_sums(federation, [everyone] * 4)
    assert [one["survivors"] for one in report["rounds"]] == [3] * 4
    assert "Times that the server ended and the run went on: 1." in caveats(report)
    for number in range(3):
        ledger = LedgerFile.read(federation.state_folder(number) / "ledger.jsonl")
        assert [entry.basis["round"] for entry in ledger.entries] == [0, 1, 2, 3]


def _server_apps(mark: str) -> list[int]:
    """The ids of the processes that a SuperLink runs ServerApps in."""
    return [
        process
        for process in marked(mark)
        if b"serverapp" in Path(f"/proc/{process}/cmdline").read_bytes().replace(b"-", b"")
    ]


def test_a_killed_niss_up_leaves_nothing_behind_and_is_resumed(tmp_path):
    kept = tmp_path / "up"
    words = ["--nodes", "2", "--rounds", "2", "--no-tls", "--set", "collusion=0", "--keep", str(kept)]
    command = [sys.executable, "-m", "niss", "up"]
    log = (tmp_path / "log").open("wb")
    started = subprocess.Popen([*command, *words], stdout=log, stderr=log, cwd=tmp_path)
    try:
        wait_until(lambda: (kept / "report.json").exists())
    finally:
        started.kill()
        started.wait()
    wait_until(lambda: nothing_is_left(kept))
    done = subprocess.run(
        [*command, "--resume", str(kept), "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert [one["round"] for one in report["rounds"]] == [1, 2]
    assert any(one["survivors"] for one in report["rounds"])
    for number in range(2):
        ledger = LedgerFile.read(kept / "nodes" / str(number) / "ledger.jsonl")
        charged = [entry.basis["round"] for entry in ledger.entries]
        assert charged == sorted(set(charged))


class LongRun:
    """Eight nodes with TLS, a tracker and budgets; after a short run, one of ten rounds in which everything happens.

    late     too slow in every round: it uploads blanks
    poor     what the short run has left of its budget is for a few rounds
    dying    is killed while it trains
    """

    late, poor, dying, nodes, rounds = 2, 5, 6, 8, 10
    paused, dies, paid = 2, 7, 4

    def __init__(self, folder: Path) -> None:
        self.signs = folder / "signs"
        self.signs.mkdir()
        options: dict[int, dict[str, Any]] = {
            number: {"fault-folder": str(self.signs), "niss-epsilon": 30.0, "niss-delta": 1e-5}
            for number in range(self.nodes)
        }
        options[self.late] |= {"fault": "late"}
        options[self.poor] |= {"niss-epsilon": 8.0}
        options[self.dying] |= {"fault": "dying", "fault-round": self.dies}
        self.federation = Deployment(folder / "up", Settings(nodes=self.nodes, node_options=options))
        self.settings = {"tau2": -1.0, "mode": "tolerate", "timeout": 300.0, "deadline": 6.0}

    def spend(self) -> None:
        """A run of one round, after which the poor node can pay for a few rounds of another."""
        spent = gdp_mu(8.0, 1e-5) * math.sqrt(1.0 - (self.paid + 0.5) / self.rounds)
        epsilon = gdp_epsilon(spent, 1e-5)
        finished(
            self.federation, self.federation.submit(FAULTY, self.settings | {"rounds": 1, "epsilon": epsilon})
        )
        self.federation.report.unlink()

    def begin(self, **more: Any) -> str:
        """Start the run, or go on with it."""
        resume = {"resume": str(self.federation.saved_run), "rounds": self.rounds}
        return self.federation.submit(FAULTY, self.settings | resume | more)

    def wait_for(self, number: int) -> None:
        """Until this round, counted from 1, is over."""
        report = self.federation.report
        wait_until(lambda: report.exists() and len(json.loads(report.read_text())["rounds"]) >= number, 900.0)

    def paid_by(self, number: int) -> list[int]:
        """The rounds, counted from 1, that a node has paid for, without that of the short run."""
        entries = LedgerFile.read(self.federation.state_folder(number) / "ledger.jsonl").entries
        return [entry.basis["round"] + 1 for entry in entries][1:]


def test_eight_nodes_survive_everything_one_after_another(tmp_path):
    """A killed server, two minutes without a tracker, a node that is late, one that runs out, one that dies and comes
    back: all ten rounds take place, and what the ledgers say is what the report says."""
    run = LongRun(tmp_path)
    with run.federation as federation:
        run.spend()
        first = run.begin(**{"pause-after": run.paused})
        weights = federation.folder / "weights.json"
        wait_until(lambda: f'"{run.paused}"' in weights.read_text(), 900.0)
        for process in _server_apps(federation.superlink.mark):
            os.kill(process, signal.SIGKILL)
        wait_until(lambda: federation.status(first).startswith("finished"), 900.0)
        second = run.begin()
        run.wait_for(run.paused + 1)
        assert federation.tracker is not None
        federation.processes.kill(federation.tracker)
        time.sleep(AWAY)
        assert not federation.status(second).startswith("finished"), "nobody waited for the tracker"
        federation.start_tracker()
        wait_until(lambda: (run.signs / f"dying-in-round-{run.dies}").exists(), 900.0, step=0.1)
        federation.processes.kill(federation.nodes[run.dying])
        run.wait_for(run.dies)
        federation.start_node(run.dying)
        report = finished(federation, second)
    assert nothing_is_left(federation.home)
    rounds, everything = report["rounds"], list(range(1, run.rounds + 1))
    assert [one["round"] for one in rounds] == everything
    assert not any(one["skipped"] for one in rounds), "every round that could be had"
    assert [(one["round"], len(one["lost"])) for one in rounds if one["lost"]] == [(run.dies, 1)]
    assert "Times that the server ended and the run went on: 1." in caveats(report)
    blank = f"number {run.rounds} of this node in the run"
    assert blank in (federation.folder / "logs" / f"node-{run.late}.log").read_text()
    paid = {number: run.paid_by(number) for number in range(run.nodes)}
    assert paid.pop(run.poor) == everything[: run.paid]
    assert paid[run.dying][: run.dies] == everything[: run.dies]
    assert paid.pop(run.dying)[-1] == run.rounds, "it came back"
    assert all(mine == everything for mine in paid.values())
    by_identity = {
        load_identity(federation.state_folder(number) / "identity.key").public.hex(): run.paid_by(number)
        for number in range(run.nodes)
    }
    participants = [sum(number in mine for mine in by_identity.values()) for number in everything]
    assert [one["participants"] for one in rounds] == participants
    told = report["clients"]["participations"]
    assert told == [len(by_identity[identity]) for identity in report["members"].values()]
    assert report["statement"]["epsilon_joint"] <= 8.0
