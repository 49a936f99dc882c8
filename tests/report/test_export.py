"""`niss export`: what TensorBoard and a table read back is what the run recorded."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from niss.errors import ConfigError, RunFolderError
from niss.report.export import COLUMNS, TAGS, read_series, write_csv, write_event_files
from report.conftest import ROUNDS
from report.test_round_graph import write


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag, round, value, as TensorBoard itself reads the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: {one.step: one.value for one in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def recorded(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_reads_what_the_run_recorded(demo: Path, tmp_path: Path) -> None:
    written = write_event_files(read_series([demo]), tmp_path / "tb")
    assert len(written) == 6
    found = scalars(tmp_path / "tb" / "demo" / "niss-kappa-4")
    lines = recorded(demo / "niss-kappa-4")
    for tag, key in (
        ("accuracy", "accuracy"),
        ("loss", "loss"),
        ("noise/tau2", "tau2"),
        ("noise/variance_measured", "aggregate_variance"),
        ("noise/variance_predicted", "aggregate_variance_predicted"),
    ):
        values = {line["round"]: line[key] for line in lines if line[key] is not None}
        assert found[tag] == pytest.approx(values, rel=1e-6), tag
    assert len(found["accuracy"]) < ROUNDS, "rounds without an evaluation have no accuracy"
    assert "noise/tau2" not in scalars(tmp_path / "tb" / "demo" / "dp-fedavg")


def test_epsilon_spent_comes_from_the_ledger(tmp_path: Path) -> None:
    from niss.accounting.ledger_file import LedgerFile

    run = write(tmp_path / "run", clients=20)
    write_event_files(read_series([run]), tmp_path / "tb")
    ledger = LedgerFile.read(run / "ledger.jsonl")
    worst = ledger.epsilon(max(ledger.spent(client) for client in ledger.clients))
    assert scalars(tmp_path / "tb" / "run")["privacy/epsilon_spent"] == {1: pytest.approx(worst, rel=1e-6)}


def test_a_damaged_ledger_exports_no_epsilon(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    (run / "ledger.jsonl").write_text("nonsense\n")
    [series] = read_series([run])
    assert series.rounds[1]["epsilon_spent"] is None
    assert series.rounds[1]["accuracy"] == 0.5


def test_the_same_run_gives_the_same_bytes(demo: Path, tmp_path: Path) -> None:
    first = write_event_files(read_series([demo]), tmp_path / "one")
    second = write_event_files(read_series([demo]), tmp_path / "two")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert [path.name for path in first] == [path.name for path in second]


def test_nothing_is_overwritten_unasked(demo: Path, tmp_path: Path) -> None:
    [first, *_] = write_event_files(read_series([demo]), tmp_path)
    before = first.read_bytes()
    with pytest.raises(RunFolderError, match="exists") as refused:
        write_event_files(read_series([demo]), tmp_path)
    assert "--overwrite" in (refused.value.hint or "")
    assert first.read_bytes() == before
    beside = first.parent / "mine.txt"
    beside.write_text("mine")
    write_event_files(read_series([demo]), tmp_path, overwrite=True)
    assert len(list(first.parent.glob("*tfevents*"))) == 1, "a second file would show every point twice"
    assert beside.read_text() == "mine"


def test_the_table_holds_a_line_for_each_round_of_each_method(demo: Path, tmp_path: Path) -> None:
    path = write_csv(read_series([demo]), tmp_path / "m.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * ROUNDS
    assert list(rows[0]) == ["run", "method", "round", *COLUMNS]
    lines = recorded(demo / "niss-kappa-1")
    mine = [row for row in rows if row["method"] == "niss-kappa-1"]
    for row, line in zip(mine, lines, strict=True):
        assert row["accuracy"] == ("" if line["accuracy"] is None else repr(line["accuracy"]))
        assert float(row["noise_variance_measured"]) == line["aggregate_variance"]


def test_runs_of_the_same_name_are_kept_apart(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a" / "run"), write(tmp_path / "b" / "run")
    assert [series.run for series in read_series([one, two])] == ["run", "run-2"]


def test_a_label_cannot_lead_out_of_the_folder(demo: Path, tmp_path: Path) -> None:
    summary = json.loads((demo / "summary.json").read_text())
    summary["methods"][0]["label"] = "../../elsewhere"
    (demo / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(RunFolderError, match="cannot be the name of a folder"):
        write_event_files(read_series([demo]), tmp_path / "deep" / "tb")


def test_every_column_has_a_tag() -> None:
    assert tuple(TAGS) == COLUMNS
    assert len(set(TAGS.values())) == len(COLUMNS)


def test_the_command_names_what_is_missing(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from niss.cli.data import export_command

    with pytest.raises(ConfigError, match="nowhere to export"):
        export_command(folders=[demo])
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match="needs tensorboard") as refused:
        export_command(folders=[demo], tensorboard=tmp_path / "tb")
    assert refused.value.hint == "pip install 'niss[tensorboard]'"
    assert not (tmp_path / "tb").exists()


def test_the_command_refuses_a_table_that_is_there(demo: Path, tmp_path: Path) -> None:
    from niss.cli.data import export_command

    (tmp_path / "m.csv").write_text("mine")
    with pytest.raises(RunFolderError, match="exists"):
        export_command(folders=[demo], csv=tmp_path / "m.csv", tensorboard=tmp_path / "tb")
    assert (tmp_path / "m.csv").read_text() == "mine"
    assert not (tmp_path / "tb").exists()
    export_command(folders=[demo], csv=tmp_path / "m.csv", overwrite=True)
    assert (tmp_path / "m.csv").read_text().startswith("run,method,round")


def test_reading_and_exporting_need_no_matplotlib(demo: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.modules['matplotlib'] = None; sys.modules['torch'] = None\n"
        "from niss.report import read_report_input, summary_rows\n"
        "from niss.report.export import read_series, write_csv\n"
        f"folder = Path({str(demo)!r}); print(len(summary_rows(read_report_input(folder)).rows))\n"
        f"write_csv(read_series([folder]), Path({str(tmp_path / 'm.csv')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6"
    assert (tmp_path / "m.csv").is_file()
