"""Exports for MLflow and Weights & Biases: what those tools read back is what the run recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from niss.errors import ConfigError, RunFolderError
from niss.report.export import TAGS, read_series
from niss.report.export_trackers import write_mlruns, write_wandb
from report.test_export import recorded


def metric(run: Path, tag: str) -> dict[int, float]:
    """Step and value, as MLflow's file store keeps them: time, value, step."""
    lines = [line.split(" ") for line in (run / "metrics" / tag).read_text().splitlines()]
    assert all(int(time) >= 0 for time, _, _ in lines)
    return {int(step): float(value) for _, value, step in lines}


def test_the_file_store_holds_what_the_run_recorded(demo: Path, tmp_path: Path) -> None:
    series = read_series([demo])
    runs = dict(zip([one.label for one in series], write_mlruns(series, tmp_path / "mlruns"), strict=True))
    assert len({run.parent for run in runs.values()}) == 1
    run = runs["niss-kappa-4"]
    lines = recorded(demo / "niss-kappa-4")
    for tag, key in (("accuracy", "accuracy"), ("noise/tau2", "tau2")):
        assert metric(run, tag) == {line["round"]: line[key] for line in lines if line[key] is not None}
    assert not (runs["dp-fedavg"] / "metrics" / "noise" / "tau2").exists()
    meta = yaml.safe_load((run / "meta.yaml").read_text())
    assert (meta["run_name"], meta["status"], meta["run_id"]) == ("niss-kappa-4", 3, run.name)
    assert meta["end_time"] >= meta["start_time"]
    experiment = yaml.safe_load((run.parent / "meta.yaml").read_text())
    assert (experiment["name"], experiment["experiment_id"]) == ("demo", run.parent.name)


def test_an_export_is_replaced_only_on_request_and_is_the_same_again(demo: Path, tmp_path: Path) -> None:
    series = read_series([demo])
    first = write_mlruns(series, tmp_path / "mlruns")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = first[0].parent / "somebody-elses"
    other.mkdir()
    with pytest.raises(RunFolderError, match="already exists"):
        write_mlruns(series, tmp_path / "mlruns")
    assert write_mlruns(series, tmp_path / "mlruns", overwrite=True) == first
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert other.exists()


def test_a_label_that_needs_quoting_stays_what_it_is(demo: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    odd = replace(read_series([demo])[0], label='a: "b" # c')
    (run,) = write_mlruns([odd], tmp_path)
    assert yaml.safe_load((run / "meta.yaml").read_text())["run_name"] == odd.label


def test_mlflow_reads_it(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    # Newer releases ask for this where a store is a folder.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    series = read_series([demo])
    write_mlruns(series, tmp_path / "mlruns")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "demo"]
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {one.label for one in series}
    history = client.get_metric_history(runs["niss-kappa-4"].info.run_id, TAGS["accuracy"])
    lines = recorded(demo / "niss-kappa-4")
    assert {one.step: one.value for one in history} == {
        line["round"]: line["accuracy"] for line in lines if line["accuracy"] is not None
    }


def test_wandb_writes_offline_runs(demo: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'niss[wandb]'")
    series = [one for one in read_series([demo]) if one.label == "niss-kappa-4"]
    (run,) = write_wandb(series, tmp_path / "wb")
    assert run.name.startswith("offline-run-")
    (kept,) = run.glob("*.wandb")
    content = kept.read_bytes()
    assert b"niss-kappa-4" in content
    assert b"accuracy" in content
    assert str(Path.home()).encode() not in content


def test_without_wandb_it_says_what_to_install(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="needs wandb") as raised:
        write_wandb(read_series([demo]), tmp_path)
    assert "niss[wandb]" in (raised.value.hint or "")
