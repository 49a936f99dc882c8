"""A run that was stopped at any moment goes on to the very same bytes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import niss
from niss.accounting.ledger_file import LedgerFile
from niss.files import CHECKPOINT
from niss.methods import METHODS
from niss.runs import RoundRecord
from niss.simulation import method_run
from niss.simulation.round import OpenRound
from support.federation import assert_resumes, assert_same_run, killed, small_config


def half_written(file: LedgerFile, line: bytes) -> bool:
    """The third charge gets half of its line onto the disk."""
    if len(file.entries) == 2:
        with file.path.open("ab") as end:
            end.write(line[: len(line) // 2])
    return len(file.entries) == 2


def third_checkpoint(path: Path, _content: bytes) -> bool:
    """It gets no further than its temporary file."""
    return path.name == CHECKPOINT and path.exists() and b'"rounds":"2"' in path.read_bytes()


def third_round(_folder: method_run.CheckpointFolder, record: RoundRecord, _seconds: float) -> bool:
    return record.round == 3


MOMENTS = {
    "inside charge": (LedgerFile, "_append", half_written),
    "before append": (method_run.CheckpointFolder, "append_round", third_round),
    "inside checkpoint": (method_run, "write_atomically", third_checkpoint),
    "before result": (method_run.MethodRun, "conclude", lambda _run: True),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("moment", [*MOMENTS, "after append"])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, monkeypatch, given, method, moment):
    config = small_config(methods=[{"name": method, "neighbours": 3}], privacy={"epsilon": 8.0, "clip": 1.0})
    after = moment == "after append"
    death = MOMENTS["before append" if after else moment]
    assert_resumes(tmp_path, config, given, monkeypatch, *death, after=after)


EIGHT = {"epsilon": 8.0, "clip": 1.0}
LOST = {**EIGHT, "dropout": 0.3}
STATES = {
    "clip": {"privacy": {"epsilon": 20.0, "clip": 4.0, "quantile": 0.5, "first_clip": 0.1}},
    "carried": {"methods": [{"carry": True}], "privacy": LOST},
    "closing": {
        "methods": [{"carry": True, "closing": True}],
        "privacy": {**LOST, "mode": "repair"},
    },
    **{
        f"{method}, {optimizer}": {
            "methods": [{"name": method}],
            "privacy": EIGHT,
            "training": {"participants": 6, "server_optimizer": optimizer, "server_rate": 0.1},
        }
        for method in ("niss", "niss-carried", "central-mf")
        for optimizer in ("momentum", "adam", "yogi")
    },
}


@pytest.mark.parametrize("moment", [1, 2, 3, "before append", "inside checkpoint"])
@pytest.mark.parametrize("state", STATES)
def test_what_rounds_remember_of_each_other_is_resumed(tmp_path, monkeypatch, given, state, moment):
    """The server's moments and the clip. What is carried is drawn again from seeds, as is who was lost before."""
    in_round = OpenRound, "finish", lambda opened, _uploads: opened.number == moment
    death = MOMENTS.get(moment, in_round)
    assert_resumes(tmp_path, small_config(**STATES[state]), given, monkeypatch, *death)


def test_the_separation_of_cohorts_is_kept_also_after_an_interruption(tmp_path, monkeypatch, given):
    training = {"participants": 3, "epochs": 1, "batch_size": 4, "learning_rate": 0.1}
    training |= {"sampling": "uniform", "separation": 3}
    config = small_config(rounds=8, training=training, methods=[{"name": "central-mf"}])
    cut = assert_resumes(tmp_path, config, given, monkeypatch, *MOMENTS["before append"])
    rounds = [set(entry.charges) for entry in LedgerFile.read(cut / "ledger.jsonl").entries]
    for number, cohort in enumerate(rounds):
        assert not any(cohort & earlier for earlier in rounds[max(number - 2, 0) : number])


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path, monkeypatch, given):
    config = small_config()
    niss.run(config, out=tmp_path / "whole", **given)
    with killed(monkeypatch, *MOMENTS["before append"], after=True):
        niss.run(config, out=tmp_path / "cut", **given)
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    niss.resume(tmp_path / "cut", **given)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_comparison_resumes_in_the_middle_of_a_method(tmp_path, monkeypatch, given):
    config = small_config(
        methods=[{"name": "fedavg"}, {"name": "niss", "neighbours": 3}, {"name": "dp-fedavg"}]
    )
    whole = niss.compare(config, out=tmp_path / "whole", **given)
    calls = itertools.count(1)
    with killed(monkeypatch, method_run, "begin_round", lambda *_: next(calls) == 7):
        niss.compare(config, out=tmp_path / "cut", **given)
    resumed = niss.resume(tmp_path / "cut", **given)
    assert resumed.summary == whole.summary
    for method in ("fedavg", "niss", "dp-fedavg"):
        assert_same_run(tmp_path / "whole" / method, tmp_path / "cut" / method)
    one, other = ((tmp_path / name / "summary.json").read_bytes() for name in ("whole", "cut"))
    assert one == other


@pytest.mark.parametrize("exchange", ["simulated", "protocol"])
def test_resuming_a_finished_run_changes_nothing(tmp_path, given, exchange):
    first = niss.run(small_config(exchange=exchange), out=tmp_path / "a", **given)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    again = niss.resume(tmp_path / "a", **given)
    assert again.summary == first.summary
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_run_is_never_overwritten_unasked(tmp_path, given):
    niss.run(small_config(), out=tmp_path / "a", **given)
    with pytest.raises(niss.errors.RunFolderError, match="already holds a run"):
        niss.run(small_config(), out=tmp_path / "a", **given)
    niss.run(small_config(seed=9), out=tmp_path / "a", overwrite=True, **given)
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["seed"] == 9


def test_a_folder_with_other_things_is_left_alone(tmp_path, given):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(niss.errors.RunFolderError, match="does not hold a run"):
        niss.run(small_config(), out=tmp_path, overwrite=True, **given)
    assert (tmp_path / "thesis.tex").read_text() == "ten years of work"


def test_resuming_with_other_data_or_a_damaged_folder_is_refused(tmp_path, given):
    niss.run(small_config(), out=tmp_path / "a", **given)
    fewer = [(inputs[:-1], labels[:-1]) for inputs, labels in given["clients"]]
    with pytest.raises(niss.errors.RunFolderError, match="other data"):
        niss.resume(tmp_path / "a", **{**given, "clients": fewer})
    with pytest.raises(niss.errors.RunFolderError, match="another model"):
        niss.resume(tmp_path / "a", **{**given, "model": nn.Linear(5, 3, dtype=torch.float64)})
    (tmp_path / "a" / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(niss.errors.RunFolderError, match="damaged"):
        niss.resume(tmp_path / "a", **given)
    (tmp_path / "a" / "manifest.json").write_text("{}")
    with pytest.raises(niss.errors.RunFolderError, match="not the manifest of a run"):
        niss.resume(tmp_path / "a", **given)


def test_the_folder_holds_what_the_documentation_says(tmp_path, given):
    result = niss.run(small_config(), out=tmp_path / "a", **given)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {
        *(
            "manifest.json",
            "metrics.jsonl",
            "ledger.jsonl",
            "timing.jsonl",
            "diagnostics.jsonl",
            "privacy.json",
        ),
        *("model.safetensors", "checkpoint.safetensors", "result.json"),
    }
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["precision"] == "float32"
    assert manifest["config"]["rounds"] == 4
    assert set(manifest["versions"]) == {"niss", "numpy", "python", "torch"}
    ledger = LedgerFile.read(tmp_path / "a" / "ledger.jsonl")
    assert [entry.round for entry in ledger.entries] == [1, 2, 3, 4]
    for client in result.statement.clients:
        assert ledger.participations(str(client.client)) == client.participations
        assert ledger.spent(str(client.client)) == pytest.approx(client.mu_joint)
        assert ledger.spent_alone(str(client.client)) == pytest.approx(client.mu_marginal)
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    stated = json.loads((tmp_path / "a" / "privacy.json").read_text())
    assert stated["epsilon_joint"] == result.summary["epsilon_joint"]


def test_a_ledger_without_its_rounds_is_not_resumed(tmp_path, monkeypatch, given):
    with killed(monkeypatch, *MOMENTS["inside checkpoint"]):
        niss.run(small_config(), out=tmp_path, **given)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(
        niss.errors.RunFolderError, match="has 1 rounds, but the checkpoint was made after round 2"
    ):
        niss.resume(tmp_path, **given)
    path.write_bytes(b"".join([lines[0], lines[2], lines[1]]))
    with pytest.raises(niss.errors.PrivacyError, match="line 2"):
        niss.resume(tmp_path, **given)


def test_rounds_without_a_guarantee_are_null_in_the_ledger(tmp_path, given):
    niss.run(small_config(methods=[{"name": "fedavg"}]), out=tmp_path / "a", **given)
    lines = (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()
    assert (json.loads(lines[0])["numbered"], json.loads(lines[0])["each"]) == (12, None)
    assert all(charge is None for line in lines[1:] for charge in json.loads(line)["charges"].values())
