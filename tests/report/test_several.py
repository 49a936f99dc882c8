"""Pages on several folders, attacks that lie beside a run, and the values under the pointer."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from niss.errors import ConfigError
from niss.report import read_report_input, write_report
from niss.report.canvas import MOST_BANDS
from niss.report.method_charts import accuracy_figure

SVG = "{http://www.w3.org/2000/svg}"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYGD4DwABBAEAfbLI3wAAAABJRU5ErkJggg=="
)


def add_attack(folder: Path, picture: bytes | None = PNG, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"attack": "dlg", "headline": "PSNR: fedavg 74.0 dB <b>", "finished": True} | changes
    (folder / "attack.json").write_text(json.dumps(values), encoding="utf-8")
    if picture is not None:
        (folder / "attack.png").write_bytes(picture)


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
    add_attack(demo)
    add_attack(demo / "attacks" / "second", finished=False)
    add_attack(demo / "niss-kappa-4" / "attacks" / "third")
    text = write_report(demo).read_text(encoding="utf-8")
    assert text.count("<img") == 3
    assert text.count('src="data:image/png;base64,') == 3
    assert 'alt="Pictures of the attack dlg. PSNR: fedavg 74.0 dB &lt;b&gt;' in text
    assert "dlg (attacks/second)" in text
    assert "This attack was interrupted" in text


def test_a_picture_that_is_none_is_left_out_and_said_to_be(demo: Path) -> None:
    add_attack(demo, b"<svg onload=alert(1)>")
    (demo / "attacks" / "broken").mkdir(parents=True)
    (demo / "attacks" / "broken" / "attack.json").write_text("{", encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    assert "<img" not in text
    assert "is not a PNG picture" in text
    assert "An attack was left out" in text


def test_a_page_without_attacks_has_no_such_section(demo: Path) -> None:
    assert "<h2>Attacks</h2>" not in write_report(demo).read_text(encoding="utf-8")


def bands(svg: str) -> list[list[str]]:
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return [
        [text.text or "" for text in group.iter(f"{SVG}text")]
        for group in groups
        if group.get("class") == "band"
    ]


def test_every_evaluated_round_can_be_read_off_the_highest_first(demo: Path) -> None:
    report = read_report_input(demo)
    found = bands(accuracy_figure(report))
    assert len(found) == len(report.methods[0].evaluations)
    last = found[-1]
    assert last[0] == "Round 30"
    assert last[1] == "85.0 %  fedavg"
    shown = [float(line.split(" ")[0]) for line in last[1:]]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == 6


def test_a_long_run_has_no_more_bands_than_can_be_pointed_at(compare: Callable[..., Path]) -> None:
    folder = compare({})
    lines = [json.dumps({"round": number, "accuracy": 0.5}) for number in range(1, 1001)]
    for path in folder.glob("*/metrics.jsonl"):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = bands(accuracy_figure(read_report_input(folder)))
    assert len(found) == MOST_BANDS
    assert (found[0][0], found[-1][0]) == ("Round 1", "Round 1000")


def test_limits_of_the_statement_are_listed_once(demo: Path) -> None:
    for name in ("niss-kappa-1", "niss-kappa-4"):
        statement = {"not_protected": ["that a client took part <now>"], "caveats": ["a simulation"]}
        (demo / name / "privacy.json").write_text(json.dumps(statement), encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    assert text.count("that a client took part &lt;now&gt;") == 1
    assert text.count("<li>a simulation</li>") == 1
