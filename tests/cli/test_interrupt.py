"""Ctrl-C: every command says what it kept, once, and ends with 130."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from niss.cli import main


def interrupt(*_arguments: Any, **_options: Any) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "line", "said"),
    [
        ("niss.accounting.planner.forecast", "plan --participants 12", ("keeps nothing",)),
        ("niss.data.fetch_dataset", "data get mnist", ("niss data get mnist",)),
        ("niss.data.fetch_dataset", "--quiet data get mnist", ("niss data get mnist",)),
        ("niss.simulation.runner.run", "run --out r", ("nothing was started",)),
        (
            "niss.simulation.runner.run",
            "run --out begun --overwrite",
            ("whole round is kept", "--resume begun"),
        ),
        ("niss.attacks.canary.canary_scores", "attack audit --rounds 200 --out a", ("a/report.html",)),
    ],
)
def test_a_command_says_what_it_kept(
    where: str,
    line: str,
    said: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that had begun can be resumed; an attack leaves an empty result, and a page that says why."""
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, interrupt)
    monkeypatch.setattr(sys, "argv", ["niss", *line.split()])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("interrupted") == 1
    for words in said:
        assert words in shown.err
    if "attack" in line:
        assert "Interrupted" in (tmp_path / "a" / "report.html").read_text()
        assert json.loads((tmp_path / "a" / "attack.json").read_text())["rows"] == []
        assert not (tmp_path / "a" / "attack.png").exists()
