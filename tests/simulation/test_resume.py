"""A run that was stopped at any moment goes on to the very same bytes."""

from __future__ import annotations

import json
import sys

import pytest

import niss
from niss.accounting.ledger_file import LedgerFile
from niss.methods import METHODS
from niss.simulation import compare_together, make_config, method_run
from niss.simulation.config import with_overrides
from support.federation import small_config

SAME_BYTES = (
    "metrics.jsonl",
    "ledger.jsonl",
    "model.safetensors",
    "privacy.json",
    "result.json",
    "checkpoint.safetensors",
)
MOMENTS = ("inside charge", "before append", "after append", "inside checkpoint", "before result")


class Killed(BaseException):
    """Stands for kill -9: nothing in the product may catch it."""


@pytest.fixture
def materials(datasets, held_out, linear):
    return {"model": linear, "clients": datasets, "test": held_out}


def assert_same_run(one, other):
    for name in SAME_BYTES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_uninterrupted(tmp_path, monkeypatch, materials, method, moment):
    config = small_config(methods=[{"name": method, "neighbours": 3}], privacy={"epsilon": 8.0, "clip": 1.0})
    niss.run(config, out=tmp_path / "whole", **materials)

    with monkeypatch.context() as patch:
        _kill_at(patch, moment)
        with pytest.raises(Killed):
            niss.run(config, out=tmp_path / "cut", **materials)
    assert not (tmp_path / "cut" / "result.json").exists()
    niss.resume(tmp_path / "cut", **materials)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("method", ["niss", "niss-carried", "central-mf"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
def test_what_the_server_remembers_is_resumed(tmp_path, monkeypatch, materials, method, optimizer):
    config = with_overrides(
        small_config(methods=[{"name": method}], privacy={"epsilon": 8.0, "clip": 1.0}),
        {"training.server_optimizer": optimizer, "training.server_rate": 0.1},
    )
    niss.run(config, out=tmp_path / "whole", **materials)
    with monkeypatch.context() as patch:
        _kill_at(patch, "inside checkpoint")
        with pytest.raises(Killed):
            niss.run(config, out=tmp_path / "cut", **materials)
    niss.resume(tmp_path / "cut", **materials)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_folders_that_lack_newer_settings_are_continued(tmp_path, monkeypatch):
    """Versions before the server had optimisers wrote neither the settings nor the state."""
    config = make_config(
        {"rounds": 3, "data": {"clients": 20, "samples_per_client": 5}, "training": {"participants": 4}}
    )
    compare_together({"one": config}, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        _kill_at(patch, "after append")
        with pytest.raises(Killed):
            compare_together({"one": config}, out=tmp_path / "cut")
    for path in (tmp_path / "cut").rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        for name in ("optimizer", "momentum", "beta2", "epsilon"):
            manifest["config"]["training"].pop(f"server_{name}", None)
        path.write_text(json.dumps(manifest))
    compare_together({"one": config}, out=tmp_path / "cut")
    assert_same_run(tmp_path / "whole" / "one" / "niss", tmp_path / "cut" / "one" / "niss")


def _kill_at(patch, moment):
    append, write = method_run.CheckpointFolder.append_round, method_run.write_atomically
    charge, conclude = LedgerFile._append, method_run.MethodRun.conclude

    def dying_charge(self, line):
        if moment == "inside charge" and len(self.entries) == 2:
            with self.path.open("ab") as file:
                file.write(line[: len(line) // 2])
            raise Killed
        charge(self, line)

    def dying_append(self, metrics, seconds):
        if metrics.round == 3 and moment == "before append":
            raise Killed
        append(self, metrics, seconds)
        if metrics.round == 3 and moment == "after append":
            raise Killed

    def dying_write(path, content):
        # The third checkpoint gets no further than its temporary file.
        third = path.name == method_run.CHECKPOINT and path.exists() and b'"rounds":"2"' in path.read_bytes()
        if moment == "inside checkpoint" and third:
            raise Killed
        write(path, content)

    def dying_conclude(*arguments):
        if moment == "before result":
            raise Killed
        return conclude(*arguments)

    patch.setattr(LedgerFile, "_append", dying_charge)
    patch.setattr(method_run.CheckpointFolder, "append_round", dying_append)
    patch.setattr(method_run, "write_atomically", dying_write)
    patch.setattr(method_run.MethodRun, "conclude", dying_conclude)


def test_a_line_cut_short_by_a_crash_is_dropped(tmp_path, monkeypatch, materials):
    config = small_config()
    niss.run(config, out=tmp_path / "whole", **materials)
    with monkeypatch.context() as patch:
        _kill_at(patch, "after append")
        with pytest.raises(Killed):
            niss.run(config, out=tmp_path / "cut", **materials)
    path = tmp_path / "cut" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    niss.resume(tmp_path / "cut", **materials)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_comparison_resumes_in_the_middle_of_a_method(tmp_path, monkeypatch, materials):
    config = small_config(
        methods=[{"name": "fedavg"}, {"name": "niss", "neighbours": 3}, {"name": "dp-fedavg"}]
    )
    whole = niss.compare(config, out=tmp_path / "whole", **materials)
    calls = 0
    # `niss.simulation.run` is also the name of the function.
    run_module = sys.modules["niss.simulation.run"]
    original = run_module.begin_round

    def dying(*arguments):
        nonlocal calls
        calls += 1
        if calls == 7:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "begin_round", dying)
        with pytest.raises(Killed):
            niss.compare(config, out=tmp_path / "cut", **materials)
    resumed = niss.resume(tmp_path / "cut", **materials)
    assert resumed.summary == whole.summary
    for method in ("fedavg", "niss", "dp-fedavg"):
        assert_same_run(tmp_path / "whole" / method, tmp_path / "cut" / method)
    assert (tmp_path / "whole" / "summary.json").read_bytes() == (
        tmp_path / "cut" / "summary.json"
    ).read_bytes()


def test_resuming_a_finished_run_changes_nothing(tmp_path, materials):
    first = niss.run(small_config(), out=tmp_path / "a", **materials)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    again = niss.resume(tmp_path / "a", **materials)
    assert again.summary == first.summary
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_run_is_never_overwritten_unasked(tmp_path, materials):
    niss.run(small_config(), out=tmp_path / "a", **materials)
    with pytest.raises(niss.errors.RunFolderError, match="already holds a run"):
        niss.run(small_config(), out=tmp_path / "a", **materials)
    niss.run(small_config(seed=9), out=tmp_path / "a", overwrite=True, **materials)
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["seed"] == 9


def test_a_folder_with_other_things_is_left_alone(tmp_path, materials):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(niss.errors.RunFolderError, match="does not hold a run"):
        niss.run(small_config(), out=tmp_path, overwrite=True, **materials)
    assert (tmp_path / "thesis.tex").read_text() == "ten years of work"


def test_resuming_with_other_data_or_a_damaged_folder_is_refused(tmp_path, materials):
    niss.run(small_config(), out=tmp_path / "a", **materials)
    fewer = [(inputs[:-1], labels[:-1]) for inputs, labels in materials["clients"]]
    with pytest.raises(niss.errors.RunFolderError, match="other data"):
        niss.resume(tmp_path / "a", **{**materials, "clients": fewer})
    (tmp_path / "a" / "checkpoint.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(niss.errors.RunFolderError, match="damaged"):
        niss.resume(tmp_path / "a", **materials)
    (tmp_path / "a" / "manifest.json").write_text("{}")
    with pytest.raises(niss.errors.RunFolderError, match="not the manifest of a run"):
        niss.resume(tmp_path / "a", **materials)


def test_the_folder_holds_what_the_documentation_says(tmp_path, materials):
    result = niss.run(small_config(), out=tmp_path / "a", **materials)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {
        "manifest.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "timing.jsonl",
        "diagnostics.jsonl",
        "privacy.json",
        "model.safetensors",
        "checkpoint.safetensors",
        "result.json",
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
        assert ledger.spent(str(client.client), view="marginal") == pytest.approx(client.mu_marginal)
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4]
    assert (
        json.loads((tmp_path / "a" / "privacy.json").read_text())["epsilon_joint"]
        == result.summary["epsilon_joint"]
    )


def test_a_ledger_without_its_rounds_is_not_resumed(tmp_path, monkeypatch, materials):
    with monkeypatch.context() as patch:
        _kill_at(patch, "inside checkpoint")
        with pytest.raises(Killed):
            niss.run(small_config(), out=tmp_path, **materials)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(
        niss.errors.RunFolderError, match="has 1 rounds, but the checkpoint was made after round 2"
    ):
        niss.resume(tmp_path, **materials)
    path.write_bytes(b"".join([lines[0], lines[2], lines[1]]))
    with pytest.raises(niss.errors.PrivacyError, match="line 2"):
        niss.resume(tmp_path, **materials)


def test_rounds_without_a_guarantee_are_null_in_the_ledger(tmp_path, materials):
    niss.run(small_config(methods=[{"name": "fedavg"}]), out=tmp_path / "a", **materials)
    lines = (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["budgets"]["0"] is None
    assert all(mu["mu_joint"] is None for line in lines[1:] for mu in json.loads(line)["mus"].values())
