"""The share graph of a round: the one that was used, with colluders and drops marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from niss.accounting.plans import Plan
from niss.graph import ShareGraph
from niss.randomness import SimStream
from niss.report import read_report_input
from niss.report.page import graph_figure
from niss.report.round_graph import MOST_AROUND, RoundGraph, find_round_graph
from report.conftest import write_graph_run


def shown_in(folder: Path) -> RoundGraph:
    """The graph that the report on the folder shows."""
    shown = find_round_graph(read_report_input(folder))
    assert shown is not None
    return shown


@pytest.mark.parametrize("kind", ["regular", "complete", "random"])
def test_the_graph_is_that_of_the_plan(tmp_path: Path, kind: str) -> None:
    shown = shown_in(write_graph_run(tmp_path / "run", graph=kind))
    beacon = SimStream(4).child("round", 0).child("beacon").generator().bytes(32)
    plan = Plan(kappa=4.0, neighbours=6.0, graph=kind, tau2=0.01)
    members = [2 * seat for seat in range(60)]
    assert shown.graph == plan.for_round(members, weights=1 / 60, records=1, beacon=beacon).graph
    assert shown.clients == tuple(map(str, members))
    assert shown.clients[shown.centre] == "14", "the client that was charged most"
    assert "is the one that was used" in graph_figure(shown)


@pytest.mark.slow
def test_the_graph_is_the_one_a_simulation_really_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import niss

    used: list[ShareGraph] = []
    original = Plan.for_round

    def watched(self: Plan, *given: Any, **more: Any) -> Any:
        made = original(self, *given, **more)
        used.append(made.graph)
        return made

    monkeypatch.setattr(Plan, "for_round", watched)
    settings = {
        "rounds": 2,
        "seed": 9,
        "data": {"clients": 24, "samples_per_client": 2},
        "model": {"hidden": [4]},
        "training": {"participants": 12, "epochs": 1},
        "methods": [{"name": "niss", "neighbours": 3}],
    }
    niss.run(niss.make_config(settings), out=tmp_path / "run")
    shown = shown_in(tmp_path / "run")
    assert (shown.round, shown.origin) == (2, "seed")
    assert shown.graph == used[-1]
    assert "protocol" not in json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])


def protocol_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *, rounds: int) -> list[ShareGraph]:
    """A run through the real protocol; returns the graphs its parties agreed on."""
    import niss
    from niss.session import server

    agreed: list[ShareGraph] = []
    original = server.agree

    def watched(opened: Any) -> Any:
        made = original(opened)
        agreed.append(made.graph)
        return made

    monkeypatch.setattr(server, "agree", watched)
    settings = {
        "rounds": rounds,
        "exchange": "protocol",
        "data": {"clients": 24, "samples_per_client": 2},
        "model": {"hidden": [4]},
        "training": {"participants": 12, "epochs": 1},
        # A given tau^2 promises nothing in advance, so no graph of so few can be refused for its cost.
        "methods": [{"name": "niss", "neighbours": 3, "tau2": 0.5}],
    }
    niss.run(niss.make_config(settings), out=folder)
    return agreed


def test_the_graph_of_the_protocol_is_the_one_it_agreed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    agreed = protocol_run(run, monkeypatch, rounds=2)
    shown = shown_in(run)
    assert (shown.round, shown.origin) == (2, "beacon")
    assert shown.graph == agreed[-1]
    assert shown.graph != agreed[0]
    assert "from the recorded beacon of the round" in graph_figure(shown)

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for change in ({"beacon": "00" * 32}, {"graph": "00" * 32}, {"terms": "33"}, None):
        lines[-1]["public"] = None if change is None else {**lines[0]["public"], **change}
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        other = shown_in(run)
        assert other.origin is None, "a record that does not fit its digest is not believed"


def test_a_resumed_run_of_the_protocol_records_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import niss
    from niss.simulation.method_run import CheckpointFolder

    saved, original = [], CheckpointFolder.save_checkpoint

    def killed(self: CheckpointFolder, rounds: int, tensors: dict[str, Any]) -> None:
        original(self, rounds, tensors)
        saved.append(rounds)
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointFolder, "save_checkpoint", killed)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        protocol_run(run, monkeypatch, rounds=3)
    before = (run / "metrics.jsonl").read_bytes()
    niss.resume(run)
    assert (run / "metrics.jsonl").read_bytes().startswith(before), "what was recorded stays as it is"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({line["public"]["beacon"] for line in lines}) == 3
    shown = shown_in(run)
    assert (shown.round, shown.origin) == (3, "beacon")


def test_a_large_round_is_shown_by_one_client_and_its_neighbours(tmp_path: Path) -> None:
    shown = shown_in(write_graph_run(tmp_path / "run", clients=80, neighbours=40.0))
    drawing, around = graph_figure(shown).split("<ul")[0], shown.graph.neighbours(shown.centre).size
    assert drawing.count('<g class="seat') == MOST_AROUND + 1
    assert drawing.count('<g class="seat centre"') == 1
    assert f"{MOST_AROUND} of the {around} clients" in " ".join(drawing.split())
    assert 'class="share sent"' in drawing


def test_colluders_are_marked_as_an_assumption(tmp_path: Path) -> None:
    shown = shown_in(write_graph_run(tmp_path / "run", clients=20, collusion=0.15))
    assert len(shown.colluders) == 3
    assert shown.centre not in shown.colluders
    assert graph_figure(shown).count("assumed to collude</title>") == 3
    assert "not clients seen to collude" in graph_figure(shown)


def test_drops_of_the_protocol_are_marked_and_its_graph_is_said_to_stand_in(tmp_path: Path) -> None:
    drawn = SimStream(4).child("round", 0).child("dropout").generator().random(20) < 0.3
    changes: dict[str, Any] = {"clients": 20, "exchange": "protocol", "dropout": 0.3}
    right = shown_in(write_graph_run(tmp_path / "right", dropped=int(drawn.sum()), **changes))
    assert right.dropped == {seat for seat in range(20) if drawn[seat]}
    assert graph_figure(right).count("dropped out</title>") == drawn.sum()
    assert right.origin is None
    assert "is not in its record" in graph_figure(right)
    wrong = shown_in(write_graph_run(tmp_path / "wrong", dropped=1 + int(drawn.sum()), **changes))
    assert not wrong.dropped, "seats that do not match the recorded number are not guessed"


def test_unequal_clients_and_missing_records_leave_the_graph_out(tmp_path: Path) -> None:
    assert (
        find_round_graph(read_report_input(write_graph_run(tmp_path / "declared", weights="declared")))
        is None
    )
    assert find_round_graph(read_report_input(write_graph_run(tmp_path / "records", unit="record"))) is None
    bare = write_graph_run(tmp_path / "bare")
    (bare / "ledger.jsonl").unlink()
    assert find_round_graph(read_report_input(bare)) is None
    damaged = write_graph_run(tmp_path / "damaged")
    (damaged / "ledger.jsonl").write_text("nonsense\n", encoding="utf-8")
    assert find_round_graph(read_report_input(damaged)) is None
