"""Pages on an attack alone, on several folders, and attacks that lie beside a run."""

from __future__ import annotations

import base64
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from niss.errors import ConfigError, RunFolderError
from niss.report import write_report

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAfbLI3wAAAABJRU5ErkJggg=="
)


def write_attack(folder: Path, picture: bytes = PNG, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
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
    (folder / "attack.png").write_bytes(picture)
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


@pytest.mark.parametrize("change", [{"rows": 3}, {"settings": []}, {"columns": ["case"]}])
def test_a_damaged_one_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(RunFolderError, match="does not contain the results of an attack"):
        write_report(write_attack(tmp_path / "a", **change))


def test_several_folders_make_one_page(demo: Path, run_folder: Path) -> None:
    out = write_report([demo, run_folder])
    assert out == demo.parent / "reports.html"
    text = out.read_text(encoding="utf-8")
    levels = [int(level) for level in re.findall(r"<h([1-6])>", text)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]+)"', text):
        assert target in ids
    assert text.count("<article") == 2
    assert "<h2>Overview</h2>" in text
    assert len(re.findall(r">single</td>", text)) == 1
    assert not re.search(r"<script|<link", text)


def test_one_folder_in_a_list_is_one_report(demo: Path, tmp_path: Path) -> None:
    assert write_report([demo]) == demo / "report.html"
    assert write_report([demo], tmp_path / "x.html") == tmp_path / "x.html"
    with pytest.raises(ConfigError, match="no folder"):
        write_report([])


def test_attacks_are_shown_with_their_words(demo: Path) -> None:
    write_attack(demo, attack="dlg", headline="PSNR: fedavg 74.0 dB <b>")
    write_attack(demo / "attacks" / "second", attack="dlg", finished=False)
    write_attack(demo / "niss-kappa-4" / "attacks" / "third")
    text = write_report(demo).read_text(encoding="utf-8")
    assert {"<h2>Attacks</h2>", "<h2>Accuracy</h2>"} <= set(re.findall("<h2>.*?</h2>", text))
    assert text.count("<img") == 3
    assert text.count('src="data:image/png;base64,') == 3
    assert 'alt="Pictures of the attack dlg. PSNR: fedavg 74.0 dB &lt;b&gt;' in text
    assert "dlg (attacks/second)" in text
    assert "This attack was interrupted" in text


def test_a_picture_that_is_none_is_left_out_and_said_to_be(demo: Path) -> None:
    write_attack(demo, b"<svg onload=alert(1)>")
    (demo / "attacks" / "broken").mkdir(parents=True)
    (demo / "attacks" / "broken" / "attack.json").write_text("{", encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    assert "<img" not in text
    assert "is not a PNG picture" in text
    assert "An attack was left out" in text


def test_a_page_without_attacks_has_no_such_section(demo: Path) -> None:
    assert "<h2>Attacks</h2>" not in write_report(demo).read_text(encoding="utf-8")


def test_limits_of_the_statement_are_listed_once(demo: Path) -> None:
    for name in ("niss-kappa-1", "niss-kappa-4"):
        statement = {"not_protected": ["that a client took part <now>"], "caveats": ["a simulation"]}
        (demo / name / "privacy.json").write_text(json.dumps(statement), encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    assert text.count("that a client took part &lt;now&gt;") == 1
    assert text.count("<li>a simulation</li>") == 1
