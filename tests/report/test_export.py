"""`niss export`: what is read back is what the run recorded."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from niss.errors import ConfigError, RunFolderError
from niss.report.summary import COLUMNS, read_rows, write_csv
from report.conftest import ROUNDS
from report.test_round_graph import write


def recorded(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_epsilon_spent_comes_from_the_ledger(tmp_path: Path) -> None:
    from niss.accounting.ledger_file import LedgerFile

    run = write(tmp_path / "run", clients=20)
    ledger = LedgerFile.read(run / "ledger.jsonl")
    worst = ledger.epsilon(max(ledger.spent(client) for client in ledger.clients))
    [(*_, values)] = read_rows([run])
    assert values["epsilon_spent"] == pytest.approx(worst, rel=1e-12)


def test_a_damaged_ledger_exports_no_epsilon(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    (run / "ledger.jsonl").write_text("nonsense\n")
    [(_, _, number, values)] = read_rows([run])
    assert (number, values["epsilon_spent"], values["accuracy"]) == (1, None, 0.5)


def test_the_table_holds_a_line_for_each_round_of_each_method(demo: Path, tmp_path: Path) -> None:
    path = write_csv(read_rows([demo]), tmp_path / "m.csv")
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
    assert [run for run, *_ in read_rows([one, two])] == ["run", "run-2"]


def test_the_command_refuses_a_table_that_is_there(demo: Path, tmp_path: Path) -> None:
    from niss.cli.data import export_command

    with pytest.raises(ConfigError, match="nowhere to export"):
        export_command(folders=[demo])
    (tmp_path / "m.csv").write_text("mine")
    with pytest.raises(RunFolderError, match="exists") as refused:
        export_command(folders=[demo], csv=tmp_path / "m.csv")
    assert "--overwrite" in (refused.value.hint or "")
    assert (tmp_path / "m.csv").read_text() == "mine"
    export_command(folders=[demo], csv=tmp_path / "m.csv", overwrite=True)
    assert (tmp_path / "m.csv").read_text().startswith("run,method,round")


def test_reading_and_exporting_need_no_matplotlib(demo: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.modules['matplotlib'] = None; sys.modules['torch'] = None\n"
        "from niss.report import read_report_input, summary_rows\n"
        "from niss.report.summary import read_rows, write_csv\n"
        f"folder = Path({str(demo)!r}); print(len(summary_rows(read_report_input(folder)).rows))\n"
        f"write_csv(read_rows([folder]), Path({str(tmp_path / 'm.csv')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6"
    assert (tmp_path / "m.csv").is_file()
