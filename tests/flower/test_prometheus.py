"""Numbers for Prometheus: true, few, without a word about anybody's data, and nowhere unless they are asked for."""

from __future__ import annotations

import logging
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower.grid import FIRST, FakeGrid, global_model, make_app
from flower.test_trust import NODES, ODD, PLAN, start, with_folders
from niss.accounting import LedgerFile
from niss.errors import ConfigError
from niss.flower import NissStrategy, niss_mod
from niss.flower.prometheus import Exporter, server_text

SAMPLE = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>[-+0-9.e]+)$")


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels; fails on a line that Prometheus would not read."""
    found, described = {}, set()
    for line in text.splitlines():
        if line.startswith("# "):
            _, kind, name, meaning = line.split(" ", 3)
            assert kind in ("HELP", "TYPE")
            assert kind == "HELP" or meaning in ("gauge", "counter")
            described.add(name)
            continue
        hit = SAMPLE.match(line)
        assert hit, line
        assert hit["name"] in described
        key = hit["name"] + (f"{{{hit['labels']}}}" if hit["labels"] else "")
        assert key not in found
        found[key] = float(hit["value"])
    return found


def test_a_server_writes_a_file_after_every_round(tmp_path, monkeypatch):
    path = tmp_path / "server.prom"
    monkeypatch.setenv("NISS_SERVER_METRICS", str(path))
    grid = FakeGrid(NODES)
    grid.silent = {ODD}
    seen: list[dict[str, float]] = []

    def look(message: Message) -> Message:
        if path.exists():
            seen.append(samples(path.read_text()))
        return message

    grid.tamper = look
    with_folders(grid, tmp_path / "nodes")
    strategy = start(grid, rounds=3)
    shown = samples(path.read_text())
    assert shown['niss_server_rounds_total{outcome="summed"}'] == 3
    assert shown['niss_server_rounds_total{outcome="skipped"}'] == 0
    assert shown["niss_server_members"] == len(strategy.session.members)
    assert shown['niss_server_uploads_total{outcome="summed"}'] == sum(
        one.survivors for one in strategy.rounds
    )
    assert shown["niss_server_epsilon_spent"] == pytest.approx(strategy.statement.epsilon_joint)
    assert 0 < shown["niss_server_epsilon_spent"] < shown["niss_server_epsilon_promised"]
    assert shown["niss_server_noise_deviation"] == pytest.approx(strategy.rounds[-1].deviation)
    assert shown["niss_server_left_out"] == len(strategy.session.left_out) == 1
    assert {one['niss_server_rounds_total{outcome="summed"}'] for one in seen} == {1, 2}


def test_declined_lost_and_skipped_are_told_apart(tmp_path):
    """One node has spent half of its budget, the uploads of another are lost, and the plan ends before the run."""
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    start(grid, rounds=2)
    again, lost = FakeGrid(NODES), FIRST
    again.contexts[ODD].node_config["niss-state"] = str(tmp_path / str(ODD))

    def lose(reply: Message) -> Message | None:
        asked = {one.metadata.message_id: one for one in again.sent}[reply.metadata.reply_to_message_id]
        return None if "arrays" in asked.content and asked.metadata.dst_node_id == lost else reply

    again.mangle = lose
    strategy = start(again, rounds=3)
    shown = samples(server_text(strategy))
    reasons = [why for one in strategy.rounds for why in one.lost.values()]
    assert sorted(reasons) == [
        "declined: this client's own limits or its ledger do not allow it",
        *["no answer in time"] * 3,
    ]
    assert shown['niss_server_uploads_total{outcome="declined"}'] == 1
    assert shown['niss_server_uploads_total{outcome="lost"}'] == 3
    assert shown['niss_server_uploads_total{outcome="summed"}'] == 5 + 5 + 4
    assert shown["niss_server_extra_variance"] == strategy.account.extra_variance > 0
    skipped = samples(server_text(start(FakeGrid(NODES), rounds=6)))
    assert skipped['niss_server_rounds_total{outcome="skipped"}'] == 2
    assert skipped["niss_server_extra_variance"] == 0


def test_a_server_answers_on_a_port_while_its_run_lasts(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("NISS_SERVER_METRICS", str(port))
    grid, answers = FakeGrid(NODES), []

    def ask(message: Message) -> Message:
        if not answers and any("arrays" in one.content for one in grid.sent[:-1]):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                answers.append(answer.read().decode())
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=10)
        return message

    before = threading.active_count()
    grid.tamper = ask
    start(grid, rounds=2)
    assert answers
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)
    assert threading.active_count() <= before + 1


@pytest.mark.parametrize("where", ["relative.prom", "/nowhere/at/all/x.prom", "99999", "256.1.1.1:80", "/"])
def test_what_is_neither_port_nor_file_ends_the_run_before_it_begins(where, monkeypatch):
    monkeypatch.setenv("NISS_SERVER_METRICS", where)
    grid = FakeGrid(NODES)
    strategy = NissStrategy(FedAvg(fraction_evaluate=0.0), plan=PLAN)
    with pytest.raises(ConfigError, match="NISS_SERVER_METRICS"):
        strategy.start(grid, global_model(), num_rounds=1, timeout=1)
    assert grid.sent == []


def test_without_the_variables_there_is_nothing(tmp_path, monkeypatch):
    for name in ("NISS_SERVER_METRICS", "NISS_NODE_METRICS"):
        monkeypatch.delenv(name, raising=False)
    assert not Exporter("").wanted
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path)
    start(grid, rounds=1)
    assert not list(tmp_path.rglob("*.prom"))


def node_app(path: Path, monkeypatch: pytest.MonkeyPatch, app: ClientApp | None = None) -> ClientApp:
    """The app of a node whose process has the variable; the others have not."""
    inner = make_app() if app is None else app

    def with_variable(message: Message, context: Context) -> Message:
        monkeypatch.setenv("NISS_NODE_METRICS", str(path))
        try:
            return inner(message, context)
        finally:
            monkeypatch.delenv("NISS_NODE_METRICS")

    return with_variable  # type: ignore[return-value]


def test_a_node_counts_what_it_answered_and_shows_what_it_spent(tmp_path, monkeypatch):
    path = tmp_path / "node.prom"
    grid = FakeGrid(NODES)
    with_folders(grid, tmp_path / "nodes")
    grid.apps[ODD] = node_app(path, monkeypatch)
    start(grid, rounds=2)
    shown = samples(path.read_text())
    ledger = LedgerFile.read(tmp_path / "nodes" / str(ODD) / "ledger.jsonl")
    assert shown['niss_node_requests_total{stage="enrol",outcome="answered"}'] == 1
    assert shown['niss_node_requests_total{stage="round",outcome="answered"}'] == 2
    assert shown["niss_node_charges_total"] == 2
    assert shown["niss_node_epsilon_spent"] == pytest.approx(ledger.epsilon(ledger.spent("self")))
    assert shown["niss_node_epsilon_spent"] < shown["niss_node_epsilon_limit"] == pytest.approx(8.0)
    assert not [name for name in shown if str(ODD) in name]
    again = FakeGrid(NODES)
    again.contexts[ODD].node_config["niss-state"] = str(tmp_path / "nodes" / str(ODD))
    again.apps[ODD] = node_app(path, monkeypatch)
    start(again, rounds=4)
    shown = samples(path.read_text())
    assert shown['niss_node_requests_total{stage="round",outcome="answered"}'] == 4
    declined = sum(value for name, value in shown.items() if 'outcome="declined"' in name)
    assert declined >= 1, "its budget is spent"
    assert shown["niss_node_epsilon_spent"] == pytest.approx(8.0, rel=0.01)


def test_an_app_that_fails_leaves_no_trace_in_the_numbers(tmp_path, monkeypatch):
    """Whether an app fails can depend on its data."""
    failing = ClientApp(mods=[niss_mod])

    @failing.train()
    def train(_message: Message, _context: Context) -> Message:
        raise ValueError("patient 4312")

    texts = []
    for number, app in enumerate((make_app(), failing)):
        grid, path = FakeGrid(NODES), tmp_path / f"{number}.prom"
        with_folders(grid, tmp_path / str(number))
        grid.apps[ODD] = node_app(path, monkeypatch, app)
        assert start(grid, rounds=1).rounds[0].survivors == NODES
        texts.append({name: value for name, value in samples(path.read_text()).items() if "time" not in name})
    assert texts[0] == texts[1]


def test_a_node_cannot_be_given_a_port_and_answers_all_the_same(tmp_path, monkeypatch, caplog):
    grid = FakeGrid(NODES)
    monkeypatch.setenv("NISS_NODE_METRICS", "9464")
    with caplog.at_level(logging.WARNING, logger="flwr"):
        strategy = start(grid, rounds=1)
    assert strategy.rounds[0].survivors == NODES
    assert "no process that stays to listen on a port" in caplog.text
    monkeypatch.setenv("NISS_NODE_METRICS", str(tmp_path / "gone" / "x.prom"))
    assert start(FakeGrid(NODES), rounds=1).rounds[0].survivors == NODES


def test_labels_are_few_whatever_a_server_sends(tmp_path, monkeypatch):
    path = tmp_path / "node.prom"
    grid = FakeGrid(NODES)
    grid.apps[ODD] = node_app(path, monkeypatch)

    def strange(message: Message) -> Message:
        if message.metadata.dst_node_id == ODD:
            message.content["niss"]["stage"] = 'x"} 1\nforged 7'
        return message

    grid.tamper = strange
    start(grid, rounds=2)
    shown = samples(path.read_text())
    assert {name for name in shown if name.startswith("niss_node_requests_total")} == {
        'niss_node_requests_total{stage="other",outcome="declined"}'
    }
