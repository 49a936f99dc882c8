"""The report on the folder of an attack alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from niss.errors import RunFolderError
from niss.report import write_report

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def write_attack(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    values = {
        "attack": "joint",
        "niss": "0.1.0",
        "finished": True,
        "headline": "All uploads together give the picture away (17.3 dB).",
        "settings": {"image": "mnist-mini:0", "clients": 5, "epsilon": None, "dlg": {"iterations": 60}},
        "rows": [
            {"case": "τ = 0 <b>", "epsilon_joint": None, "psnr": 17.25, "label_found": True, "trace": [1, 2]},
            {"case": "calibrated", "epsilon_joint": 3.0, "psnr": 3.0, "label_found": False, "trace": []},
        ],
        "curves": {},
    } | changes
    (folder / "attack.json").write_text(json.dumps(values), encoding="utf-8")
    (folder / "attack.png").write_bytes(PNG)
    return folder


def test_it_shows_finding_picture_numbers_and_settings(tmp_path: Path) -> None:
    folder = write_attack(tmp_path / "a")
    page = write_report(folder)
    assert page == folder / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "All uploads together give the picture away" in text
    assert 'src="data:image/png;base64,' in text
    assert ">17.2</td>" in text
    assert ">no guarantee</td>" in text
    assert "τ = 0 &lt;b&gt;" in text
    assert "trace" not in text, "what does not fit into a cell is left out"
    assert "iterations 60" in text
    assert "<b>" not in text


def test_columns_have_the_headings_of_the_attack(tmp_path: Path) -> None:
    columns = {"case": "Case", "psnr": "PSNR, dB", "label_found": "Label <found>", "predicted": "Predicted"}
    text = write_report(write_attack(tmp_path / "a", columns=columns)).read_text(encoding="utf-8")
    head = text.partition("<thead>")[2].partition("</thead>")[0]
    assert head == (
        '<tr><th scope="col">Case</th><th scope="col">PSNR, dB</th><th scope="col">Label &lt;found&gt;</th></tr>'
    )
    assert "no guarantee" not in text, "a key without a heading is no column"


def test_without_headings_every_key_is_a_column(tmp_path: Path) -> None:
    text = write_report(write_attack(tmp_path / "a")).read_text(encoding="utf-8")
    assert '<th scope="col">label found</th>' in text


def test_an_interrupted_one_says_so(tmp_path: Path) -> None:
    folder = write_attack(tmp_path / "a", finished=False, headline="", rows=[])
    text = write_report(folder).read_text(encoding="utf-8")
    assert "Interrupted" in text
    assert "Nothing was found yet" in text


def test_it_stands_beside_runs_on_one_page(demo: Path, tmp_path: Path) -> None:
    page = write_report([demo, write_attack(tmp_path / "a")], tmp_path / "both.html")
    text = page.read_text(encoding="utf-8")
    assert "2 reports: demo, a" in text
    assert "<h2>Attack: joint</h2>" in text
    assert "Overview" in text
    alone = write_report([write_attack(tmp_path / "b"), tmp_path / "a"], tmp_path / "attacks.html")
    assert "Overview" not in alone.read_text(encoding="utf-8")


def test_an_attack_beside_a_run_is_part_of_its_report(demo: Path, tmp_path: Path) -> None:
    attack = write_attack(tmp_path / "a")
    for name in ("attack.json", "attack.png"):
        (demo / name).write_bytes((attack / name).read_bytes())
    text = write_report(demo).read_text(encoding="utf-8")
    assert "<h2>Attacks</h2>" in text
    assert "<h2>Accuracy</h2>" in text


@pytest.mark.parametrize("change", [{"rows": 3}, {"settings": []}, {"columns": ["case"]}])
def test_a_damaged_one_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(RunFolderError, match="does not contain the results of an attack"):
        write_report(write_attack(tmp_path / "a", **change))
